"""`PlainParser`: a parser of HTTP/1.1 that ignores requests to change to another protocol."""

from collections.abc import Iterable
from typing import Any, Protocol

import httptools

__all__ = ["ParserEvents", "PlainParser"]

_BODY_HEADERS = (b"content-length", b"transfer-encoding")


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
