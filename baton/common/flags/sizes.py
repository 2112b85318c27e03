"""Sizes as people write them: `512MiB` of memory, `4k` tokens. Pure."""

import re
from decimal import Decimal

__all__ = ["format_byte_size", "parse_byte_size", "parse_count"]

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
