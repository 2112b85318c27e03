"""`python -m tests.support.baton_command` is the command `baton`, as a module that can fork."""

import sys

from baton.cli import main

if __name__ == "__main__":
    sys.exit(main())
