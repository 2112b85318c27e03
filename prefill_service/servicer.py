"""`PrefillServicer`: PrefillService over an engine. `PromptEvents`: the messages of one prompt.

The outputs wait, merged, until the router reads: saved blocks are one event then,
however many outputs listed them.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from typing_extensions import override

from baton.common.request.sampling_params import SamplingParams
from baton.common.request.spec_wire import read_message, spec_from_proto
from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc, request_pb2
from engine.loop.async_engine import AsyncEngine
from engine.request import EngineOutput, EngineRequest, FinishReason
from engine.wire import (
    check_namespace,
    finish_reason_to_proto,
    logprobs_to_proto,
    output_to_proto,
    timings_to_proto,
)
from kvstore.handoff import KvHandoff, handoff_from_proto, handoff_to_proto
from rpc.tracing import WorkerSpans

__all__ = ["PrefillServicer", "PromptEvents"]

_MAX_INLINE_LOGPROBS = 512
"""The most tokens whose log-probabilities the event loop writes itself."""
_MAX_SENT = 1024
"""Callers that cancel a call do so within milliseconds of its end, if at all."""


class PromptEvents:
    """The outputs of one request of a prefill engine.

    Args:
        params: the request's.

    Attributes:
        last: the request's last output, once it came.
        has_sent_end: whether `messages` has yielded the message of `last`.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.last: EngineOutput | None = None
        self.has_sent_end = False
        self._params = params
        self._saved: KvHandoff | None = None  # blocks that no message has listed yet
        self._drawn: list[EngineOutput] = []  # outputs with first tokens
        self._ended: list[EngineOutput] = []  # outputs of candidates that have ended
        self._has_sent_result = False
        self._changed = asyncio.Event()

    def add(self, output: EngineOutput) -> None:
        """Takes the next output. Called on the event loop, for all outputs of a step before
        `messages` continues.
        """
        if output.saved is not None:
            self._saved = _join_saved(self._saved, output.saved)
        if output.finish_reason in (None, FinishReason.HANDOFF):
            self._drawn += [output] if output.token_ids else []
        else:
            self._ended.append(output)
        if output.is_last:
            self.last = output
        self._changed.set()

    async def messages(self) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Yields the messages up to the last; first tokens come before all else that waits.

        Raises:
            BatonError: the request failed.
        """
        while not self.has_sent_end:
            await self._changed.wait()
            self._changed.clear()
            if not self._has_sent_result and self._drawn:
                self._has_sent_result = True
                yield prefill_pb2.PrefillResponse(result=await self._result(tuple(self._drawn)))
            if self.last is not None:
                yield self._end(self.last)
            elif self._saved is not None:
                saved, self._saved = self._saved, None
                yield prefill_pb2.PrefillResponse(saved=handoff_to_proto(saved))

    async def _result(self, drawn: Sequence[EngineOutput]) -> prefill_pb2.PrefillResult:
        """The first tokens; a thread writes the log-probabilities of a long prompt."""
        if len(drawn[0].prompt_logprobs) <= _MAX_INLINE_LOGPROBS:
            return _first_tokens(self._params, drawn)
        return await asyncio.to_thread(_first_tokens, self._params, drawn)

    def _end(self, last: EngineOutput) -> prefill_pb2.PrefillResponse:
        """The last message. Saved blocks that no message listed are in its handoff, or useless."""
        self.has_sent_end = True
        if last.error is not None:
            raise last.error
        if not self._has_sent_result and self._ended:
            outputs = [output_to_proto(output) for output in self._ended]
            return prefill_pb2.PrefillResponse(result=prefill_pb2.PrefillResult(outputs=outputs))
        is_over = last.finish_reason is not FinishReason.HANDOFF
        output = request_pb2.CandidateOutput(
            finish_reason=finish_reason_to_proto(last.finish_reason),
            timings=timings_to_proto(last.timings),
            is_last=is_over,
        )
        handoff = None if last.handoff is None else handoff_to_proto(last.handoff)
        return prefill_pb2.PrefillResponse(
            end=prefill_pb2.PrefillEnd(handoff=handoff, output=output)
        )


def _join_saved(earlier: KvHandoff | None, later: KvHandoff) -> KvHandoff:
    """Joins two successive parts of the saved blocks. A preempted prompt is saved again for
    another handoff, from its start; the earlier part is void then.
    """
    if earlier is None or earlier.handoff_id != later.handoff_id:
        return later
    return replace(later, block_keys=earlier.block_keys + later.block_keys)


def _first_tokens(
    params: SamplingParams, drawn: Sequence[EngineOutput]
) -> prefill_pb2.PrefillResult:
    """First tokens of a generation that continues on decode. Those of ranked candidates are for
    decode alone.
    """
    token_ids = [token_id for output in drawn for token_id in output.token_ids]
    details = [details for output in drawn for details in logprobs_to_proto(output.logprobs)]
    result = prefill_pb2.PrefillResult()
    result.outputs.add(
        cached_tokens=drawn[0].cached_tokens,
        timings=timings_to_proto(drawn[0].timings),
        prompt_logprobs=logprobs_to_proto(drawn[0].prompt_logprobs),
    )
    if params.is_ranked:
        logprobs = [logprob for output in drawn for logprob in output.first_logprobs]
        _add_ranked(result, params, list(zip(token_ids, logprobs, strict=True)), details)
        return result
    for index, token_id in enumerate(token_ids):
        output = result.outputs[0] if index == 0 else result.outputs.add(index=index)
        output.token_ids.append(token_id)
        output.logprobs.extend(details[index : index + 1])
    return result


def _add_ranked(
    result: prefill_pb2.PrefillResult,
    params: SamplingParams,
    first_tokens: Sequence[tuple[int, float]],
    details: Sequence[common_pb2.TokenLogprobs],
) -> None:
    for index, (token_id, logprob) in enumerate(first_tokens):
        if params.beam_width is not None:
            result.first_beams.add(token_id=token_id, logprob=logprob)
        else:
            result.candidates.add(
                index=index,
                output_token_ids=[token_id],
                logprob=logprob,
                token_logprobs=details[index : index + 1],
            )


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Computes prompts; `protos/baton/v1/prefill.proto` documents the methods.

    Args:
        engine: a started engine.
        spans: sends spans; None sends none.
    """

    def __init__(self, engine: AsyncEngine, spans: WorkerSpans | None = None) -> None:
        self._engine = engine
        self._spans = spans
        self._sent: OrderedDict[str, str] = OrderedDict()  # ids of handoffs by those of requests

    @override
    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Frees the request if the caller leaves."""
        check_namespace(request.namespace, self._engine.namespace)
        now = time.monotonic()
        checked = await read_message(request, lambda: self._read(request, now))
        spec = checked.spec
        events = PromptEvents(spec.params)
        self._engine.submit(checked, events.add, is_checked=True)
        try:
            async with aclosing(events.messages()) as messages:
                async for message in messages:
                    if message.end.HasField("handoff"):
                        self._note_sent(spec.request_id, message.end.handoff.handoff_id)
                    yield message
        finally:
            self._free(spec.request_id, events)
            if self._spans is not None and events.last is not None:
                self._spans.send(spec, events.last.stages, events.last.error_name)

    @override
    async def ReleaseHandoff(
        self, request: prefill_pb2.ReleaseHandoffRequest, context: Any
    ) -> prefill_pb2.ReleaseHandoffResponse:
        handoff_id = request.handoff_id or self._sent.pop(request.request_id, "")
        if handoff_id:
            self._engine.release_handoff(handoff_id)
        return prefill_pb2.ReleaseHandoffResponse()

    def _read(self, message: prefill_pb2.PrefillRequest, now: float) -> EngineRequest:
        """The checked request of a message. Runs in any thread."""
        prefix = handoff_from_proto(message.prefix) if message.HasField("prefix") else None
        spec = spec_from_proto(message.spec, now=now)
        request = EngineRequest(spec=spec, hands_over=True, prefix=prefix)
        self._engine.check(request)
        return request

    def _note_sent(self, request_id: str, handoff_id: str) -> None:
        self._sent[request_id] = handoff_id
        if len(self._sent) > _MAX_SENT:
            self._sent.popitem(last=False)

    def _free(self, request_id: str, events: PromptEvents) -> None:
        """Frees what the caller cannot know of. A handoff that was sent stays: the caller may
        have left because it has all that it needs.
        """
        if events.last is None:
            self._engine.abort([request_id])
        elif not events.has_sent_end and events.last.handoff is not None:
            self._engine.release_handoff(events.last.handoff.handoff_id)
