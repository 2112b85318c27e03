"""How much of a prompt's transfer runs while the prompt is computed. Pure."""

from collections.abc import Iterable

__all__ = ["overlap"]


def overlap(intervals: Iterable[tuple[float, float]], until: float) -> tuple[float, float]:
    """Seconds in which one or more intervals were open, and those of them before `until`.

    Args:
        intervals: starts and ends, in any order; they may overlap.
        until: on the same clock.
    """
    total_s = hidden_s = 0.0
    covered = float("-inf")
    for start, end in sorted(intervals):
        first = max(start, covered)
        if end > first:
            total_s += end - first
            hidden_s += max(0.0, min(end, until) - first)
            covered = end
    return total_s, hidden_s
