"""`Deadlines`: when live requests must end. Pure."""

import heapq
from collections.abc import Mapping
from typing import Protocol

__all__ = ["Deadlines"]

# Deadlines of ended requests are removed when they outnumber the live requests by this.
_MAX_STALE = 64


class _Arrived(Protocol):
    @property
    def arrival(self) -> int: ...


class Deadlines:
    """A heap of the live requests' deadlines.

    Args:
        live: the live requests by id. A new request may reuse an id with another arrival number.
    """

    def __init__(self, live: Mapping[str, _Arrived]) -> None:
        self._live = live
        self._heap: list[tuple[float, int, str]] = []

    @property
    def next(self) -> float | None:
        """The earliest deadline; it may be of a request that has ended."""
        return self._heap[0][0] if self._heap else None

    def add(self, deadline: float, arrival: int, request_id: str) -> None:
        """Adds a live request's deadline."""
        heapq.heappush(self._heap, (deadline, arrival, request_id))
        if len(self._heap) > 2 * len(self._live) + _MAX_STALE:
            arrivals = {request.arrival for request in self._live.values()}
            self._heap = [entry for entry in self._heap if entry[1] in arrivals]
            heapq.heapify(self._heap)

    def take_passed(self, now: float) -> list[str]:
        """Returns the ids of live requests whose deadline has passed; each only once."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._heap)
            request = self._live.get(request_id)
            if request is not None and request.arrival == arrival:
                passed.append(request_id)
        return passed
