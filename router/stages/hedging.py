"""`Hedging`: a second call for a prompt that the first one does not answer in time. Pure.

As in Dean and Barroso, "The tail at scale" (2013): the first answer is used, and few calls are
hedged at a time, so that a tier which is slow because of its load gets no more of it.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from baton.common.errors import BatonError

__all__ = ["Hedging"]

_MAX_HEDGED_SHARE = 0.05
"""Of the calls without an answer; one may always be hedged."""


class Call(Protocol):
    """A call that answers once."""

    async def answer(self) -> None:
        """Waits for the answer.

        Raises:
            BatonError: the call failed.
        """

    async def withdraw(self) -> None:
        """Cancels the call and drops all that it has made; `answer` must not be running."""


_CallT = TypeVar("_CallT", bound=Call)


class Hedging:
    """The hedged calls of one tier.

    Args:
        after_s: how long a call may take to answer until it is hedged; None hedges none.
    """

    def __init__(self, after_s: float | None) -> None:
        self._after_s = after_s
        self._num_waiting = 0
        self._num_hedged = 0
        self._closing: set[asyncio.Task[None]] = set()

    async def first(self, call: _CallT, start_hedge: Callable[[], _CallT | None]) -> _CallT:
        """Returns the call that answers first, and withdraws the other.

        Args:
            call: the first call.
            start_hedge: returns the second one; None if there can be none now. It is called
                again after each further `after_s`, until it has returned one.

        Raises:
            BatonError: all calls have failed; the error of the last one.
        """
        race = _Race(call)
        self._num_waiting += 1
        try:
            while (winner := await race.winner_within(self._after_s)) is None:
                if self._may_hedge() and (hedge := start_hedge()) is not None:
                    return await self._hedged(race, hedge)
            return winner
        finally:
            self._num_waiting -= 1
            if race.has_losers:
                # In the background, so that a caller that leaves meanwhile does not cut it off.
                closing = asyncio.create_task(race.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def _hedged(self, race: "_Race[_CallT]", hedge: _CallT) -> _CallT:
        race.add(hedge)
        self._num_hedged += 1
        try:
            winner = await race.winner_within(None)
        finally:
            self._num_hedged -= 1
        assert winner is not None, "without a timeout there is a winner or an error"
        return winner

    def _may_hedge(self) -> bool:
        return self._num_hedged < max(1, int(_MAX_HEDGED_SHARE * self._num_waiting))


class _Race(Generic[_CallT]):
    """Calls of which one has to answer."""

    def __init__(self, call: _CallT) -> None:
        self._calls: dict[asyncio.Task[None], _CallT] = {}
        self.add(call)

    @property
    def has_losers(self) -> bool:
        """Whether calls are left that have neither answered nor failed."""
        return bool(self._calls)

    def add(self, call: _CallT) -> None:
        self._calls[asyncio.create_task(call.answer())] = call

    async def winner_within(self, timeout_s: float | None) -> _CallT | None:
        """Waits for the first answer; returns None after the timeout.

        Raises:
            BatonError: all calls have failed; the error of the last one.
        """
        while True:
            done, _ = await asyncio.wait(
                self._calls, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return None
            for task in [task for task in self._calls if task in done]:
                if (winner := self._end(task)) is not None:
                    return winner

    def _end(self, task: asyncio.Task[None]) -> _CallT | None:
        """Returns the call if it has answered; raises its error if no other call runs."""
        call = self._calls.pop(task)
        try:
            task.result()
        except BatonError:
            if not self._calls:
                raise
            return None
        return call

    async def close(self) -> None:
        """Withdraws the calls that have not won."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        withdrawn = (call.withdraw() for call in self._calls.values())
        await asyncio.gather(*withdrawn, return_exceptions=True)
