"""The limits of requests: `Entrance` of those in preparation, `Admission` of running ones."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from baton.common.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    Reason,
    ResourceExhaustedError,
)
from router.config.router import MAX_WAITING
from router.processes.counts import Account, Accounts, LocalAccounts
from router.stages.interactive import Interactive

__all__ = ["Admission", "Entrance", "Turns"]

_RUNNING_AT_ONCE = 2
"""Few threads, as those that tokenize prompts come from the same pool: 5 on a machine of one core.
"""
_MAX_TOKENIZING = 256
_RETRY_AFTER_S = 1.0
_TENANT_SHARE = 4
"""A tenant may have this many times the free places, and its weight more: alone it gets four fifths
of them, and one that has few requests finds a place however many others have. The rule is that of
A. K. Choudhury and E. L. Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet
Switches", IEEE/ACM Transactions on Networking 6 (2), 1998.
"""
_MAX_PER_ROUND = 4
"""Parsing, tokenizing and sending one request takes a few milliseconds."""


class Turns:
    """Lets work run, a few at a time; the rest waits.

    Args:
        name: of the work, for errors.
        max_waiting: further work is refused.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._free = asyncio.Semaphore(_RUNNING_AT_ONCE)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the context.

        Raises:
            ResourceExhaustedError: too many wait.
        """
        if self._num_waiting >= self._max_waiting:
            raise ResourceExhaustedError(
                f"{self._max_waiting} calls wait for {self._name}, the most this router takes",
                _RETRY_AFTER_S,
                reason=Reason.ROUTER_FULL,
            )
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._free.release()


class Admission:
    """Counts running requests by client and id.

    Args:
        max_requests: the most that run or wait at once; None for as many as the replicas run,
            and `router.config.router.MAX_WAITING` that wait, in each process of the router.
        accounts: where running requests are counted; None for this process.

    Attributes:
        read_num_seats: returns how many requests the replicas run at once.
        interactive: those of the running requests for which clients wait.
        rendering: turns of chat templates.
        tokenizing: turns of calls that want tokens, or their text, and nothing else.
    """

    def __init__(self, max_requests: int | None = None, accounts: Accounts | None = None) -> None:
        accounts = accounts or LocalAccounts()
        self.read_num_seats: Callable[[], int] = int
        self.interactive = Interactive(accounts)
        self.rendering = Turns("a chat template", max_requests or MAX_WAITING)
        self.tokenizing = Turns("the tokenizer", _MAX_TOKENIZING)
        self._max_requests = max_requests
        self._ids = accounts.running_ids("request")
        # Without a stated limit, each process has places of its own.
        self._accounts = LocalAccounts() if max_requests is None else accounts
        self._total = self._accounts.account("requests", "")
        self._of_clients: dict[str, Account] = {}  # of those with requests in this process
        self._by_client: Counter[str] = Counter()

    @property
    def max_requests(self) -> int:
        """The most requests that run or wait at once."""
        if self._max_requests is not None:
            return self._max_requests
        return self.read_num_seats() + MAX_WAITING

    @property
    def num_running(self) -> int:
        """Number of requests that run in this process."""
        return self._by_client.total()

    @contextmanager
    def admit(self, request_id: str, client: str = "", weight: int = 1) -> Iterator[None]:
        """Counts a request as running while the context lasts.

        Args:
            request_id: the client's name for the request.
            client: the client's name; each has ids of its own. Empty for a router that asks for no
                names.
            weight: the client's.

        Raises:
            AlreadyExistsError: a request with that id is running.
            ResourceExhaustedError: `max_requests` are running, or so many that the rest is for
                other clients.
        """
        if not self._ids.begin(client, request_id):
            raise AlreadyExistsError.for_request_id(request_id)
        try:
            with self._counted(client, weight), self.interactive.running():
                yield
        finally:
            self._ids.end(client, request_id)

    @contextmanager
    def _counted(self, client: str, weight: int) -> Iterator[None]:
        """Counts a request, if there is room for it."""
        num_free = self._take_place()
        taken: list[Account] = [self._total]
        self._by_client[client] += 1
        try:
            if client:
                taken.append(self._take_place_of_client(client, weight, num_free))
            yield
        finally:
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]
                self._of_clients.pop(client, None)
            for account in taken:
                with account.open() as counts:
                    counts.add_running(-1)

    def _take_place(self) -> int:
        """Counts a request; returns how many places were free before it."""
        max_requests = self.max_requests
        with self._total.open() as counts:
            if counts.has_room(1, max_requests):
                counts.add_running(1)
                return max_requests - counts.num_running + 1
        raise ResourceExhaustedError(
            f"{max_requests} requests are running, the most this router takes "
            "(--max-concurrent-requests)",
            _RETRY_AFTER_S,
            reason=Reason.ROUTER_FULL,
        )

    def _take_place_of_client(self, client: str, weight: int, num_free: int) -> Account:
        """Counts a request of a client, unless it has so many that others would find no place;
        returns where.
        """
        account = self._of_clients.get(client)
        if account is None:
            account = self._of_clients[client] = self._accounts.account("client", client)
        with account.open() as counts:
            if counts.has_room(1, _TENANT_SHARE * weight * num_free):
                counts.add_running(1)
                return account
            num_running = counts.num_running
        raise ResourceExhaustedError(
            f"{num_running} requests of this client are running, and the other {num_free} places "
            "are for other clients (--max-concurrent-requests)",
            _RETRY_AFTER_S,
            reason=Reason.ROUTER_FULL,
        )


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
