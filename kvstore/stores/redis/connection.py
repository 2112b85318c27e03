"""Connections to Redis servers on which every wait is bounded by the deadline of the call.

They are redis-py's connections with a `ReplyReader` as parser and with socket timeouts set to
what is left of the calling thread's time: connecting, TLS, logging in, sending and receiving
together take no longer than the call may, however slowly a server answers. Only resolving host
names is outside this bound.
"""

import math
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from redis import Connection, SSLConnection
from redis import ConnectionError as RedisConnectionError
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from kvstore.store import KvObject
from kvstore.stores.redis.reply import Reply, ReplyReader

__all__ = [
    "Argument",
    "BoundedConnection",
    "BoundedSentinelConnection",
    "BoundedSentinelTlsConnection",
    "BoundedTlsConnection",
    "CallDeadline",
    "pack",
]

Argument: TypeAlias = "bytes | str | int | KvObject"
"""An argument of a command. The views of an object are one value."""

_READ_BYTES = 64 << 10
_JOINED_WRITE_BYTES = 6000  # shorter values are copied together, as that is quicker
_MAX_BUFFERS_PER_SEND = 1024  # IOV_MAX of Linux


class CallDeadline(threading.local):
    """The time at which the calling thread's call on a store must end."""

    _ends_at = math.inf

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limits the block to `seconds`, and to the limit of any block around it."""
        outer_end = self._ends_at
        self._ends_at = min(outer_end, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._ends_at = outer_end

    def left_s(self) -> float:
        """Returns the seconds left.

        Raises:
            TimeoutError: none are left.
        """
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the store's time for this call is over")
        return left_s

    @contextmanager
    def locked(self, lock: "threading.Lock | threading.Semaphore") -> Iterator[None]:
        """Holds a lock, or one place of a semaphore.

        Raises:
            TimeoutError: other threads held it for all the time that was left.
        """
        if not lock.acquire(timeout=self.left_s()):
            raise TimeoutError("other calls on the store wait for the server")
        try:
            yield
        finally:
            lock.release()


class _Bounded:
    """Bounds the waits of a redis-py connection. Its pool must be made with `protocol=2`.

    Args:
        deadline: of the thread that uses the connection.
        longest_wait_s: for one answer, where another server may be asked instead.
        settings: what the connection's own class takes.
    """

    _sock: Any
    _parser: ReplyReader

    def __init__(
        self, *, deadline: CallDeadline, longest_wait_s: float = math.inf, **settings: Any
    ) -> None:
        self._deadline = deadline
        self._longest_wait_s = longest_wait_s
        super().__init__(  # type: ignore[call-arg]  # of redis-py's class, which comes second
            parser_class=ReplyReader, socket_read_size=_READ_BYTES, **settings
        )

    def left_s(self) -> float:
        """Returns the seconds that the next wait may take.

        Raises:
            TimeoutError: none are left.
        """
        return min(self._longest_wait_s, self._deadline.left_s())

    @property
    def socket(self) -> socket.socket | Any:
        """The socket, plain or TLS; None once disconnected."""
        return self._sock

    @property
    def socket_timeout(self) -> float:
        """The timeout that redis-py sets while it connects and shakes hands."""
        return self.left_s()

    @socket_timeout.setter
    def socket_timeout(self, value: float | None) -> None:
        """Ignores redis-py's own setting, which is None."""

    socket_connect_timeout = socket_timeout

    def send_packed_command(self, command: Iterable[Any], check_health: bool = True) -> None:
        """Sends what redis-py has packed, in a handshake."""
        for piece in command:
            self._sock.settimeout(self.left_s())
            super().send_packed_command([piece], check_health)  # type: ignore[misc]  # as above

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Sends buffers from where they lie, many by one system call.

        After an error the connection must be dropped.

        Raises:
            OSError: the server is gone.
            redis.ConnectionError: another thread closed the connection.
            TimeoutError: the call's time is over.
        """
        for first in range(0, len(buffers), _MAX_BUFFERS_PER_SEND):
            left = [memoryview(buffer) for buffer in buffers[first : first + _MAX_BUFFERS_PER_SEND]]
            while left:
                left = _without(left, self._send_some(left))

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        """Returns how many bytes were sent."""
        sock = self._sock
        if sock is None:
            raise RedisConnectionError("the connection was closed")
        sock.settimeout(self.left_s())
        if isinstance(sock, ssl.SSLSocket):  # has no `sendmsg`
            return sock.send(buffers[0])
        num_sent: int = sock.sendmsg(buffers)
        return num_sent

    def read_reply(self, into: KvObject | None = None) -> Reply:
        """Calls `ReplyReader.read_reply`. After an error the connection must be dropped."""
        return self._parser.read_reply(into)


class BoundedConnection(_Bounded, Connection):  # type: ignore[misc]  # redis-py is untyped
    """A connection to a server, or to a sentinel."""


class BoundedTlsConnection(_Bounded, SSLConnection):  # type: ignore[misc]
    """The same over TLS."""


class BoundedSentinelConnection(_Bounded, SentinelManagedConnection):  # type: ignore[misc]
    """A connection to the server that is the sentinels' master when it connects."""


class BoundedSentinelTlsConnection(_Bounded, SentinelManagedSSLConnection):  # type: ignore[misc]
    """The same over TLS."""


def pack(commands: Iterable[Sequence[Argument]]) -> list[bytes | memoryview]:
    """Returns commands as buffers in Redis' protocol. Large views are not copied."""
    buffers: list[bytes | memoryview] = []
    joined = bytearray()
    for arguments in commands:
        joined += b"*%d\r\n" % len(arguments)
        for argument in arguments:
            views = argument if isinstance(argument, KvObject) else (_encode(argument),)
            joined += b"$%d\r\n" % sum(map(len, views))
            for view in views:
                if len(view) > _JOINED_WRITE_BYTES:
                    buffers += (bytes(joined), view)
                    joined.clear()
                else:
                    joined += view
            joined += b"\r\n"
    buffers.append(bytes(joined))
    return buffers


def _encode(argument: bytes | str | int) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()


def _without(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Returns what is left of buffers behind their first bytes."""
    for index, buffer in enumerate(buffers):
        if num_bytes < buffer.nbytes:
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= buffer.nbytes
    return []
