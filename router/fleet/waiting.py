"""`WaitingRequests`: the requests that no replica takes now, in the order of their turns."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.common.request.request_spec import RequestSpec

__all__ = ["Turn", "WaitingRequests", "waited"]

_FoundT = TypeVar("_FoundT")
_MAX_STALE = 64
"""A group keeps about as many requests that have left, beside those that wait."""


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
    order: tuple[bool, int, float, int]
    find: Callable[[], Any] = field(compare=False)
    need: Callable[[], Hashable] = field(compare=False)
    found: "asyncio.Future[Any]" = field(compare=False)
    group: "_Group" = field(compare=False)
    has_left: bool = field(default=False, compare=False)


class _Group:
    """The waiting requests of one need, the first one on top of a heap."""

    def __init__(self, need: Hashable) -> None:
        self.need = need
        self.num_waiting = 0
        self._heap: list[_Waiter] = []

    def add(self, waiter: _Waiter) -> None:
        waiter.group = self
        heapq.heappush(self._heap, waiter)
        self.num_waiting += 1

    def remove(self, waiter: _Waiter) -> None:
        waiter.has_left = True
        self.num_waiting -= 1
        if len(self._heap) > 2 * self.num_waiting + _MAX_STALE:
            self._heap = self.waiters()
            heapq.heapify(self._heap)

    def first(self) -> _Waiter | None:
        """The first request that still waits."""
        while self._heap and self._heap[0].found.done():
            heapq.heappop(self._heap)  # it has left, or was cancelled and is about to
        return self._heap[0] if self._heap else None

    def waiters(self) -> list[_Waiter]:
        return [waiter for waiter in self._heap if not waiter.has_left]


class WaitingRequests:
    """The requests that wait for a replica. The router's limit of running requests bounds them.

    A request that finds what it needs leaves before the next one looks, so that the next one
    sees what the first has reserved.

    Requests with the same need find the same, so only the first of them looks. A look costs as
    much as there are needs, however many requests wait, and there is at most one for all that
    has changed within one round of the event loop.
    """

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}
        self._arrivals = itertools.count()
        self._look: asyncio.Handle | None = None  # the next one, if something has changed
        self._chosen: _Waiter | None = None  # has not reserved yet what it found

    def __len__(self) -> int:
        return sum(group.num_waiting for group in self._groups.values())

    async def wait(
        self,
        find: Callable[[], _FoundT | None],
        turn: Turn,
        timeout_s: float,
        need: Callable[[], Hashable] | None = None,
    ) -> _FoundT | None:
        """Waits until `find` returns something other than None, and returns that.

        It is called at once unless others wait for the same, and after each `offer`, in the order
        of the turns. What it finds must be reserved before the caller awaits anything else.

        A request that may wait for less time than its deadline allows has the turn of that
        earlier moment. So those with short deadlines overtake it only for a while: it is the
        first of its priority before it has waited in vain.

        Args:
            find: looks for what the request needs; must not raise.
            turn: the request's.
            timeout_s: None is returned after that.
            need: returns what `find` depends on, besides the replicas: requests with equal needs
                find the same. Called again by `regroup`. By default only requests with an equal
                `find` have the same need.
        """
        need = need or (lambda: find)
        key = need()
        if self._may_look(key):
            if (found := find()) is not None:
                return found
        else:
            self.offer()
        last_start = min(turn.deadline, time.monotonic() + timeout_s)
        order = (turn.is_new, turn.priority, last_start, next(self._arrivals))
        future = asyncio.get_running_loop().create_future()
        waiter = _Waiter(order, find, need, future, self._group(key))
        waiter.group.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            pass
        finally:
            self._leave(waiter)
        return future.result() if future.done() and not future.cancelled() else None

    def offer(self) -> None:
        """Lets the requests look again soon, as replicas or their load have changed. The first
        that finds what it needs goes on, and the next one follows it.
        """
        if self._look is None:
            self._look = asyncio.get_running_loop().call_soon(self._choose)

    def regroup(self) -> None:
        """Asks the requests for their needs again, which depend on what replicas there are."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            for waiter in group.waiters():
                group.num_waiting -= 1
                self._group(waiter.need()).add(waiter)
        self.offer()

    def _may_look(self, key: Hashable) -> bool:
        """Whether a new request takes nothing from others that were there before it."""
        if self._chosen is not None:
            return False
        return not self._groups or (self._look is None and key not in self._groups)

    def _choose(self) -> None:
        """Lets the first request of each need look, until one finds something."""
        self._look = None
        if self._chosen is not None:
            return  # the next look follows once it has reserved what it found
        firsts = (group.first() for group in self._groups.values())
        for waiter in sorted(waiter for waiter in firsts if waiter is not None):
            found = waiter.find()
            if found is not None:
                self._chosen = waiter
                waiter.found.set_result(found)
                return

    def _group(self, need: Hashable) -> _Group:
        return self._groups.setdefault(need, _Group(need))

    def _leave(self, waiter: _Waiter) -> None:
        group = waiter.group
        group.remove(waiter)
        if not group.num_waiting and self._groups.get(group.need) is group:
            del self._groups[group.need]
        if self._chosen is waiter:
            self._chosen = None
            self.offer()  # not at once: the request has still to reserve what it found
