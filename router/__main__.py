"""`python -m router`: one router."""

import sys

from baton.common.flags.parser import FlagParser
from router.server import add_args, main

if __name__ == "__main__":
    parser = FlagParser.of_command("python -m router", main, add_args)
    sys.exit(main(parser.parse_args()))
