"""`Admission`: limits the number of running requests. `Turns`: limits other work beside them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from baton.common.errors import AlreadyExistsError, ResourceExhaustedError
from baton.common.reasons import Reason
from router.config.router import MAX_WAITING

__all__ = ["Admission", "Turns"]

_RUNNING_AT_ONCE = 2
"""Few threads, as those that tokenize prompts come from the same pool: 5 on a machine of one core.
"""
_MAX_TOKENIZING = 256
_RETRY_AFTER_S = 1.0


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
            and `router.config.router.MAX_WAITING` that wait.

    Attributes:
        read_num_seats: returns how many requests the replicas run at once.
        rendering: turns of chat templates.
        tokenizing: turns of calls that want tokens, or their text, and nothing else.
    """

    def __init__(self, max_requests: int | None = None) -> None:
        self.read_num_seats: Callable[[], int] = int
        self.rendering = Turns("a chat template", max_requests or MAX_WAITING)
        self.tokenizing = Turns("the tokenizer", _MAX_TOKENIZING)
        self._max_requests = max_requests
        self._running: set[tuple[str, str]] = set()

    @property
    def max_requests(self) -> int:
        """The most requests that run or wait at once."""
        if self._max_requests is not None:
            return self._max_requests
        return self.read_num_seats() + MAX_WAITING

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @contextmanager
    def admit(self, request_id: str, client: str = "") -> Iterator[None]:
        """Counts a request as running while the context lasts.

        Args:
            request_id: the client's name for the request.
            client: the client's name; each has ids of its own.

        Raises:
            AlreadyExistsError: a request with that id is running.
            ResourceExhaustedError: `max_requests` are running.
        """
        key = (client, request_id)
        if key in self._running:
            raise AlreadyExistsError.for_request_id(request_id)
        if len(self._running) >= self.max_requests:
            raise ResourceExhaustedError(
                f"{self.max_requests} requests are running, the most this router takes "
                "(--max-concurrent-requests)",
                _RETRY_AFTER_S,
                reason=Reason.ROUTER_FULL,
            )
        self._running.add(key)
        try:
            yield
        finally:
            self._running.discard(key)
