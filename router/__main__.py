"""`python -m router`: one router."""

import argparse
import sys

from router.server import add_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m router", description=main.__doc__)
    add_args(parser)
    sys.exit(main(parser.parse_args()))
