"""`PromptEvents`: what an engine says of one prompt, as the messages of a Prefill stream.

The engine's outputs wait, merged, until the router reads: blocks that were saved
are one event then, however many outputs told of them.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from baton.v1 import prefill_pb2
from engine.request import FinishReason, RequestOutput
from engine.wire import finish_reason_to_proto, timings_to_proto
from kvstore.handoff import KvHandoff, handoff_to_proto

__all__ = ["PromptEvents"]


class PromptEvents:
    """The outputs of one request of a prefill engine.

    Attributes:
        last: the request's last output, once it came.
        is_end_told: whether the message that it makes was handed out.
    """

    def __init__(self) -> None:
        self.last: RequestOutput | None = None
        self.is_end_told = False
        self._saved: KvHandoff | None = None  # what was not told yet
        self._drawn: list[RequestOutput] = []  # with the first tokens
        self._ended: list[RequestOutput] = []  # with candidates that are over
        self._is_result_told = False
        self._changed = asyncio.Event()

    def add(self, output: RequestOutput) -> None:
        """Takes the next output; on the event loop, all of a step before `messages` goes on."""
        if output.saved is not None:
            self._saved = _joined(self._saved, output.saved)
        if output.finish_reason in (None, FinishReason.HANDOFF):
            self._drawn += [output] if output.token_ids else []
        else:
            self._ended.append(output)
        if output.is_last:
            self.last = output
        self._changed.set()

    async def messages(self) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """The messages, up to the last; the first tokens before all else that waits.

        Raises:
            BatonError: what the request failed of.
        """
        while not self.is_end_told:
            await self._changed.wait()
            self._changed.clear()
            if not self._is_result_told and self._drawn:
                self._is_result_told = True
                yield prefill_pb2.PrefillResponse(result=_first_tokens(self._drawn))
            if self.last is not None:
                yield self._end(self.last)
            elif self._saved is not None:
                saved, self._saved = self._saved, None
                yield prefill_pb2.PrefillResponse(saved=handoff_to_proto(saved))

    def _end(self, last: RequestOutput) -> prefill_pb2.PrefillResponse:
        """The last message. What was saved and not told is in its handoff, or of no use."""
        self.is_end_told = True
        if last.error is not None:
            raise last.error
        if not self._is_result_told and self._ended:
            return prefill_pb2.PrefillResponse(result=_candidates(self._ended))
        return prefill_pb2.PrefillResponse(
            end=prefill_pb2.PrefillEnd(
                handoff=None if last.handoff is None else handoff_to_proto(last.handoff),
                timings=timings_to_proto(last.timings),
                finish_reason=finish_reason_to_proto(last.finish_reason),
            )
        )


def _joined(earlier: KvHandoff | None, later: KvHandoff) -> KvHandoff:
    """Two successive parts of what is saved as one. A prompt that gave way is saved anew,
    for another handoff, and from its start.
    """
    if earlier is None or earlier.handoff_id != later.handoff_id:
        return later
    return replace(later, block_keys=earlier.block_keys + later.block_keys)


def _first_tokens(outputs: list[RequestOutput]) -> prefill_pb2.PrefillResult:
    return prefill_pb2.PrefillResult(
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=[logprob for output in outputs for logprob in output.logprobs],
        cached_tokens=outputs[0].cached_tokens,
        timings=timings_to_proto(outputs[0].timings),
    )


def _candidates(outputs: list[RequestOutput]) -> prefill_pb2.PrefillResult:
    return prefill_pb2.PrefillResult(
        candidates=[_candidate(output) for output in outputs],
        cached_tokens=max(output.cached_tokens for output in outputs),
        timings=timings_to_proto(outputs[-1].timings or outputs[0].timings),
    )


def _candidate(output: RequestOutput) -> prefill_pb2.CandidateOutput:
    return prefill_pb2.CandidateOutput(
        index=output.index,
        token_ids=output.token_ids,
        finish_reason=finish_reason_to_proto(output.finish_reason),
        score=output.score,
    )
