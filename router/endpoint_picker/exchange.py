"""`Exchange`: what an endpoint picker says about one HTTP request, message by message. Pure.

Envoy sends the parts of a request and of its answer, and waits for what happens to each. How it
sends a body (`ExtProcBodyMode`) decides when the server can be named:

FULL_DUPLEX_STREAMED   the headers wait here until the body has come; then headers and body go on.
                       This is what the Gateway API Inference Extension prescribes.
BUFFERED               the headers are let through, and wait in Envoy for the answer about the body.
other modes            the headers are all that the choice can depend on.

A request whose body is of no use to the choice (another path or method) is sent on at its headers.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

from baton.common.errors import InvalidArgumentError, Reason
from baton.v1 import endpoint_picker_pb2 as pb
from router.endpoint_picker.messages import (
    AskedRequest,
    body_pieces,
    immediate_answer,
    naming_answer,
    read_headers,
    trailers_answer,
    unchanged,
)
from router.http.errors import Problem

__all__ = ["Exchange", "HeldBytes", "Picked", "RefusedError"]

_DUPLEX = pb.EXT_PROC_BODY_MODE_FULL_DUPLEX_STREAMED
_WHOLE = (
    _DUPLEX,
    pb.EXT_PROC_BODY_MODE_BUFFERED,
    pb.EXT_PROC_BODY_MODE_BUFFERED_PARTIAL,
)
"""Modes in which the choice can depend on the body."""


class Picked(NamedTuple):
    """The server of a request.

    Attributes:
        destination: its `ip:port`.
        release: called once when its answer begins, or the exchange ends.
    """

    destination: str
    release: Callable[[], None]


class RefusedError(Exception):
    """A request is to be answered without a server.

    Args:
        problem: the answer.

    Attributes:
        problem: the answer.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


Pick = Callable[[AskedRequest, bytes | None], Awaitable[Picked]]
"""Chooses the server of a request, given its body; None if the body is not known.

Raises:
    RefusedError: no server may have it.
"""


class HeldBytes:
    """The bytes of bodies that wait for a choice, of all requests together.

    Args:
        max_bytes: the most of one request.
        max_total_bytes: the most of all requests.

    Attributes:
        total: of all requests.
    """

    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self.total = 0

    def has_room(self, num_held: int, num_more: int) -> bool:
        """Whether a request that holds some bytes may hold so many more."""
        is_small = num_held + num_more <= self._max_bytes
        return is_small and self.total + num_more <= self._max_total_bytes


class Exchange:
    """One HTTP request and its answer. The caller closes it.

    Args:
        pick: chooses the server.
        uses_body: whether the choice depends on the body, given the headers.
        held: counts the bytes that wait.

    Attributes:
        is_decided: whether the server was chosen, or the request refused.
    """

    def __init__(
        self, pick: Pick, uses_body: Callable[[AskedRequest], bool], held: HeldBytes
    ) -> None:
        self.is_decided = False
        self._pick = pick
        self._uses_body = uses_body
        self._held = held
        self._asked: AskedRequest | None = None
        self._body = bytearray()
        self._request_mode: int = _DUPLEX
        self._response_mode: int = _DUPLEX
        self._release: Callable[[], None] | None = None

    async def take(self, message: pb.ExtProcRequest) -> list[pb.ExtProcResponse]:
        """Returns what a message is answered with: nothing while the request waits for its body.

        Args:
            message: Envoy's next message.

        Raises:
            InvalidArgumentError: the message has no part, or the headers came twice or late.
        """
        try:
            return await self._take(message)
        except RefusedError as error:
            return [immediate_answer(error.problem, self._require_asked().path)]

    def close(self) -> None:
        """Gives back what the request holds. Idempotent."""
        self._drop_body()
        self._end_load()

    async def _take(self, message: pb.ExtProcRequest) -> list[pb.ExtProcResponse]:
        match message.WhichOneof("part"):
            case "request_headers":
                return await self._take_headers(message)
            case "request_body":
                return await self._take_body(message.request_body)
            case "request_trailers":
                return await self._take_trailers()
            case "response_headers":
                self._end_load()
                return [pb.ExtProcResponse(response_headers=unchanged())]
            case "response_body":
                return list(self._answer_body(message.response_body))
            case "response_trailers":
                return [pb.ExtProcResponse(response_trailers=trailers_answer())]
        raise InvalidArgumentError(
            "the message has no part of a request or an answer", reason=Reason.MALFORMED_MESSAGE
        )

    async def _take_headers(self, message: pb.ExtProcRequest) -> list[pb.ExtProcResponse]:
        if self._asked is not None:
            raise InvalidArgumentError(
                "the headers came twice", reason=Reason.MALFORMED_MESSAGE, field="request_headers"
            )
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self._asked = asked = read_headers(message)
        has_body = not message.request_headers.end_of_stream
        if not has_body or self._request_mode not in _WHOLE or not self._uses_body(asked):
            return [await self._name_server("request_headers", None)]
        if self._request_mode == _DUPLEX:
            return []
        return [pb.ExtProcResponse(request_headers=unchanged())]

    async def _take_body(self, body: pb.ExtProcBody) -> list[pb.ExtProcResponse]:
        if not self._is_waiting():
            return list(self._pass_on(body.body, is_end=body.end_of_stream))
        fits = self._held.has_room(len(self._body), len(body.body))
        self._body += body.body
        self._held.total += len(body.body)
        if self._request_mode != _DUPLEX:
            # The beginning of a large body (BUFFERED_PARTIAL) is no JSON: the load decides then.
            return [await self._name_server("request_body", bytes(self._body) if fits else None)]
        if fits and not body.end_of_stream:
            return []
        return await self._send_on(is_known=fits, is_end=body.end_of_stream)

    async def _take_trailers(self) -> list[pb.ExtProcResponse]:
        """Takes the end of a request that has trailers: its body is whole now."""
        answers: list[pb.ExtProcResponse] = []
        if self._is_waiting() and self._request_mode == _DUPLEX:
            answers = await self._send_on(is_known=True, is_end=False)
        return [*answers, pb.ExtProcResponse(request_trailers=trailers_answer())]

    async def _send_on(self, *, is_known: bool, is_end: bool) -> list[pb.ExtProcResponse]:
        """Names the server, and lets the headers and the body go on that have waited.

        Args:
            is_known: whether the whole body has come.
            is_end: whether nothing follows it.
        """
        body = bytes(self._body)
        first = await self._name_server("request_headers", body if is_known else None)
        return [first, *self._pass_on(body, is_end=is_end)]

    async def _name_server(self, part: str, body: bytes | None) -> pb.ExtProcResponse:
        """Returns the answer about a part that names the server.

        Args:
            part: request_headers or request_body.
            body: the body, if it is known.
        """
        asked, self.is_decided = self._require_asked(), True
        try:
            picked = await self._pick(asked, body)
        finally:
            self._drop_body()
        self._release = picked.release
        return naming_answer(part, picked.destination)

    def _pass_on(self, body: bytes, *, is_end: bool) -> Iterator[pb.ExtProcResponse]:
        """Yields what lets a part of the request's body go on."""
        if self._request_mode != _DUPLEX:
            yield pb.ExtProcResponse(request_body=unchanged())
        elif body or is_end:
            for piece in body_pieces(body, is_end=is_end):
                yield pb.ExtProcResponse(request_body=piece)

    def _answer_body(self, body: pb.ExtProcBody) -> Iterator[pb.ExtProcResponse]:
        """Yields what lets a part of the answer's body go on."""
        self._end_load()
        if self._response_mode != _DUPLEX:
            yield pb.ExtProcResponse(response_body=unchanged())
            return
        for piece in body_pieces(body.body, is_end=body.end_of_stream):
            yield pb.ExtProcResponse(response_body=piece)

    def _is_waiting(self) -> bool:
        """Whether the request waits for a choice.

        Raises:
            InvalidArgumentError: its headers have not come.
        """
        self._require_asked()
        return not self.is_decided

    def _require_asked(self) -> AskedRequest:
        if self._asked is None:
            raise InvalidArgumentError(
                "a body came before the headers of its request", reason=Reason.MALFORMED_MESSAGE
            )
        return self._asked

    def _drop_body(self) -> None:
        self._held.total -= len(self._body)
        self._body = bytearray()

    def _end_load(self) -> None:
        """Notes that the server reports the request itself from now on, or that it has ended."""
        release, self._release = self._release, None
        if release is not None:
            release()
