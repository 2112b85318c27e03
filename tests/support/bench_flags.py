"""Parses the flags of a benchmark without running it."""

import argparse
from collections.abc import Sequence

from benchmarks.cli import add_args


def parse_bench(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed arguments of `baton bench`."""
    parser = argparse.ArgumentParser()
    add_args(parser)
    return parser.parse_args(arguments)
