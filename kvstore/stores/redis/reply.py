"""`ReplyReader`: reads a Redis server's replies, and bulk values directly into the caller's memory.

It replaces redis-py's parsers, which collect a value in a buffer of their own
and return it as `bytes`. Every wait is bounded by what is left of the call's time.
"""

import select
from typing import Any, TypeAlias

from redis import ConnectionError as RedisConnectionError
from redis import InvalidResponse, RedisError
from redis.connection import DefaultParser

from kvstore.store import KvObject
from kvstore.stores.redis.messages import CLOSED

__all__ = ["Reply", "ReplyReader"]

Reply: TypeAlias = "bytes | int | list[Any] | RedisError | None"
"""A reply; an error is a value here. A bulk value read into a buffer is its size."""

_MAX_REPLY_BYTES = 16 << 20
_MAX_DEPTH = 8
_MAX_QUOTED = 40


class ReplyReader:
    """Reads RESP2 replies of one connection; see `redis.connection.AbstractConnection.set_parser`.

    Args:
        socket_read_size: size of the buffer for all replies but bulk values with memory.
    """

    def __init__(self, socket_read_size: int) -> None:
        self._buffer = bytearray(socket_read_size)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # of the received bytes that were not read yet
        self._connection: Any = None

    def on_connect(self, connection: Any) -> None:
        """Starts to read from a `BoundedConnection` that has just been connected."""
        self._connection = connection
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        """Forgets the connection."""
        self._connection = None

    def can_read(self, timeout: float = 0) -> bool:
        """Whether anything was received: on an idle connection, a late reply or its end."""
        sock = self._connection.socket
        if self._start < self._end or getattr(sock, "pending", int)():
            return True
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def read_response(self, disable_decoding: bool = False, timeout: Any = None) -> Reply:
        """Reads the next reply, for redis-py's handshakes.

        Raises:
            redis.ConnectionError: the reply is an error of the connection, or the connection ended.
            redis.InvalidResponse: the reply is not RESP2.
            TimeoutError: the call's time is over.
        """
        reply = self.read_reply()
        if isinstance(reply, RedisConnectionError):
            raise reply
        return reply

    def read_reply(self, into: KvObject | None = None, depth: int = 0) -> Reply:
        """Reads the next reply.

        Args:
            into: where a bulk value goes if it has the same size; one of another
                size is read and dropped. Either way the reply is the value's size.
            depth: number of arrays around the reply.

        Raises:
            redis.ConnectionError, redis.InvalidResponse, TimeoutError: see `read_response`.
        """
        line = self._read_line()
        kind, text = line[:1], line[1:]
        if kind == b"$":
            return self._read_bulk(_number(text), into)
        if kind == b":":
            return _number(text)
        if kind == b"+":
            return text
        if kind == b"-":
            return _error(text.decode(errors="replace"))
        if kind == b"*" and depth < _MAX_DEPTH:
            return self._read_array(_number(text), depth + 1)
        raise InvalidResponse(f"no reply begins with {line[:20]!r}")

    def _read_array(self, length: int, depth: int) -> Reply:
        if length < 0:
            return None
        return [self.read_reply(depth=depth) for _ in range(_bounded(length))]

    def _read_bulk(self, num_bytes: int, into: KvObject | None) -> Reply:
        if num_bytes < 0:
            return None
        value: bytes | int = num_bytes
        if into is None:
            body = bytearray(_bounded(num_bytes))
            self._fill(memoryview(body))
            value = bytes(body)
        elif num_bytes == into.nbytes:
            for view in into:
                self._fill(view)
        else:
            self._drop(num_bytes)
        if self._read_line():
            raise InvalidResponse("a bulk value is longer than it says")
        return value

    def _read_line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._receive_more()
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _fill(self, into: memoryview) -> None:
        num_filled = min(into.nbytes, self._end - self._start)
        into[:num_filled] = self._view[self._start : self._start + num_filled]
        self._start += num_filled
        while num_filled < into.nbytes:
            num_filled += self._receive(into[num_filled:])

    def _drop(self, num_bytes: int) -> None:
        while num_bytes > self._end - self._start:
            num_bytes -= self._end - self._start
            self._start = self._end
            self._receive_more()
        self._start += num_bytes

    def _receive_more(self) -> None:
        """Moves the unread bytes to the front of the buffer, and receives more behind them."""
        num_unread = self._end - self._start
        self._view[:num_unread] = self._view[self._start : self._end]
        self._start, self._end = 0, num_unread
        if num_unread == len(self._buffer):
            raise InvalidResponse("a line does not end")
        self._end += self._receive(self._view[num_unread:])

    def _receive(self, into: memoryview) -> int:
        connection = self._connection
        if connection is None:  # closed by another thread
            raise RedisConnectionError("the connection was closed")
        connection.socket.settimeout(connection.left_s())
        num_received: int = connection.socket.recv_into(into)
        if not num_received:
            raise RedisConnectionError(CLOSED)
        return num_received


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidResponse(f"{text[:20]!r} is no number") from None


def _error(text: str) -> RedisError:
    try:
        error: RedisError = DefaultParser.parse_error(text)
    except (ValueError, IndexError):  # a redirection without an address
        raise InvalidResponse(f"{text[:_MAX_QUOTED]!r} is no error of redis") from None
    return error


def _bounded(size: int) -> int:
    """Limits what a server can make this process allocate. Values with memory may be larger."""
    if size > _MAX_REPLY_BYTES:
        raise InvalidResponse(f"a reply of {size} bytes or elements was not asked for")
    return size
