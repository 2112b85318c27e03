"""`parse_byte_size`: byte counts as people write them, 512MiB or 1e9. Pure."""

import re
from decimal import Decimal

__all__ = ["parse_byte_size"]

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate("kmgt")},
    **{f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgt")},
}
_PATTERN = re.compile(r"\s*([0-9]+(?:[.][0-9]+)?(?:e[+]?[0-9]{1,2})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_byte_size(text: str) -> int:
    """Bytes in `text`: a number, alone or with B, KB, MB, GB, TB (powers of
    1000), KiB, MiB, GiB or TiB (powers of 1024), in any case.

    Raises:
        ValueError: anything else; names the text and the accepted forms.
    """
    match = _PATTERN.fullmatch(text)
    if match is None or match[2].lower() not in _UNIT_BYTES:
        raise ValueError(f"{text!r} is not a byte size; write it like 512MiB, 2GiB, 1e9 or 4096")
    return int(Decimal(match[1]) * _UNIT_BYTES[match[2].lower()])
