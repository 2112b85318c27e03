"""`WaitingRequests`: the requests that no replica takes now, in the order of their turns."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.common.request.request_spec import RequestSpec
from router.fleet.fair_shares import FairShares, Share

__all__ = ["Turn", "WaitingRequests", "waited"]

_FoundT = TypeVar("_FoundT")
_MIN_STAY_S = 1.0
_MAX_STALE = 64
"""A group keeps about as many requests that have left, beside those that wait."""


def waited(timeout_s: float) -> str:
    """Returns what the refusal of a request says that has waited in vain."""
    return f"waited {timeout_s:g} s (--queue-timeout-s)"


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """When a request gets what becomes free; the least is first. Of requests that are equally
    urgent, those of one tenant have this order, and tenants take turns.

    Attributes:
        is_new: whether it has no token yet. Clients see the pauses of a request that has some.
        priority: the request's.
        deadline: `time.monotonic()` at which it must have ended.
        share: what it takes of its tenant's share.
    """

    is_new: bool
    priority: int
    deadline: float
    share: Share = field(default_factory=Share, compare=False)

    @classmethod
    def of(cls, spec: RequestSpec, share: Share, *, is_new: bool = True) -> "Turn":
        """Returns the turn of a request with a deadline."""
        assert spec.deadline is not None, "a request in the router has a deadline"
        return cls(is_new, spec.priority, spec.deadline, share)


_LineKey = tuple[bool, int, str]


@dataclass(slots=True, order=True)
class _Waiter:
    order: tuple[float, int]
    turn: Turn = field(compare=False)
    find: Callable[[], Any] = field(compare=False)
    need: Callable[[], Hashable] = field(compare=False)
    found: "asyncio.Future[Any]" = field(compare=False)
    group: "_Group" = field(compare=False)
    has_left: bool = field(default=False, compare=False)

    @property
    def line_key(self) -> _LineKey:
        """The line in which it waits."""
        return self.turn.is_new, self.turn.priority, self.turn.share.tenant


_Position = tuple[bool, int, int, int]


class _Line:
    """The waiting requests of one tenant that are equally urgent, the first one on top of a heap.

    Args:
        key: whether they are new, their priority, and the tenant's name.
    """

    def __init__(self, key: _LineKey) -> None:
        self.key = key
        self.waiters: list[_Waiter] = []

    def first(self) -> _Waiter | None:
        """The first request that still waits."""
        while self.waiters and self.waiters[0].found.done():
            heapq.heappop(self.waiters)  # it has left, or was cancelled and is about to
        return self.waiters[0] if self.waiters else None


class _Group:
    """The waiting requests of one need: a line per urgency and tenant, the first line on top of a
    heap. The position of a tenant only grows, so a line of which the heap has an earlier one is put
    back when it comes up.

    Args:
        need: the need.
        shares: the tenants' positions.
    """

    def __init__(self, need: Hashable, shares: FairShares) -> None:
        self.need = need
        self.num_waiting = 0
        self._shares = shares
        self._lines: dict[_LineKey, _Line] = {}
        self._heap: list[tuple[_Position, int, _Line]] = []
        self._entries = itertools.count()
        self._num_stale = 0

    def add(self, waiter: _Waiter) -> None:
        """Adds a request, with which its tenant has joined the shares."""
        waiter.group = self
        self.num_waiting += 1
        self._insert(waiter)

    def remove(self, waiter: _Waiter) -> None:
        """Removes a request."""
        waiter.has_left = True
        self.num_waiting -= 1
        line = self._lines.get(waiter.line_key)
        if line is not None and line.first() is None:
            del self._lines[waiter.line_key]  # its entry of the heap is dropped when it comes up
        self._num_stale += 1
        if self._num_stale > self.num_waiting + _MAX_STALE:
            self._drop_stale()

    def first(self) -> tuple[_Position, _Waiter] | None:
        """The first request that still waits, and the position of its line."""
        while self._heap:
            position, _, line = self._heap[0]
            waiter = line.first()
            if waiter is None:
                heapq.heappop(self._heap)
                if self._lines.get(line.key) is line:
                    del self._lines[line.key]
            elif position != (now := self._position(line)):
                heapq.heapreplace(self._heap, (now, next(self._entries), line))
            else:
                return position, waiter
        return None

    def waiters(self) -> list[_Waiter]:
        """The requests that wait."""
        lines = self._lines.values()
        return [waiter for line in lines for waiter in line.waiters if not waiter.has_left]

    def _insert(self, waiter: _Waiter) -> None:
        line = self._lines.get(waiter.line_key)
        if line is None or line.first() is None:  # one that is empty may have an old position
            line = self._lines[waiter.line_key] = _Line(waiter.line_key)
            heapq.heappush(self._heap, (self._position(line), next(self._entries), line))
        heapq.heappush(line.waiters, waiter)

    def _drop_stale(self) -> None:
        self._num_stale = 0
        waiting = self.waiters()
        self._lines.clear()
        self._heap.clear()
        for waiter in waiting:
            self._insert(waiter)

    def _position(self, line: _Line) -> _Position:
        is_new, priority, tenant = line.key
        return is_new, priority, *self._shares.position(tenant)


class WaitingRequests:
    """The requests that wait for a replica. The router's limit of running requests bounds them.

    A request that finds what it needs leaves before the next one looks, so that the next one
    sees what the first has reserved.

    Only the first of the requests with the same need looks: if it finds nothing, the others wait
    behind it, so that none is overtaken by those that need less room. A look costs as much as there
    are needs, however many requests wait, and there is at most one for all that has changed within
    one round of the event loop.

    Args:
        clock: seconds, monotonic, on which deadlines are.

    Attributes:
        shares: what tenants have used while others waited.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.shares = FairShares()
        self._clock = clock
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
        may_stay: Callable[[], bool] = bool,
    ) -> _FoundT | None:
        """Waits until `find` returns something other than None, and returns that.

        It is called at once unless others wait for the same, and after each `offer`, in the order
        of the turns. What it finds must be reserved before the caller awaits anything else.

        A request that may wait for less time than its deadline allows has the turn of that
        earlier moment. So those with short deadlines overtake it only for a while: it is the
        first of its priority and tenant before it has waited in vain.

        Args:
            find: looks for what the request needs; must not raise.
            turn: the request's.
            timeout_s: None is returned after that, unless it may stay.
            need: returns what `find` depends on, besides the replicas and the size of the request.
                Called again by `regroup`. By default only requests with an equal `find` have the
                same need.
            may_stay: whether the request waits on for the same time when its time is over.
        """
        need = need or (lambda: find)
        if self._may_look(need):
            if (found := find()) is not None:
                self.shares.charge(turn.share)
                return found
        else:
            self.offer()
        loop = asyncio.get_running_loop()
        last_start = min(turn.deadline, self._clock() + timeout_s)
        order, future = (last_start, next(self._arrivals)), loop.create_future()
        group = self._group(need())
        waiter = _Waiter(order, turn, find, need, future, group)
        first = group.first()
        self.shares.join(turn.share, None if first is None else first[0][2:])
        group.add(waiter)

        timer: asyncio.TimerHandle

        def expire() -> None:
            nonlocal timer
            if not future.done() and may_stay():
                timer = loop.call_later(max(timeout_s, _MIN_STAY_S), expire)
            elif not future.done():
                future.set_result(None)

        timer = loop.call_later(timeout_s, expire)
        try:
            result: _FoundT | None = await future
            return result
        finally:
            timer.cancel()
            self._leave(waiter)

    def offer(self) -> None:
        """Lets the requests look again soon, as replicas or their load have changed. The first
        that finds what it needs goes on, and the next one follows it.
        """
        if self._look is None and self._groups:
            self._look = asyncio.get_running_loop().call_soon(self._choose)

    def regroup(self) -> None:
        """Asks the requests for their needs again, which depend on what replicas there are."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            for waiter in group.waiters():
                self._group(waiter.need()).add(waiter)
        self.offer()

    def _may_look(self, need: Callable[[], Hashable]) -> bool:
        """Whether a new request takes nothing from others that were there before it."""
        if self._chosen is not None:
            return False
        return not self._groups or (self._look is None and need() not in self._groups)

    def _choose(self) -> None:
        """Lets the first request of each need look, until one finds something."""
        self._look = None
        if self._chosen is not None:
            return  # the next look follows once it has reserved what it found
        firsts = (group.first() for group in self._groups.values())
        for _, waiter in sorted(first for first in firsts if first is not None):
            try:
                found = waiter.find()
            except Exception as error:  # a policy may be of another package
                waiter.found.set_exception(error)
                self.offer()  # the next one must not wait behind it
                return
            if found is not None:
                self._chosen = waiter
                self.shares.take_turn(waiter.turn.share)
                waiter.found.set_result(found)
                return

    def _group(self, need: Hashable) -> _Group:
        group = self._groups.get(need)
        if group is None:
            group = self._groups[need] = _Group(need, self.shares)
        return group

    def _leave(self, waiter: _Waiter) -> None:
        self.shares.leave(waiter.turn.share)
        group = waiter.group
        group.remove(waiter)
        if not group.num_waiting and self._groups.get(group.need) is group:
            del self._groups[group.need]
        if self._chosen is waiter:
            self._chosen = None
            self.offer()  # not at once: the request has still to reserve what it found
