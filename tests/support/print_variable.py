"""Prints an environment variable, empty if it is unset; `baton.common.module_process` runs it."""

import os
import sys

print(os.environ.get(sys.argv[1], ""))
