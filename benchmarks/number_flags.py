"""Flags of benchmarks that take a number, or several of which each is measured."""

import argparse

__all__ = ["add_number", "add_numbers"]


def add_number(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    """Adds a flag that takes a number.

    Args:
        parser: gets the flag.
        name: the flag, with its dashes.
        default: its value without it.
        text: its meaning; the default is appended.
    """
    shown = f"{text} (default: %(default)s)"
    parser.add_argument(name, type=int, default=default, metavar="N", help=shown)


def add_numbers(parser: argparse.ArgumentParser, name: str, default: list[int], text: str) -> None:
    """Adds a flag that takes several numbers; the arguments are those of `add_number`."""
    shown = f"{text} (default: {' '.join(map(str, default))})"
    parser.add_argument(name, type=int, nargs="+", default=default, metavar="N", help=shown)
