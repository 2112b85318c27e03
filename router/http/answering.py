"""Sends the answers of endpoints, whole or as a stream of events, until the client leaves."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from baton.common.request.answer import CandidateOutput
from router.http.endpoints import context_of
from router.http.errors import Problem
from router.http.json_bytes import json_bytes, json_response
from router.http.logprobs import num_logprob_bytes
from router.http.sse import Emit, SseResponse, error_event, unless_client_leaves
from router.requests.input_threads import convert_input

__all__ = ["Answer", "AnswerStream", "Job", "job_response", "stream_response", "whole_response"]

Outputs = AsyncGenerator[CandidateOutput, None]
_Event = dict[str, Any]


class Job(Protocol):
    """One request of OpenAI's completions APIs.

    Attributes:
        num_logprob_bytes: about how many bytes its log-probabilities take.
    """

    num_logprob_bytes: int

    async def whole(self) -> dict[str, Any]:
        """Returns the JSON body of the whole answer."""

    async def stream(self, emit: Emit) -> None:
        """Writes the events of the answer."""


async def job_response(
    job: Job, request: Request, request_id: str, *, streams: bool | None
) -> Response:
    """Returns the answer of a job, whole or as a stream.

    Raises:
        BatonError: the job failed before its answer began, or the client has left.
    """
    if not streams:
        answer = await unless_client_leaves(request.receive, job.whole())
        return await convert_input(job.num_logprob_bytes, json_response, answer)
    return SseResponse(
        job.stream,
        error_event=error_event,
        request_id=request_id,
        keepalive_s=context_of(request).config.keepalive_interval_s,
    )


class Answer(Protocol):
    """A whole answer that is made of outputs."""

    def push(self, output: CandidateOutput) -> Any:
        """Adds an output."""

    def finish(self) -> Any:
        """Ends the answer."""

    def body(self) -> dict[str, Any]:
        """The JSON body."""


class AnswerStream(Protocol):
    """The events of an answer, each with its name as `type`."""

    def push(self, output: CandidateOutput) -> Sequence[_Event]:
        """The events of an output."""

    def finish(self) -> Sequence[_Event]:
        """The last events."""

    def fail(self, problem: Problem) -> Sequence[_Event]:
        """The last events of an answer that fails."""


async def whole_response(outputs: Outputs, answer: Answer, request: Request) -> Response:
    """Returns the whole answer.

    Raises:
        BatonError: the chat failed, or the client has left.
    """
    num_bytes = 0

    async def collect() -> dict[str, Any]:
        nonlocal num_bytes
        async with aclosing(outputs):
            async for output in outputs:
                num_bytes += num_logprob_bytes(output.logprobs)
                answer.push(output)
        answer.finish()
        return answer.body()

    body = await unless_client_leaves(request.receive, collect())
    return await convert_input(num_bytes, json_response, body)


def stream_response(
    outputs: Outputs, stream: AnswerStream, request: Request, request_id: str
) -> Response:
    """Returns an answer that sends the events. The first ones wait for the first output: an
    error before it has its own status.
    """

    async def produce(emit: Emit) -> None:
        async with aclosing(outputs):
            async for output in outputs:
                if events := stream.push(output):
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
