"""`Quarantine`: what somebody may still write to, and how long it is kept out of use. Pure."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["QUARANTINE_S", "Quarantine"]

QUARANTINE_S = 150.0
"""Seconds after which a transfer to a staging segment that is in doubt is waited for no longer.

A peer that runs ends a transfer within its timeout, and what it left in a connection comes within
two minutes (`kvstore.peer.nixl.library.LATE_WRITES_S`). What may come later is of a peer that was
stopped and goes on, and that can be at any time.
"""

_Held = TypeVar("_Held")


class Quarantine(Generic[_Held]):
    """Holds things until they are known to be safe, or have been held for long.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: list[tuple[_Held, Callable[[], bool], float]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, held: _Held, has_settled: Callable[[], bool]) -> None:
        """Holds something until `has_settled`, but no longer than `QUARANTINE_S`."""
        self._entries.append((held, has_settled, self._clock() + QUARANTINE_S))

    def take_over(self) -> tuple[list[_Held], list[_Held]]:
        """Gives out what is held no longer.

        Returns:
            What has settled; and what was held for long, and may never settle.
        """
        now, entries, self._entries = self._clock(), self._entries, []
        settled, doubtful = [], []
        for entry in entries:
            held, has_settled, until = entry
            if has_settled():
                settled.append(held)
            elif until <= now:
                doubtful.append(held)
            else:
                self._entries.append(entry)
        return settled, doubtful
