"""A child of `baton.up.child` that prints its wait policy for OpenMP threads."""

import os

print(os.environ["OMP_WAIT_POLICY"])
