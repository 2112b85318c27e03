"""`--goodput ttft:500 tpot:50 e2el:8000`: the limits a request must keep to count. Pure."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from baton.common.errors import ConfigurationError
from benchmarks.request import MeasuredRequest

__all__ = ["ServiceLevel", "add_goodput_arg", "parse_service_level"]

_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Limits of latencies in milliseconds; None sets no limit.

    Attributes:
        ttft_ms: time to the first token.
        tpot_ms: mean time per token after the first; a request of one token keeps it.
        e2el_ms: time to the last token.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def is_met(self, record: MeasuredRequest) -> bool:
        """Returns whether a request succeeded within all limits."""
        if record.error is not None:
            return False
        figures = (
            (self.ttft_ms, record.first_token_s),
            (self.tpot_ms, record.token_gap_s),
            (self.e2el_ms, record.latency_s),
        )
        return all(
            limit_ms is None or seconds is None or 1000 * seconds <= limit_ms
            for limit_ms, seconds in figures
        )

    def __str__(self) -> str:
        limits = ((name, getattr(self, f"{name}_ms")) for name in _NAMES)
        return " ".join(f"{name}:{limit:g}" for name, limit in limits if limit is not None)


def parse_service_level(texts: Sequence[str]) -> ServiceLevel:
    """Reads `NAME:MS` pairs.

    Raises:
        ConfigurationError: a pair is malformed, or names no latency.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in _NAMES:
            raise ConfigurationError(
                f"--goodput has {text!r}; it must be of {', '.join(f'{n}:MS' for n in _NAMES)}"
            )
        limits[f"{name}_ms"] = _milliseconds(text, limit)
    return ServiceLevel(**limits)


def _milliseconds(text: str, limit: str) -> float:
    try:
        value = float(limit)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"--goodput has {text!r}; its limit must be a number > 0, in ms")
    return value


def add_goodput_arg(group: argparse._ActionsContainer, *, is_required: bool = False) -> None:
    """Adds `--goodput`."""
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        required=is_required,
        help="limits that a request must keep to count as good: ttft:500 tpot:50 e2el:8000",
    )
