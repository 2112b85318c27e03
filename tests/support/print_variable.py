"""A child of `worker.processes.child` that prints an environment variable, empty if it is unset."""

import os
import sys

print(os.environ.get(sys.argv[1], ""))
