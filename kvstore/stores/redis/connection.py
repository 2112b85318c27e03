"""Connections to Redis servers whose every wait ends with the call that waits.

redis-py's connections, with a `ReplyReader` for a parser and socket timeouts
that are what is left of the calling thread's time: connecting, TLS and logging
in, sending and receiving together take no longer, however slowly a server
trickles. Only the resolution of host names is the system's own.
"""

import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from redis import Connection, SSLConnection
from redis.connection import PythonRespSerializer
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from kvstore.stores.redis.reply import Reply, ReplyReader

__all__ = [
    "BoundedConnection",
    "BoundedSentinelConnection",
    "BoundedSentinelTlsConnection",
    "BoundedTlsConnection",
    "CallDeadline",
]

_READ_BYTES = 64 << 10
_JOINED_WRITE_BYTES = 6000


class CallDeadline(threading.local):
    """When the calling thread's call on a store must be over."""

    _ends_at = math.inf

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What is done inside takes at most so long, and no longer than what is outside."""
        outer_end = self._ends_at
        self._ends_at = min(outer_end, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._ends_at = outer_end

    def left_s(self) -> float:
        """Seconds that are left.

        Raises:
            TimeoutError: none are.
        """
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the store's time for this call is over")
        return left_s

    @contextmanager
    def locked(self, lock: "threading.Lock | threading.Semaphore") -> Iterator[None]:
        """Holds a lock or one of a semaphore's places.

        Raises:
            TimeoutError: others held it for all the time that was left.
        """
        if not lock.acquire(timeout=self.left_s()):
            raise TimeoutError("other calls on the store wait for the server")
        try:
            yield
        finally:
            lock.release()


class _Bounded:
    """Makes one of redis-py's connections keep to a deadline. Its pool must say `protocol=2`.

    Args:
        deadline: of the thread that uses the connection.
        longest_wait_s: for one answer, where others may be asked instead.
        settings: what the connection's own class takes.
    """

    _sock: Any
    _parser: ReplyReader

    def __init__(
        self, *, deadline: CallDeadline, longest_wait_s: float = math.inf, **settings: Any
    ) -> None:
        self._deadline = deadline
        self._longest_wait_s = longest_wait_s
        super().__init__(  # type: ignore[call-arg]
            parser_class=ReplyReader,
            socket_read_size=_READ_BYTES,
            command_packer=PythonRespSerializer(_JOINED_WRITE_BYTES, _encode),
            **settings,
        )

    def left_s(self) -> float:
        """Seconds that the next wait may take.

        Raises:
            TimeoutError: none.
        """
        return min(self._longest_wait_s, self._deadline.left_s())

    @property
    def socket(self) -> socket.socket | Any:
        """The socket, which may speak TLS; None once disconnected."""
        return self._sock

    @property
    def socket_timeout(self) -> float:
        """What redis-py gives a socket for the time that it connects and shakes hands."""
        return self.left_s()

    @socket_timeout.setter
    def socket_timeout(self, value: float | None) -> None:
        """redis-py sets what it was told, which is nothing."""

    socket_connect_timeout = socket_timeout

    def send_packed_command(self, command: Iterable[Any], check_health: bool = True) -> None:
        """See redis-py. What is sent is not copied."""
        for piece in command:
            self._sock.settimeout(self.left_s())
            super().send_packed_command([piece], check_health)  # type: ignore[misc]

    def read_reply(self, into: memoryview | None = None) -> Reply:
        """See `ReplyReader.read_reply`. After an error the connection must be dropped."""
        return self._parser.read_reply(into)


class BoundedConnection(_Bounded, Connection):  # type: ignore[misc]
    """To a server, or to a sentinel."""


class BoundedTlsConnection(_Bounded, SSLConnection):  # type: ignore[misc]
    """The same over TLS."""


class BoundedSentinelConnection(_Bounded, SentinelManagedConnection):  # type: ignore[misc]
    """To the server that sentinels call the master when it connects."""


class BoundedSentinelTlsConnection(_Bounded, SentinelManagedSSLConnection):  # type: ignore[misc]
    """The same over TLS."""


def _encode(argument: Any) -> bytes | memoryview:
    """Large views stay views, which are sent from where they lie; the rest is sent together."""
    if isinstance(argument, memoryview):
        return argument if argument.nbytes > _JOINED_WRITE_BYTES else bytes(argument)
    return argument if isinstance(argument, bytes) else str(argument).encode()
