"""A gRPC client of plain frames, which does what the libraries would not: it reads no messages,
leaves without a word, or ends its half of the connection.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
_CANCEL = 8


class RawConnection:
    """A connection whose streams take `window` bytes each, until `read_on`.

    Attributes:
        goaways: the error codes of the GOAWAY frames that have come.
        headers: the header blocks that have come, of answers and of their ends.
        is_open: whether the server has not closed the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.goaways: list[int] = []
        self.headers: list[bytes] = []
        self.is_open = True
        self._reader, self._writer = reader, writer
        self._last_stream = -1
        self._reading = asyncio.create_task(self._read())

    @classmethod
    @asynccontextmanager
    async def open(cls, port: int, window: int = 65535) -> AsyncIterator["RawConnection"]:
        connection = cls(*await asyncio.open_connection("127.0.0.1", port))
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        connection._writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        try:
            yield connection
        finally:
            connection._reading.cancel()
            connection._writer.transport.abort()

    def call(self, method: str, message: Any = None, *, timeout: str | None = None) -> int:
        """Begins a call with one message; without one, its request does not come. Returns its
        stream.
        """
        self._last_stream += 2
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x"}
        headers |= {"content-type": "application/grpc", "te": "trailers"}
        if timeout is not None:
            headers["grpc-timeout"] = timeout
        block = b"".join(_literal(name, value) for name, value in headers.items())
        self._writer.write(_frame(_HEADERS, _END_HEADERS, self._last_stream, block))
        if message is not None:
            data = message.SerializeToString()
            data = struct.pack(">BI", 0, len(data)) + data
            self._writer.write(_frame(_DATA, _END_STREAM, self._last_stream, data))
        return self._last_stream

    def read_on(self, stream: int) -> None:
        """Lets the server send the rest of a call's messages."""
        self._writer.write(_frame(_WINDOW_UPDATE, 0, stream, struct.pack(">I", 2**20)))

    def cancel(self, stream: int) -> None:
        """Cancels a call."""
        self._writer.write(_frame(_RST_STREAM, 0, stream, struct.pack(">I", _CANCEL)))

    def ping(self) -> None:
        self._writer.write(_frame(_PING, 0, 0, bytes(8)))

    def half_close(self) -> None:
        """Ends this side of the TCP connection; the other one stays open."""
        self._writer.write_eof()

    def vanish(self) -> None:
        """Leaves with a reset of the TCP connection, as a process does that is killed."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_open = False

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._writer.write(_frame(_PING, _ACK, 0, payload))
        elif kind == GOAWAY:
            self.goaways.append(int.from_bytes(payload[4:8], "big"))
        elif kind == _HEADERS:
            self.headers.append(payload)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header in HPACK's form without an index and without compression."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))
