"""`python3 -m benchmarks.gpu` is `baton bench gpu`."""

import sys

from baton.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "gpu", *sys.argv[1:]]))
