"""`python -m prefill_service`: one prefill replica."""

import argparse
import sys

from prefill_service.server import add_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m prefill_service", description=main.__doc__)
    add_args(parser)
    sys.exit(main(parser.parse_args()))
