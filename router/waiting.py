"""`WaitingRequests`: the requests that no replica takes now, in the order of their turns."""

import asyncio
import itertools
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.request_spec import RequestSpec

__all__ = ["Turn", "WaitingRequests", "waited"]

_FoundT = TypeVar("_FoundT")


def waited(timeout_s: float) -> str:
    """Returns what the refusal of a request says that has waited in vain."""
    return f"waited {timeout_s:g} s (--queue-timeout-s)"


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """When a request gets what becomes free; the least is first.

    Attributes:
        is_new: whether it has no token yet. Clients see the pauses of a request that has some.
        priority: the request's.
        deadline: `time.monotonic()` at which it must have ended.
    """

    is_new: bool
    priority: int
    deadline: float

    @classmethod
    def of(cls, spec: RequestSpec, *, is_new: bool = True) -> "Turn":
        """Returns the turn of a request with a deadline."""
        assert spec.deadline is not None, "a request in the router has a deadline"
        return cls(is_new, spec.priority, spec.deadline)


@dataclass(slots=True, order=True)
class _Waiter:
    turn: Turn
    arrival: int
    find: Callable[[], Any] = field(compare=False)
    found: "asyncio.Future[Any]" = field(compare=False)


class WaitingRequests:
    """The requests that wait for a replica. The router's limit of running requests bounds them.

    A request that finds what it needs leaves before the next one looks, so that the next one
    sees what the first has reserved.
    """

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(
        self, find: Callable[[], _FoundT | None], turn: Turn, timeout_s: float
    ) -> _FoundT | None:
        """Waits until `find` returns something other than None, and returns that.

        It is called at once unless others wait, and after each `offer`, in the order of the turns.
        What it finds must be reserved before the caller awaits anything else.

        Args:
            find: looks for what the request needs; must not raise.
            turn: the request's.
            timeout_s: None is returned after that.
        """
        if not self._waiters and (found := find()) is not None:
            return found
        waiter = _Waiter(turn, next(self._arrivals), find, asyncio.Future())
        insort(self._waiters, waiter)
        self.offer()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(waiter.found)
        except TimeoutError:
            pass
        finally:
            self._waiters.remove(waiter)
            asyncio.get_running_loop().call_soon(self.offer)
        return waiter.found.result() if waiter.found.done() else None

    def offer(self) -> None:
        """Lets the first request that finds what it needs go on. The next one follows it."""
        for waiter in self._waiters:
            if waiter.found.done():
                return  # it has not reserved yet what it found
            found = waiter.find()
            if found is not None:
                waiter.found.set_result(found)
                return
