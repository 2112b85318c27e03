"""`Entrance`: lets new requests be prepared a few at a time, so that the event loop stays free."""

import asyncio
from collections import deque

from baton.common.errors import DeadlineExceededError, ResourceExhaustedError
from baton.common.reasons import Reason

__all__ = ["Entrance"]

_RETRY_AFTER_S = 1.0
_MAX_PER_ROUND = 4
"""Parsing, tokenizing and sending one request takes a few milliseconds."""


class Entrance:
    """The requests that have arrived and are not prepared yet, first come, first served.

    Thousands of calls may become readable within one round of the event loop. If all of them were
    prepared in that round, running streams, deadlines and health would wait for seconds.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_this_round = 0
        self._is_round_noted = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self, timeout_s: float, max_waiting: int) -> None:
        """Waits until the request may be prepared.

        Args:
            timeout_s: seconds until its deadline.
            max_waiting: further requests are refused.

        Raises:
            ResourceExhaustedError: too many wait.
            DeadlineExceededError: the deadline passed first.
        """
        if not self._waiting and self._num_this_round < _MAX_PER_ROUND:
            self._count()
            return
        if len(self._waiting) >= max_waiting:
            raise ResourceExhaustedError(
                f"{max_waiting} requests wait to be read", _RETRY_AFTER_S, reason=Reason.ROUTER_FULL
            )
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(timeout_s):
                await place
        except TimeoutError:
            raise DeadlineExceededError(
                f"the request could not be read within {timeout_s:.1f} s",
                reason=Reason.REQUEST_DEADLINE,
            ) from None

    def _count(self) -> None:
        self._num_this_round += 1
        if not self._is_round_noted:
            self._is_round_noted = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._num_this_round, self._is_round_noted = 0, False
        while self._waiting and self._num_this_round < _MAX_PER_ROUND:
            place = self._waiting.popleft()
            if not place.done():  # else its caller has left
                place.set_result(None)
                self._count()
