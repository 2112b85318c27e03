"""Parsers of flag values; argparse shows their errors verbatim."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from baton.common.flags.sizes import parse_byte_size, parse_count

__all__ = ["CollectTexts", "byte_size", "byte_size_with_unit", "count", "gibibytes"]


_MAX_GIBIBYTES = 2.0**33  # 2**63 bytes


def byte_size(text: str) -> int:
    """Parses a flag's number of bytes, such as 512MiB, 2G or 4096."""
    return _checked(parse_byte_size, text)


def byte_size_with_unit(text: str) -> int:
    """Parses a number of bytes that must have a unit, as another program counts in GiB."""
    if text.strip().isdecimal() and int(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no unit; write {text}GiB, or {text}B for bytes"
        )
    return byte_size(text)


def gibibytes(text: str) -> int:
    """Parses a number of GiB, such as 4 or 0.5, into bytes."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MAX_GIBIBYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB, such as 4 or 0.5")
    return int(number * 2**30)


def count(text: str) -> int:
    """Parses a flag's number of tokens, such as 4096, 4k (4000) or 4K (4096)."""
    return _checked(parse_count, text)


def _checked(parse: Callable[[str], int], text: str) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class CollectTexts(argparse.Action):
    """Collects the values of a flag that may be repeated, and splits them at commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Adds values to those of earlier uses; the first use replaces the default."""
        earlier = getattr(namespace, self.dest, self.default)
        texts = [values] if isinstance(values, str) else values
        parts = [part.strip() for text in texts for part in _split(text)]
        kept = () if earlier is self.default else earlier
        setattr(namespace, self.dest, (*kept, *(part for part in parts if part)))


def _split(text: str) -> Sequence[str]:
    """Splits a text at commas, or reads it as a JSON list of texts, which vLLM's flags take."""
    try:
        values = json.loads(text)
    except ValueError:
        return text.split(",")
    is_list = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return values if is_list else text.split(",")
