"""Parsers of flag values, such as `512MiB`; argparse shows their errors verbatim. Pure."""

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

__all__ = [
    "CollectTexts",
    "auto_or_count",
    "auto_or_number",
    "byte_size",
    "byte_size_with_unit",
    "count",
    "format_byte_size",
    "gibibytes",
    "names",
    "parse_byte_size",
    "parse_count",
]

_PREFIXES = "kmgt"
_UNIT_BYTES = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate(_PREFIXES)},
    **{f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate(_PREFIXES)},
}
_SUFFIXES = {
    "": 1,
    **{prefix: 1000 ** (power + 1) for power, prefix in enumerate(_PREFIXES)},
    **{prefix.upper(): 1024 ** (power + 1) for power, prefix in enumerate(_PREFIXES)},
}
"""Suffixes, as in vLLM's flags: `k` is 1000, `K` is 1024."""

_SIZE = re.compile(r"\s*([0-9]+(?:[.][0-9]+)?(?:e[+]?[0-9]{1,2})?)\s*([a-z]*)\s*", re.IGNORECASE)
_MAX_GIBIBYTES = 2.0**33  # 2**63 bytes


def parse_byte_size(text: str) -> int:
    """Returns the number of bytes that `text` means.

    It is a number, alone or with B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB or TiB (powers
    of 1024), in upper or lower case, or with one letter as in `parse_count`.

    Raises:
        ValueError: anything else; names the text and the accepted forms.
    """
    match = _SIZE.fullmatch(text)
    unit = match[2] if match else ""
    factor = _SUFFIXES.get(unit) or _UNIT_BYTES.get(unit.lower())
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a byte size; write it like 512MiB, 2GiB, 1e9 or 4096")
    return int(Decimal(match[1]) * factor)


def parse_count(text: str) -> int:
    """Returns the whole number that `text` means.

    It is a number, alone or with k, m, g, t (powers of 1000) or K, M, G, T (powers of 1024).

    Raises:
        ValueError: anything else, such as a fraction; names the text and the accepted forms.
    """
    match = _SIZE.fullmatch(text.removeprefix("-"))
    factor = _SUFFIXES.get(match[2]) if match else None
    number = Decimal(match[1]) * factor if match and factor else Decimal("0.5")
    if number != int(number):
        raise ValueError(
            f"{text!r} is not a whole number; write it like 4096, 4k (4000) or 4K (4096)"
        )
    return -int(number) if text.startswith("-") else int(number)


def format_byte_size(num_bytes: int) -> str:
    """Returns the shortest exact text of a size: `256MiB`, or `1000B`."""
    for power in range(len(_PREFIXES), 0, -1):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{_PREFIXES[power - 1].upper()}iB"
    return f"{num_bytes}B"


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


def auto_or_count(text: str) -> str | int:
    """Parses auto, or a whole number as `parse_count` takes it."""
    return text if text == "auto" else count(text)


def auto_or_number(text: str) -> str | float:
    """Parses auto, or a number such as 100 or 2.5."""
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number") from None


def names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Returns names as a tuple; a flag's text has them separated by commas."""
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(part.strip() for part in parts if part.strip())


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
