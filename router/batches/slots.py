"""`Slots`: the places of requests of batches, whose number (`num_places`) follows the fleet's size
and what clients wait for.

`BatchSlots`: the places of one batch.
"""

import asyncio
from collections import deque
from collections.abc import Callable

__all__ = ["BatchSlots", "Slots", "num_places"]

_MAX_RESTING = 4
_MAX_PLACES = 128
_SHARE, _SHARE_BESIDE = 1 / 2, 1 / 32
"""Parts of what the replicas run: while no client waits for an answer, and beside those who do.
Each sequence makes the steps of all others longer, and none is interrupted for another.
"""
_QUIET_S = 60.0
"""Clients who send a request now and then would else meet as many of the batch each time."""


def num_places(num_seats: int, quiet_s: float) -> int:
    """How many requests of batches may run at once.

    Args:
        num_seats: how many requests may run.
        quiet_s: seconds since a client has waited for an answer.
    """
    share = _SHARE if quiet_s >= _QUIET_S else _SHARE_BESIDE
    return max(1, min(int(num_seats * share), _MAX_PLACES))


class Slots:
    """Places for requests, taken in the order of arrival: batches take turns. Used by the event
    loop alone.

    Args:
        read_limit: returns how many there are now.
        max_bytes: the most bytes of the requests that have places; a larger one runs alone.
    """

    def __init__(self, read_limit: Callable[[], int], max_bytes: int) -> None:
        self._read_limit = read_limit
        self._max_bytes = max_bytes
        self._num_taken = 0
        self._num_bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def num_taken(self) -> int:
        """How many requests have places."""
        return self._num_taken

    async def take(self, num_bytes: int) -> None:
        """Waits for a place.

        Args:
            num_bytes: of the request.
        """
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((place, num_bytes))
        self.grant()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(num_bytes)
            raise

    def release(self, num_bytes: int) -> None:
        """Gives a place back."""
        self._num_taken -= 1
        self._num_bytes -= num_bytes
        self.grant()

    async def rest(self, duration_s: float) -> None:
        """Leaves the caller's place to others for a time, and waits for one again. Its bytes stay
        counted. If it is cancelled, the caller has a place too, which it releases.

        Args:
            duration_s: seconds.
        """
        self.release(0)
        try:
            await asyncio.sleep(duration_s)
            await self.take(0)
        except asyncio.CancelledError:
            self._num_taken += 1
            raise

    def grant(self) -> None:
        """Gives free places to those who wait. Called also when the limit may have grown."""
        limit = self._read_limit()
        while self._waiting:
            place, num_bytes = self._waiting[0]
            if place.cancelled():
                self._waiting.popleft()
                continue
            fits = self._num_bytes + num_bytes <= self._max_bytes or not self._num_taken
            if self._num_taken >= limit or not fits:
                return
            self._waiting.popleft()
            self._num_taken += 1
            self._num_bytes += num_bytes
            place.set_result(None)


class BatchSlots:
    """The places of the requests of one batch. While several of them rest, the API refuses what the
    batch asks for, or its client has no tokens left, so no further request gets a place: few are in
    memory, and the places are those of other batches.

    Args:
        slots: those of all batches.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._num_resting = 0
        self._may_take = asyncio.Event()
        self._may_take.set()

    async def take(self, num_bytes: int) -> None:
        """Waits for a place; see `Slots.take`."""
        await self._may_take.wait()
        await self._slots.take(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Gives a place back."""
        self._slots.release(num_bytes)

    async def rest(self, duration_s: float) -> None:
        """Leaves a place to others for a time; see `Slots.rest`."""
        self._count_resting(1)
        try:
            await self._slots.rest(duration_s)
        finally:
            self._count_resting(-1)

    def _count_resting(self, change: int) -> None:
        self._num_resting += change
        if self._num_resting < _MAX_RESTING:
            self._may_take.set()
        else:
            self._may_take.clear()
