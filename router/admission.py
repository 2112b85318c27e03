"""`Admission`: limits the number of running requests."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError

__all__ = ["Admission"]


class Admission:
    """Counts running requests by id.

    Args:
        max_requests: the most that run at once.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._running: set[str] = set()
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @contextmanager
    def admit(self, request_id: str) -> Iterator[None]:
        """Counts a request as running while the context lasts.

        Raises:
            UnavailableError: this router drains.
            InvalidArgumentError: a request with that id is running.
            ResourceExhaustedError: `max_requests` are running.
        """
        if self._is_draining:
            raise UnavailableError("this router is shutting down; try another")
        if request_id in self._running:
            raise InvalidArgumentError.for_field(
                "request_id", request_id, "unique among running requests"
            )
        if len(self._running) >= self._max_requests:
            raise ResourceExhaustedError(
                f"{self._max_requests} requests are running, the most this router takes"
            )
        self._running.add(request_id)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(request_id)
            if not self._running:
                self._idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests and waits for the running ones.

        Returns:
            How many were still running at the timeout.
        """
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._running)
