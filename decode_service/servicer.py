"""`DecodeServicer`: DecodeService over an engine. `RouterSession`: one router's Connect stream.

A reader task handles commands in their order. Each response holds all pending
outputs, at most one per candidate of a request. A router that keeps up gets one
response per engine step; one that lags gets the tokens of several steps in one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from typing_extensions import override

from baton.common.errors import AlreadyExistsError, BatonError, InternalError, InvalidArgumentError
from baton.common.observe.traceparent import parse_traceparent
from baton.common.request.sampling_params import MAX_LOGPROBS
from baton.common.request.spec_wire import read_message, spec_from_proto
from baton.v1 import decode_pb2, decode_pb2_grpc, request_pb2
from engine.loop.async_engine import AsyncEngine
from engine.request import EngineOutput, EngineRequest, FinishReason
from engine.wire import check_namespace, output_to_proto, progress_from_proto
from kvstore.handoff import KvHandoff, handoff_from_proto, handoff_to_proto
from rpc.errors import to_worker_error
from rpc.logs import CallInfo, serving
from rpc.pending_outputs import PendingOutputs, add_output
from rpc.tracing import Stages, WorkerSpans

__all__ = ["DecodeServicer", "RouterSession"]

_LOGGER = logging.getLogger("baton.decode")
_MAX_PENDING_REQUESTS = 1024  # with more, commands wait until the router reads
_FULL_RESPONSE_TOKENS = 2**20  # keeps a response well below rpc.channels.MAX_MESSAGE_BYTES
_LOGPROBS_TOKENS = 4 + 2 * MAX_LOGPROBS  # a token's log-probabilities take as much as these tokens

Commands = AsyncIterator[decode_pb2.ConnectRequest]
Responses = AsyncGenerator[decode_pb2.ConnectResponse, None]


class RouterSession:
    """Runs one router's requests on an engine.

    Args:
        engine: a started engine.
        spans: sends spans; None sends none.
    """

    def __init__(self, engine: AsyncEngine, spans: WorkerSpans | None = None) -> None:
        self._engine = engine
        self._spans = spans
        # By request id, if there are spans: the stages of requests that have tokens.
        self._stages: dict[str, Stages] = {}
        # By request id. The value distinguishes a request from an earlier one with the same id.
        self._live: dict[str, EngineRequest] = {}
        # By request id; no value is empty.
        self._pending: dict[str, PendingOutputs] = {}
        # By request id: the ends of requests that continue on another replica.
        self._moved: dict[str, KvHandoff | None] = {}
        self._has_logprobs = False  # whether any pending output may have log-probabilities
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_closing = False

    async def responses(self, commands: Commands) -> Responses:
        """Serves the stream to its end. The caller closes the generator.

        The stream ends when every request has ended and the router has sent its last
        command or `close` was called. If it ends otherwise (the router left, a command
        could not be parsed), its requests are aborted.
        """
        reader = asyncio.create_task(self._read(commands))
        reader.add_done_callback(lambda _: self._changed.set())
        try:
            while not self._is_over(reader):
                await self._changed.wait()
                self._changed.clear()
                while self._pending or self._moved:
                    yield self._take_pending()
        finally:
            self._engine.abort(list(self._live))
            self._live.clear()
            for request_id in list(self._moved):
                self._forget_moved(request_id)
            reader.cancel()

    def close(self) -> None:
        """Makes `responses` end once the last outputs of all running requests are sent."""
        self._is_closing = True
        self._changed.set()

    def _is_over(self, reader: "asyncio.Task[None]") -> bool:
        if reader.done():
            reader.result()  # raises the reader's error, if there was one
        has_outputs = self._pending or self._moved
        return (reader.done() or self._is_closing) and not self._live and not has_outputs

    # Commands.

    async def _read(self, commands: Commands) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "start":
                    await self._start(command.start)
                case "cancel":
                    self._cancel(command.cancel)
                case "prefetch":
                    self._prefetch(command.prefetch)
                case "move":
                    self._engine.move(command.move.request_id)
                case "release":
                    self._engine.release_handoff(command.release.handoff_id)
                case _:
                    raise InvalidArgumentError(
                        "command is unset; set one of start, cancel, prefetch, move, release"
                    )
            while len(self._pending) >= _MAX_PENDING_REQUESTS:
                self._has_room.clear()
                await self._has_room.wait()

    async def _start(self, start: decode_pb2.StartDecode) -> None:
        request_id = start.spec.request_id
        if any(request_id in known for known in (self._live, self._pending, self._moved)):
            self._end_duplicate(request_id)
            return
        try:
            check_namespace(start.namespace, self._engine.namespace)
            request = await read_message(start, partial(self._read_start, start, time.monotonic()))
            self._live[request_id] = request
            self._engine.submit(request, partial(self._on_output, request), is_checked=True)
        except BatonError as error:
            self._refuse(request_id, error)
        except Exception:
            with serving(CallInfo(request_id, parse_traceparent(start.spec.traceparent))):
                _LOGGER.exception("start failed request_id=%s", ascii(request_id))
            self._refuse(request_id, InternalError("internal error"))

    def _read_start(self, start: decode_pb2.StartDecode, now: float) -> EngineRequest:
        """The checked request of a command. Runs in any thread."""
        request = EngineRequest(
            spec=spec_from_proto(start.spec, now=now),
            progress=progress_from_proto(start.candidates),
            first_beams=tuple((beam.token_id, beam.logprob) for beam in start.first_beams),
            handoff=handoff_from_proto(start.handoff) if start.HasField("handoff") else None,
            skips_lookup=start.skip_lookup,
            prefix=handoff_from_proto(start.prefix) if start.HasField("prefix") else None,
        )
        self._engine.check(request)
        return request

    def _prefetch(self, prefetch: decode_pb2.PrefetchKv) -> None:
        """Drops blocks that do not match; the start of their request reports the mismatch."""
        try:
            self._engine.prefetch(handoff_from_proto(prefetch.blocks))
        except BatonError as error:
            _LOGGER.debug("prefetch dropped: %s", error.message)
        except Exception:
            _LOGGER.exception("prefetch failed")

    def _cancel(self, cancel: decode_pb2.CancelDecode) -> None:
        if not cancel.HasField("index"):
            self._cancel_request(cancel.request_id)
        elif cancel.request_id in self._live:
            self._engine.finish_candidate(cancel.request_id, cancel.index)

    def _cancel_request(self, request_id: str) -> None:
        request = self._live.pop(request_id, None)
        if request is not None:
            self._engine.abort([request_id])
            if self._spans is not None:
                self._spans.send_cancelled(request.spec, self._stages.pop(request_id, ()))
        self._pending.pop(request_id, None)
        self._forget_moved(request_id)

    def _forget_moved(self, request_id: str) -> None:
        """Drops a moved request that no message has reported to the router, and ends its lease."""
        handoff = self._moved.pop(request_id, None)
        if handoff is not None:
            self._engine.release_handoff(handoff.handoff_id)

    def _end_duplicate(self, request_id: str) -> None:
        """Ends the running request too: the router could not distinguish their tokens."""
        self._cancel_request(request_id)
        self._refuse(request_id, AlreadyExistsError.for_request_id(request_id))

    def _refuse(self, request_id: str, error: BatonError) -> None:
        self._live.pop(request_id, None)
        refusal = EngineOutput(
            request_id=request_id, finish_reason=FinishReason.ERROR, is_last=True, error=error
        )
        self._pending.pop(request_id, None)
        self._add(refusal)

    # Outputs.

    def _on_output(self, request: EngineRequest, output: EngineOutput) -> None:
        """Called on the event loop, for all outputs of a step before the next response is made."""
        if self._live.get(output.request_id) is not request:
            return  # the request was cancelled while this output was under way
        if output.is_last:
            del self._live[output.request_id]
        if self._spans is not None and output.timings is not None:
            self._note_stages(self._spans, request, output)
        if output.finish_reason is FinishReason.HANDOFF:
            self._moved[output.request_id] = output.handoff
            self._changed.set()
        else:
            self._add(output)

    def _note_stages(
        self, spans: WorkerSpans, request: EngineRequest, output: EngineOutput
    ) -> None:
        if output.is_last:
            self._stages.pop(output.request_id, None)
            spans.send(request.spec, output.stages, output.error_name)
        else:
            self._stages[output.request_id] = output.stages

    def _add(self, output: EngineOutput) -> None:
        error = None if output.error is None else to_worker_error(output.error)
        if output.logprobs or output.prompt_logprobs:
            self._has_logprobs = True
        pending = self._pending.setdefault(output.request_id, {})
        add_output(pending, output_to_proto(output, error))
        self._changed.set()

    def _take_pending(self) -> decode_pb2.ConnectResponse:
        """Takes the pending outputs; the oldest ones if one message cannot hold them all.

        A request's outputs stay together: a router that has the first tokens of only some
        candidates could not resume the request.
        """
        messages: list[request_pb2.CandidateOutput] = []
        num_tokens = 0
        while self._pending and num_tokens < _FULL_RESPONSE_TOKENS:
            for output in self._pending.pop(next(iter(self._pending))).values():
                num_tokens += len(output.token_ids)
                if self._has_logprobs:
                    num_logprobs = len(output.logprobs) + len(output.prompt_logprobs)
                    num_tokens += _LOGPROBS_TOKENS * num_logprobs
                messages.append(output)
        self._has_logprobs = self._has_logprobs and bool(self._pending)
        self._has_room.set()
        return decode_pb2.ConnectResponse(outputs=messages, moved=self._take_moved())

    def _take_moved(self) -> list[decode_pb2.MovedRequest]:
        """Takes the requests that have moved and whose outputs have all been taken."""
        names = [name for name in self._moved if name not in self._pending]
        handoffs = [(name, self._moved.pop(name)) for name in names]
        return [
            decode_pb2.MovedRequest(
                request_id=name, handoff=None if handoff is None else handoff_to_proto(handoff)
            )
            for name, handoff in handoffs
        ]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Generates tokens; `protos/baton/v1/decode.proto` documents the methods.

    Args:
        engine: a started engine.
        spans: sends spans; None sends none.
    """

    def __init__(self, engine: AsyncEngine, spans: WorkerSpans | None = None) -> None:
        self._engine = engine
        self._spans = spans
        self._sessions: set[RouterSession] = set()
        self._all_ended = asyncio.Event()

    @override
    async def Connect(
        self, request_iterator: AsyncIterator[decode_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[decode_pb2.ConnectResponse]:
        session = RouterSession(self._engine, self._spans)
        self._sessions.add(session)
        try:
            async with aclosing(session.responses(request_iterator)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._all_ended.set()

    async def close(self, timeout_s: float) -> None:
        """Ends each stream once the last outputs of its requests are sent, or at the timeout."""
        self._all_ended.clear()
        for session in self._sessions:
            session.close()
        if not self._sessions:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_ended.wait()
        except TimeoutError:
            pass
