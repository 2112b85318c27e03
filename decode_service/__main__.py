"""`python -m decode_service`: one decode replica."""

import argparse
import sys

from decode_service.server import add_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m decode_service", description=main.__doc__)
    add_args(parser)
    sys.exit(main(parser.parse_args()))
