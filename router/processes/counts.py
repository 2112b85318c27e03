"""`Counts`: how much of its limits one client uses, and how an `Account` keeps that.

A router of one process keeps them in its own memory (`LocalAccounts`), one of several processes in
memory that they share (`router.processes.shared_counts`).
"""

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from typing_extensions import override

__all__ = [
    "NUM_BUCKET_CELLS",
    "Account",
    "Accounts",
    "Counts",
    "LocalAccount",
    "LocalAccounts",
    "RunningIds",
]

_CELLS_PER_BUCKET = 2
NUM_BUCKET_CELLS = 2 * _CELLS_PER_BUCKET
"""The numbers of the buckets of requests and of tokens; see `router.tenants.token_bucket`."""


def _always(process: int) -> bool:
    return True


class Counts:
    """The counts of one client, which nothing else changes while they are open.

    Args:
        cells: the numbers of two buckets, then for each process how many requests run there.
        process: the number of this process.
        is_alive: whether another process still runs.

    Attributes:
        requests: the two numbers of the bucket of requests.
        tokens: the two numbers of the bucket of tokens.
    """

    __slots__ = ("_is_alive", "_process", "_running", "requests", "tokens")

    def __init__(
        self,
        cells: "memoryview[float]",
        process: int = 0,
        is_alive: Callable[[int], bool] = _always,
    ) -> None:
        self.requests = cells[:_CELLS_PER_BUCKET]
        self.tokens = cells[_CELLS_PER_BUCKET:NUM_BUCKET_CELLS]
        self._running = cells[NUM_BUCKET_CELLS:]
        self._process = process
        self._is_alive = is_alive

    @property
    def num_running(self) -> int:
        """How many requests run in all processes."""
        return int(sum(self._running))

    def has_room(self, num_requests: int, limit: float) -> bool:
        """Whether further requests may run beside those that do. What a process held that has
        died is given back first.

        Args:
            num_requests: how many further ones.
            limit: the most that may run.
        """
        if self.num_running + num_requests <= limit:
            return True
        for process, number in enumerate(self._running):
            if number and process != self._process and not self._is_alive(process):
                self._running[process] = 0
        return self.num_running + num_requests <= limit

    def add_running(self, change: int) -> None:
        """Counts requests of this process that begin, or end if the change is negative."""
        self._running[self._process] = max(0, self._running[self._process] + change)

    def is_unused(self, now: float) -> bool:
        """Whether nothing runs, and nothing counts against a rate any more.

        Args:
            now: the present time on the clock of the buckets.
        """
        return not any(self._running) and max(self.requests[1], self.tokens[1]) <= now


class Account(Protocol):
    """Where the counts of one client are kept."""

    def open(self) -> AbstractContextManager[Counts]:
        """Opens the counts, for as short a time as possible: other processes may wait for them."""


class LocalAccount(Account):
    """Counts in the memory of this process."""

    def __init__(self) -> None:
        counts = Counts(memoryview(array("d", bytes(8 * (NUM_BUCKET_CELLS + 1)))))
        self._opened = nullcontext(counts)  # each request opens some accounts several times

    @override
    def open(self) -> AbstractContextManager[Counts]:
        return self._opened


class Accounts(Protocol):
    """Makes the accounts of a router."""

    def account(self, kind: str, name: str) -> Account:
        """Returns an account.

        Args:
            kind: what it counts, such as "tenant". Names of different kinds do not meet.
            name: the name of the client.
        """

    def running_ids(self, kind: str) -> "RunningIds":
        """Returns the ids of running requests.

        Args:
            kind: as for `account`.
        """


class RunningIds(Protocol):
    """The ids of requests that run, by client."""

    def begin(self, client: str, request_id: str) -> bool:
        """Notes an id; returns False if a request of the client has it already."""

    def end(self, client: str, request_id: str) -> None:
        """Forgets an id that `begin` has noted."""


class LocalAccounts(Accounts):
    """The accounts of a router of one process."""

    @override
    def account(self, kind: str, name: str) -> LocalAccount:
        return LocalAccount()

    @override
    def running_ids(self, kind: str) -> "_LocalIds":
        return _LocalIds()


class _LocalIds(RunningIds):
    """The ids of one process."""

    def __init__(self) -> None:
        self._ids: set[tuple[str, str]] = set()

    @override
    def begin(self, client: str, request_id: str) -> bool:
        key = (client, request_id)
        if key in self._ids:
            return False
        self._ids.add(key)
        return True

    @override
    def end(self, client: str, request_id: str) -> None:
        self._ids.discard((client, request_id))
