"""Connections to Redis servers on which every wait is bounded by the deadline of the call.

They are redis-py's connections with a `ReplyReader` as parser and with socket timeouts set to
what is left of the calling thread's time: connecting, TLS, logging in, sending and receiving
together take no longer than the call may, however slowly a server answers. Only resolving host
names is outside this bound. A name's addresses are tried one after the other, each for a share of
the time.
"""

import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from redis import AuthenticationError, Connection, RedisError, ResponseError, SSLConnection
from redis import ConnectionError as RedisConnectionError
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from baton.common.addresses import join_host_port
from kvstore.store import KvObject
from kvstore.stores.redis.messages import describe, is_closed, is_timeout, other_protocol
from kvstore.stores.redis.reply import Reply, ReplyReader
from kvstore.stores.redis.url import AddressBook

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
_TLS_SHARE = 1 / 2
_TLS_FILES = {"ca_file": "ca_certs", "cert_file": "certfile", "key_file": "keyfile"}

_logger = logging.getLogger("baton.kvstore")


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

    def within_share(self, share: float) -> AbstractContextManager[None]:
        """Limits the block to a share of the time left."""
        return self.within(share * max(0.0, self._ends_at - time.monotonic()))

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
        addresses: those of the servers' names.
        longest_wait_s: for one answer, where another server may be asked instead.
        settings: what the connection's own class takes.
    """

    host: str
    port: int
    _sock: Any
    _parser: ReplyReader

    def __init__(
        self,
        *,
        deadline: CallDeadline,
        addresses: AddressBook,
        longest_wait_s: float = math.inf,
        **settings: Any,
    ) -> None:
        self._deadline = deadline
        self._addresses = addresses
        self.address = ""
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
    def server(self) -> str:
        """The server's name, for logs and errors."""
        return join_host_port(self.host, self.port)

    def connect_check_health(self, check_health: bool = True, **settings: Any) -> None:
        """Connects to the first address that answers, and logs in. redis-py calls it.

        Raises:
            redis.RedisError: the server refuses, or no address answers in time.
        """
        if self._sock:
            return
        failures: list[str] = []
        addresses = self._resolve()
        for index, address in enumerate(addresses):
            self.address = address
            with self._share(len(addresses) - index):
                try:
                    with self._first_part():
                        super().connect_check_health(check_health, **settings)  # type: ignore[misc]
                except (RedisError, OSError) as error:
                    self.disconnect()  # type: ignore[attr-defined]  # of redis-py's class
                    if isinstance(error, AuthenticationError | ResponseError):
                        raise
                    failures.append(self._describe_failure(error))
                    is_news = self._addresses.failed(self.host, address) and len(addresses) > 1
                    if is_news and is_timeout(error):
                        _logger.warning("redis %s: %s", self.server, failures[-1])
                else:
                    return
        raise RedisConnectionError("; ".join(failures))

    def _resolve(self) -> list[str]:
        try:
            return self._addresses.addresses_of(self.host, self.port)
        except OSError as error:
            raise RedisConnectionError(f"the host cannot be resolved: {describe(error)}") from error

    def _share(self, num_left: int) -> AbstractContextManager[None]:
        """Limits the time of one of the addresses that are left."""
        left_s = self.left_s()
        return self._deadline.within(left_s if num_left == 1 else left_s / (num_left + 1))

    def _first_part(self) -> AbstractContextManager[None]:
        """Leaves a TLS connection time to find out why its handshake is not answered."""
        return self._deadline.within_share(_TLS_SHARE if self._is_tls else 1)

    @property
    def _is_tls(self) -> bool:
        return isinstance(self, SSLConnection)

    def _describe_failure(self, error: Exception) -> str:
        text = (
            describe(error) if self.address == self.host else f"{self.address}: {describe(error)}"
        )
        if is_timeout(error) if self._is_tls else is_closed(error):
            advice = self._other_protocol()
            text += f" ({advice})" if advice else ""
        return text

    def _other_protocol(self) -> str:
        try:
            left_s = self.left_s()
        except TimeoutError:
            return ""
        return other_protocol(self.address, self.port, is_tls=self._is_tls, seconds=left_s)

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

    def refusal(self) -> RedisError | None:
        """Returns the error with which the server closed a connection, if it has arrived."""
        try:
            reply = self._parser.read_reply() if self._parser.can_read() else None
        except (RedisError, OSError):
            return None
        return reply if isinstance(reply, RedisError) else None

    def read_reply(self, into: KvObject | None = None) -> Reply:
        """Calls `ReplyReader.read_reply`. After an error the connection must be dropped."""
        return self._parser.read_reply(into)


class _OneAddress(Connection):  # type: ignore[misc]  # redis-py is untyped
    """Connects to one address of its host, and presents the host's name nevertheless."""

    host: str
    address: str

    def _connect(self) -> socket.socket:
        name = self.host
        self.host = self.address
        try:
            connected: socket.socket = super()._connect()
        finally:
            self.host = name
        return connected


class _OneTlsAddress(SSLConnection, _OneAddress):  # type: ignore[misc]
    """The same over TLS."""

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> Any:
        for option, attribute in _TLS_FILES.items():
            path = getattr(self, attribute)
            if path and not os.access(path, os.R_OK):
                raise RedisConnectionError(f"{option} is {path!r}, which cannot be read")
        return super()._wrap_socket_with_ssl(sock)


class BoundedConnection(_Bounded, _OneAddress):
    """A connection to a server, or to a sentinel."""


class BoundedTlsConnection(_Bounded, _OneTlsAddress):
    """The same over TLS."""


class BoundedSentinelConnection(_Bounded, SentinelManagedConnection, _OneAddress):  # type: ignore[misc]
    """A connection to the server that is the sentinels' master when it connects."""


class BoundedSentinelTlsConnection(_Bounded, SentinelManagedSSLConnection, _OneTlsAddress):  # type: ignore[misc]
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
    """Returns the rest of buffers behind their first bytes."""
    for index, buffer in enumerate(buffers):
        if num_bytes < buffer.nbytes:
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= buffer.nbytes
    return []
