"""`baton prefill`, or `python -m worker.prefill`: a worker that starts in the prefill tier."""

import argparse
import sys

from baton.common.flags.parser import FlagParser
from engine.request import Role
from worker import server

__all__ = ["add_args", "main"]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    server.add_args(parser, Role.PREFILL)


def main(args: argparse.Namespace) -> int:
    """Runs one prefill worker: computes prompts and hands their KV over through the connector.

    `baton role` changes its tier while it runs.
    """
    return server.run_worker(args, Role.PREFILL)


if __name__ == "__main__":
    parser = FlagParser.of_command("python -m worker.prefill", main, add_args)
    sys.exit(main(parser.parse_args()))
