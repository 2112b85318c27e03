"""Answers that end when the client leaves: streams of server-sent events, and whole ones.

A stream is written by a coroutine that gets `Emit`. One `emit` is one `send`, which waits
while the client does not read: the pipeline then merges tokens, so such a client costs
bounded memory. The connection's end cancels the coroutine at once, and with it the request
on every tier.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

from baton.common.errors import (
    DeadlineExceededError,
    Reason,
    RequestCancelledError,
    UnavailableError,
)
from router.http.errors import Problem, openai_error, problem_of
from router.http.json_bytes import event

__all__ = ["DONE", "Emit", "Produce", "SseResponse", "error_event", "unless_client_leaves"]

Emit = Callable[[bytes], Awaitable[None]]
"""Sends whole events. Waits while the client does not read."""
Produce = Callable[[Emit], Coroutine[Any, Any, None]]
"""Writes a stream to its end."""

DONE = b"data: [DONE]\n\n"
_LOGGER = logging.getLogger("baton.http")
_LAST_EVENT_S = 1.0
_COMMENT = b": keep-alive\n\n"
_AFTER_COMMENT = b":\n\n"
"""Begins the event after a comment. Some clients (`vllm bench serve` is one) strip what they
receive, so that the end of a comment is lost; they would take the event for a part of it."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks nginx to pass events on at once
]

_Result = TypeVar("_Result")


def error_event(problem: Problem) -> bytes:
    """The end of a stream of OpenAI's completions API that fails."""
    return event(openai_error(problem)) + DONE


class SseResponse(Response):
    """A stream of events.

    An error before the first event is raised, so that it becomes an answer with its status.
    A later one becomes an event.

    Args:
        produce: writes the events.
        error_event: the event for an error that ends the stream.
        request_id: names the request in the log.
        keepalive_s: a comment is sent after this many seconds of silence.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Produce,
        *,
        error_event: Callable[[Problem], bytes],
        request_id: str,
        keepalive_s: float = 15.0,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)
        self._produce = produce
        self._error_event = error_event
        self._request_id = request_id
        self._keepalive_s = keepalive_s

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, self.raw_headers)
        work = asyncio.ensure_future(self._write(writer))
        watcher = asyncio.ensure_future(_watch(receive, writer, self._keepalive_s))
        try:
            await asyncio.wait((work, watcher), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await self._finish(work, writer)
        except asyncio.CancelledError:
            await _cancel(work, watcher)
            if not writer.has_begun:
                raise
            await self._end_by_stop(writer)
        finally:
            await _cancel(work, watcher)

    async def _finish(self, work: "asyncio.Future[None]", writer: "_Writer") -> None:
        """Ends the stream of work that has ended."""
        if work.cancelled():
            # A deadline that passes while a generator waits for its reader ends the reader so.
            error = DeadlineExceededError("the request's deadline has passed")
            if not writer.has_begun:
                raise error
            await writer.emit(self._error_event(problem_of(error, self._request_id)))
        else:
            work.result()
        await writer.end()

    async def _end_by_stop(self, writer: "_Writer") -> None:
        """Ends a stream that the stopping server cancelled, if the client reads."""
        stopping = UnavailableError(
            "the server is stopping; try again", reason=Reason.SERVER_STOPPING
        )
        try:
            async with asyncio.timeout(_LAST_EVENT_S):
                await writer.emit(self._error_event(problem_of(stopping, self._request_id)))
                await writer.end()
        except TimeoutError:
            _LOGGER.info("cut off request_id=%s", ascii(self._request_id))

    async def _write(self, writer: "_Writer") -> None:
        try:
            await self._produce(writer.emit)
        except Exception as error:
            if not writer.has_begun:
                raise
            await writer.emit(self._error_event(problem_of(error, self._request_id)))


class _Writer:
    """Sends the parts of one answer.

    Attributes:
        has_begun: whether the status has been sent.
        is_quiet: whether nothing has been sent since the attribute was set to True.
    """

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = False
        self.is_quiet = True
        self._send = send
        self._headers = headers
        self._is_sending = False
        self._follows_comment = False

    async def emit(self, events: bytes) -> None:
        if self._follows_comment:
            self._follows_comment = False
            events = _AFTER_COMMENT + events
        await self._send_part(events)

    async def emit_comment(self) -> None:
        """Sends a comment, unless an event is being sent to a client that does not read."""
        if not self._is_sending:
            self._follows_comment = True
            await self._send_part(_COMMENT)

    async def _send_part(self, part: bytes) -> None:
        self.is_quiet = False
        self._is_sending = True
        if not self.has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        self._is_sending = False

    async def end(self) -> None:
        if not self.has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})


async def _watch(receive: Receive, writer: _Writer, keepalive_s: float) -> None:
    """Returns when the client has left. Until then it sends comments in times of silence."""
    while True:
        writer.is_quiet = True
        try:
            async with asyncio.timeout(keepalive_s):
                await _until_disconnect(receive)
            return
        except TimeoutError:
            if writer.is_quiet:
                await writer.emit_comment()


async def _until_disconnect(receive: Receive) -> None:
    message: Message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Returns the result of `work`, which is cancelled if the client leaves.

    Raises:
        RequestCancelledError: the client has left.
        DeadlineExceededError: `work` was cancelled otherwise.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestCancelledError("the client has left")
        if task.cancelled():
            raise DeadlineExceededError("the request's deadline has passed")
        return task.result()
    finally:
        await _cancel(task, watcher)


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels tasks and waits until they have ended, so that they have released everything."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # has been raised, or the client has left
