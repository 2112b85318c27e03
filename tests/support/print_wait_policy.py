"""A child of `baton.up.child` that says how OpenMP's threads wait in it."""

import os

print(os.environ["OMP_WAIT_POLICY"])
