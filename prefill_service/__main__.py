"""`python -m prefill_service`: one prefill replica."""

import sys

from baton.flag_parser import FlagParser
from prefill_service.server import add_args, main

if __name__ == "__main__":
    parser = FlagParser.of_command("python -m prefill_service", main, add_args)
    sys.exit(main(parser.parse_args()))
