"""`Slots`: how many requests of batches run at once, whose number follows the fleet's size."""

import asyncio
from collections import deque
from collections.abc import Callable

__all__ = ["Slots"]


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
