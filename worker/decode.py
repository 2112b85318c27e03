"""`baton decode`, or `python -m worker.decode`: a worker that starts in the decode tier."""

import argparse
import sys

from baton.common.flags.parser import FlagParser
from engine.request import Role
from worker import server

__all__ = ["add_args", "main"]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    server.add_args(parser, Role.DECODE)


def main(args: argparse.Namespace) -> int:
    """Runs one decode worker: takes handed-over KV and streams tokens to routers.

    `baton role` changes its tier while it runs.
    """
    return server.run_worker(args, Role.DECODE)


if __name__ == "__main__":
    parser = FlagParser.of_command("python -m worker.decode", main, add_args)
    sys.exit(main(parser.parse_args()))
