"""`LimitedProtocol`: uvicorn's connection, with bounds on time and memory.

Uvicorn alone has none for headers, trailers and the framing of chunks, waits for ever on a client
that sends a byte now and then or does not read, and does not end the first of several pipelined
requests when the client leaves.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import httptools
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.config.http import HttpConfig

__all__ = ["LimitedProtocol", "ParserEvents", "PlainParser", "limited_protocol"]

_BODY_HEADERS = (b"content-length", b"transfer-encoding")
MAX_HEAD_BYTES = 64 * 1024
"""The most bytes of a request's first line and headers, to within one read of the socket."""
MAX_PIPELINED = 64
"""The most requests of one connection that wait or run."""
_FRAMING = 2
"""Bytes on the wire per byte of a body, at most: chunks have sizes, extensions and trailers."""
_TOO_LARGE_HEAD = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class ParserEvents(Protocol):
    """Callbacks of a parser; httptools finds them by name.

    Attributes:
        headers: of the message.
    """

    headers: list[tuple[bytes, bytes]]


class PlainParser:
    """Parses requests with httptools.

    A client may offer another protocol with its first request, as Java's does with HTTP/2. A
    server that does not take the offer answers the request. httptools ends there and drops the
    body, so that another of its parsers reads on.

    Args:
        events: gets the events.

    Attributes:
        is_silent: whether events are of headers that were parsed before; `events` ignores them.
    """

    def __init__(self, events: ParserEvents) -> None:
        self.is_silent = False
        self._events = events
        self._parser = _new_parser(events)

    @property
    def ends_early(self) -> bool:
        """Whether the end of the message that httptools has found is that of its headers."""
        return bool(self._parser.should_upgrade())

    def feed_data(self, data: bytes) -> None:
        """Parses bytes.

        Raises:
            HttpParserError: they are no request, or an event has raised.
        """
        while True:  # each round is a request that offers another protocol
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parser = _new_parser(self._events)
                self.is_silent = True
                self._parser.feed_data(_head_of_body(self._events.headers))
                self.is_silent = False
                data = data[upgrade.args[0] :]
            else:
                return

    def should_upgrade(self) -> bool:
        """Returns False: another protocol is never taken."""
        return False

    def should_keep_alive(self) -> bool:
        """Whether the connection stays open after the message."""
        return bool(self._parser.should_keep_alive())

    def get_http_version(self) -> str:
        """The version, such as 1.1."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """The method of the request."""
        return bytes(self._parser.get_method())


def _new_parser(events: ParserEvents) -> Any:
    parser = httptools.HttpRequestParser(events)
    # As uvicorn does: data after the last request of a connection is no error.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _head_of_body(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers after which a parser reads the body that was announced."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] in _BODY_HEADERS]
    return b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines)


class RefusedRequestError(Exception):
    """A request must not be read to its end."""


class LimitedProtocol(HttpToolsProtocol):
    """A connection of a client, which gets an end if it costs too much.

    Reasons: its headers do not arrive within `header_timeout_s` or are too large; a message has
    far more bytes than a body may have, or its end is unclear; the client does not read for
    `send_timeout_s`; too many requests wait.

    A connection that is older than `max_connection_age_s`, or whose server drains, ends with the
    answer to its next request.

    Attributes:
        limits: the limits.
        is_draining: whether the server drains.
        parser: parses the requests.
        opened_at: `time` of the event loop when the connection was made.
    """

    limits: ClassVar[HttpConfig]
    is_draining: ClassVar[bool] = False
    parser: PlainParser  # type: ignore[assignment]
    opened_at = 0.0
    _header_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _is_in_body = False
    _has_parsed = False
    _num_bytes = 0
    _closing_since: float | None = None
    _cycles: tuple[RequestResponseCycle, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = PlainParser(self)

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.opened_at = self.loop.time()
        self._start_header_timer()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_send_timer()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles = ()

    @override
    def data_received(self, data: bytes) -> None:
        self._has_parsed = False
        super().data_received(data)
        # Bytes since the message's last step; the part of this read before the step is left out.
        self._num_bytes = 0 if self._has_parsed else self._num_bytes + len(data)
        if self.transport.is_closing():
            return
        if self._num_bytes > self._most_bytes:
            self._refuse_message()
        elif self._is_idle and self._header_timer is None and self.timeout_keep_alive_task is None:
            # Bytes between messages, such as empty lines, have stopped uvicorn's timer.
            self._start_header_timer()

    @override
    def on_message_begin(self) -> None:
        if self.parser.is_silent:
            return
        self._has_parsed, self._is_in_body = True, False
        if self._header_timer is None:
            self._start_header_timer()
        super().on_message_begin()

    @override
    def on_url(self, url: bytes) -> None:
        if not self.parser.is_silent:
            super().on_url(url)

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        # Fields behind a body would become headers of a request that runs already.
        if not self.parser.is_silent and not self._is_in_body:
            super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        if self.parser.is_silent or self.transport.is_closing():
            return
        _check_coding(self.headers, self.parser.get_http_version())
        self._has_parsed, self._is_in_body = True, True
        self._stop_header_timer()
        super().on_headers_complete()
        self.cycle.keep_alive = self.cycle.keep_alive and not self._is_last
        running = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles = (*running, self.cycle)
        if len(self._cycles) > MAX_PIPELINED:
            self.transport.abort()
            raise RefusedRequestError  # the parser reads no further

    @override
    def on_message_complete(self) -> None:
        if self.parser.ends_early:
            return
        self._has_parsed, self._is_in_body = True, False
        super().on_message_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        if self._is_idle:
            super().send_400_response(msg)
        else:  # it would become a part of the answer that is under way
            self.transport.abort()

    @override
    def pause_writing(self) -> None:
        # A mere close would wait until the client has read what is under way.
        self._send_timer = self.loop.call_later(self.limits.send_timeout_s, self.transport.abort)
        super().pause_writing()

    @override
    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def sweep(self) -> None:
        """Called now and then: ends a close that waits too long for the client to read."""
        if not self.transport.is_closing():
            return
        if self._closing_since is None:
            self._closing_since = self.loop.time()
        elif self.loop.time() - self._closing_since > self.limits.send_timeout_s:
            self.transport.abort()

    @property
    def is_silent(self) -> bool:
        """Whether no request has come, and the connection has not been ended for that."""
        return self.cycle is None and not self.transport.is_closing()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_last(self) -> bool:
        """Whether the connection ends with the request that has begun."""
        max_age_s = self.limits.max_connection_age_s
        is_old = max_age_s is not None and self.loop.time() - self.opened_at > max_age_s
        return is_old or self.is_draining

    @property
    def _most_bytes(self) -> int:
        body_bytes = _FRAMING * self.limits.max_request_bytes if self._is_in_body else 0
        return MAX_HEAD_BYTES + body_bytes

    def _refuse_message(self) -> None:
        if self._is_idle and not self._is_in_body:
            self.transport.write(_TOO_LARGE_HEAD)
            self.transport.close()
        else:  # an answer is under way
            self.transport.abort()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(
            self.limits.header_timeout_s, self._end_header_time
        )

    def _end_header_time(self) -> None:
        self._header_timer = None
        if self._is_idle:
            self.timeout_keep_alive_handler()
        else:  # the next request may not be read yet
            self._start_header_timer()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def _check_coding(headers: Iterable[tuple[bytes, bytes]], version: str) -> None:
    """Refuses codings of a body that a proxy in front may understand otherwise, so that its end
    is not where the proxy sees it: a client could hide a request of its own behind it.

    Raises:
        RefusedRequestError: the coding is not one `chunked` of HTTP/1.1. The parser has refused
            what else makes the end of a body unclear.
    """
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version != "1.1"):
        raise RefusedRequestError


def limited_protocol(config: HttpConfig) -> type[LimitedProtocol]:
    """The protocol with the limits of a config; uvicorn makes its objects itself."""
    return type("_Protocol", (LimitedProtocol,), {"limits": config})
