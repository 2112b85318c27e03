"""Answers of the Responses API and of Anthropic's API over a chat's chunks, whole and streamed."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from router.chat.chat_request import ChatChunk
from router.http.context import context_of
from router.http.errors import Problem
from router.http.json_bytes import json_bytes, json_response
from router.http.sse import Emit, SseResponse, unless_client_leaves

__all__ = ["Answer", "AnswerStream", "stream_answer", "whole_answer"]

Chunks = AsyncGenerator[ChatChunk, None]
_Event = dict[str, Any]


class Answer(Protocol):
    """A whole answer that is made of chunks."""

    def push(self, chunk: ChatChunk) -> Any:
        """Adds a chunk."""

    def finish(self) -> Any:
        """Ends the answer."""

    def body(self) -> dict[str, Any]:
        """The JSON body."""


class AnswerStream(Protocol):
    """The events of an answer, each with its name as `type`."""

    def push(self, chunk: ChatChunk) -> Sequence[_Event]:
        """The events of a chunk."""

    def finish(self) -> Sequence[_Event]:
        """The last events."""

    def fail(self, problem: Problem) -> Sequence[_Event]:
        """The last events of an answer that fails."""


async def whole_answer(chunks: Chunks, answer: Answer, request: Request) -> Response:
    """Returns the whole answer.

    Raises:
        BatonError: the chat failed, or the client has left.
    """

    async def collect() -> dict[str, Any]:
        async with aclosing(chunks):
            async for chunk in chunks:
                answer.push(chunk)
        answer.finish()
        return answer.body()

    return json_response(await unless_client_leaves(request.receive, collect()))


def stream_answer(
    chunks: Chunks, stream: AnswerStream, request: Request, request_id: str
) -> Response:
    """Returns an answer that sends the events. The first ones wait for the first chunk: an
    error before it has its own status.
    """

    async def produce(emit: Emit) -> None:
        async with aclosing(chunks):
            async for chunk in chunks:
                if events := stream.push(chunk):
                    await emit(_lines(events))
            await emit(_lines(stream.finish()))

    return SseResponse(
        produce,
        error_event=lambda problem: _lines(stream.fail(problem)),
        request_id=request_id,
        keepalive_s=context_of(request).config.keepalive_interval_s,
    )


def _lines(events: Sequence[_Event]) -> bytes:
    """Server-sent events with their names."""
    return b"".join(map(_line, events))


def _line(event: _Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_bytes(event))
