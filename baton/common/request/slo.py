"""`Slo`: how soon a client wants its tokens, stated in headers or in a call's metadata."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from baton.common.errors import InvalidArgumentError
from baton.common.short_texts import short_repr

__all__ = ["NO_SLO", "TPOT_HEADER", "TTFT_HEADER", "Slo"]

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
"""The names that llm-d's inference scheduler reads."""


@dataclass(frozen=True, slots=True)
class Slo:
    """A client's service level objective.

    Attributes:
        ttft_s: the longest time to the first token, from the arrival of the request; None for any.
        tpot_s: the longest mean time per later token; None for any.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[str | bytes, str | bytes]]) -> "Slo":
        """Reads the headers of a request, or the metadata of a call; names are in lower case. Of a
        repeated header the last one counts.

        Raises:
            InvalidArgumentError: a header is no number > 0; names it.
        """
        stated: dict[str, float] = {}
        for name, value in headers:
            text = name.decode("latin-1") if isinstance(name, bytes) else name
            if text in (TTFT_HEADER, TPOT_HEADER):
                stated[text] = _seconds(text, value)
        if not stated:
            return NO_SLO
        return cls(stated.get(TTFT_HEADER), stated.get(TPOT_HEADER))


NO_SLO = Slo()


def _seconds(name: str, value: str | bytes) -> float:
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < math.inf:
        raise InvalidArgumentError(
            f"{name} is {short_repr(text[:64])}; it must be a number of milliseconds > 0",
            field=name,
        )
    return milliseconds / 1000
