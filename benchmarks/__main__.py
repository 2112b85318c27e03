"""`python -m benchmarks SUBCOMMAND` is `baton bench SUBCOMMAND`."""

import sys

from baton.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
