"""`RouterSession`: one router's Connect stream, without gRPC.

A reader handles commands in the order they come. Each response takes whatever
is pending, at most one output per candidate of a request; so there is one
response per engine step while the router keeps up, and a lagging router gets
the tokens of several steps in one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from baton.errors import BatonError, InternalError, InvalidArgumentError
from baton.v1 import decode_pb2
from engine.async_engine import AsyncEngine
from engine.request import EngineRequest, FinishReason, RequestOutput
from engine.wire import (
    add_output,
    check_namespace,
    engine_request,
    finish_reason_to_proto,
    timings_to_proto,
)
from kvstore.handoff import handoff_from_proto
from rpc.errors import to_worker_error

__all__ = ["RouterSession"]

_LOGGER = logging.getLogger("baton.decode")
_MAX_PENDING_OUTPUTS = 1024  # beyond, commands wait until the router reads
_FULL_RESPONSE_TOKENS = 2**20  # keeps a response well below rpc.options.MAX_MESSAGE_BYTES

Commands = AsyncIterator[decode_pb2.ConnectRequest]
Responses = AsyncGenerator[decode_pb2.ConnectResponse, None]


class RouterSession:
    """Runs one router's requests on an engine.

    Args:
        engine: a started engine of role decode.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        # By request id. The value tells a request from an earlier one of the same id.
        self._live: dict[str, EngineRequest] = {}
        # By request id, then by candidate.
        self._pending: dict[str, dict[int, RequestOutput]] = {}
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._is_closing = False

    async def responses(self, commands: Commands) -> Responses:
        """Serves the stream to its end; to be closed by the caller.

        It ends when the router has sent its last command, or `close` was
        called, and every request has ended. If it ends otherwise (the router
        is gone, bytes that are no command), its requests are aborted.
        """
        reader = asyncio.create_task(self._read(commands))
        reader.add_done_callback(lambda _: self._changed.set())
        try:
            while not self._is_over(reader):
                await self._changed.wait()
                self._changed.clear()
                while self._pending:
                    yield self._take_pending()
        finally:
            self._engine.abort(list(self._live))
            self._live.clear()
            reader.cancel()

    def close(self) -> None:
        """`responses` ends once every running request has ended and been told."""
        self._is_closing = True
        self._changed.set()

    def _is_over(self, reader: "asyncio.Task[None]") -> bool:
        if reader.done():
            reader.result()  # raises what ended the reader, if it was not the stream's end
        return (reader.done() or self._is_closing) and not self._live and not self._pending

    # Commands.

    async def _read(self, commands: Commands) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "start":
                    self._start(command.start)
                case "cancel":
                    self._obey_cancel(command.cancel)
                case "prefetch":
                    self._prefetch(command.prefetch)
                case _:
                    raise InvalidArgumentError(
                        "command is unset; set one of start, cancel, prefetch"
                    )
            while len(self._pending) >= _MAX_PENDING_OUTPUTS:
                self._taken.clear()
                await self._taken.wait()

    def _start(self, start: decode_pb2.StartDecode) -> None:
        request_id = start.request.request_id
        if request_id in self._live or request_id in self._pending:
            self._end_duplicate(request_id)
            return
        try:
            check_namespace(start.request, self._engine.namespace, self._engine.kv_form)
            request = _engine_request(start)
            self._live[request_id] = request
            self._engine.submit(request, partial(self._on_output, request))
        except BatonError as error:
            self._refuse(request_id, error)
        except Exception:
            _LOGGER.exception("start failed request_id=%s", ascii(request_id))
            self._refuse(request_id, InternalError("internal error"))

    def _prefetch(self, prefetch: decode_pb2.PrefetchKv) -> None:
        """What is wrong with the blocks is told to the request that needs them, when it starts."""
        try:
            self._engine.prefetch(handoff_from_proto(prefetch.blocks))
        except BatonError as error:
            _LOGGER.debug("prefetch dropped: %s", error.message)
        except Exception:
            _LOGGER.exception("prefetch failed")

    def _obey_cancel(self, cancel: decode_pb2.CancelDecode) -> None:
        if not cancel.HasField("index"):
            self._cancel(cancel.request_id)
        elif cancel.request_id in self._live:
            self._engine.finish_candidate(cancel.request_id, cancel.index)

    def _cancel(self, request_id: str) -> None:
        if self._live.pop(request_id, None) is not None:
            self._engine.abort([request_id])
        self._pending.pop(request_id, None)

    def _end_duplicate(self, request_id: str) -> None:
        """Ends the running request too: the router could not tell their tokens apart."""
        self._cancel(request_id)
        error = InvalidArgumentError.for_field(
            "request_id", request_id, "unique among this stream's running requests"
        )
        self._refuse(request_id, error)

    def _refuse(self, request_id: str, error: BatonError) -> None:
        self._live.pop(request_id, None)
        refusal = RequestOutput(
            request_id=request_id, finish_reason=FinishReason.ERROR, is_last=True, error=error
        )
        self._pending[request_id] = {refusal.index: refusal}
        self._changed.set()

    # Outputs.

    def _on_output(self, request: EngineRequest, output: RequestOutput) -> None:
        """Called on the event loop; all outputs of a step before the next response is made."""
        request_id = request.request_id
        if self._live.get(request_id) is not request:
            return  # cancelled; this output was under way
        if output.is_last:
            del self._live[request_id]
        add_output(self._pending.setdefault(request_id, {}), output)
        self._changed.set()

    def _take_pending(self) -> decode_pb2.ConnectResponse:
        """What is pending; where that is too much for one message, the oldest of it.

        A request's outputs stay together: a router that had the first tokens of
        some candidates alone could not have the request resumed.
        """
        messages, num_tokens = [], 0
        while self._pending and num_tokens < _FULL_RESPONSE_TOKENS:
            for output in self._pending.pop(next(iter(self._pending))).values():
                num_tokens += len(output.token_ids)
                messages.append(_output_message(output))
        self._taken.set()
        return decode_pb2.ConnectResponse(outputs=messages)


def _engine_request(start: decode_pb2.StartDecode) -> EngineRequest:
    if start.timeout_ms < 1:
        raise InvalidArgumentError.for_field("timeout_ms", start.timeout_ms, ">= 1")
    return engine_request(
        start.request,
        deadline=time.monotonic() + start.timeout_ms / 1000,
        progress=start.candidates,
        first_beams=start.first_beams,
        handoff=handoff_from_proto(start.handoff) if start.HasField("handoff") else None,
    )


def _output_message(output: RequestOutput) -> decode_pb2.DecodeOutput:
    return decode_pb2.DecodeOutput(
        request_id=output.request_id,
        token_ids=output.token_ids,
        finish_reason=finish_reason_to_proto(output.finish_reason),
        error=None if output.error is None else to_worker_error(output.error),
        cached_tokens=output.cached_tokens,
        timings=timings_to_proto(output.timings),
        index=output.index,
        is_last=output.is_last,
        score=output.score,
    )
