"""`PrefillServicer`: PrefillService over an engine of role prefill."""

import asyncio
from collections.abc import Sequence
from typing import Any

from baton.v1 import prefill_pb2, prefill_pb2_grpc
from engine.async_engine import AsyncEngine
from engine.request import EngineRequest, FinishReason, RequestOutput
from engine.wire import (
    add_output,
    check_namespace,
    engine_request,
    finish_reason_to_proto,
    timings_to_proto,
)
from kvstore.handoff_proto import handoff_to_proto
from rpc.deadlines import deadline_of

__all__ = ["PrefillServicer"]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Computes prompts; see `protos/baton/v1/prefill.proto`.

    Args:
        engine: a started engine of role prefill.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def Prefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> prefill_pb2.PrefillResponse:
        """Computes a prompt and returns its first tokens with the handoff."""
        check_namespace(request.request.namespace, self._engine.namespace)
        outputs = await self._complete(
            engine_request(request.request, deadline=deadline_of(context))
        )
        if (error := outputs[-1].error) is not None:
            raise error
        return _response(outputs)

    async def ReleaseHandoff(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.ReleaseHandoffRequest, context: Any
    ) -> prefill_pb2.ReleaseHandoffResponse:
        """Drops what was stored for one handoff alone."""
        self._engine.release_handoff(request.handoff_id)
        return prefill_pb2.ReleaseHandoffResponse()

    async def _complete(self, request: EngineRequest) -> list[RequestOutput]:
        """All of a request's outputs, one per candidate. Aborts it if the caller goes away."""
        outputs: dict[int, RequestOutput] = {}
        ended = asyncio.Event()

        def on_output(output: RequestOutput) -> None:
            add_output(outputs, output)
            if output.is_last:
                ended.set()

        self._engine.submit(request, on_output)
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                self._engine.abort([request.request_id])
        return list(outputs.values())


def _response(outputs: Sequence[RequestOutput]) -> prefill_pb2.PrefillResponse:
    last = outputs[-1]
    response = prefill_pb2.PrefillResponse(
        cached_tokens=max(output.cached_tokens for output in outputs),
        timings=timings_to_proto(last.timings or outputs[0].timings),
    )
    if last.finish_reason is FinishReason.HANDOFF:
        response.token_ids.extend(last.token_ids)
        response.logprobs.extend(last.logprobs)
        if last.handoff is not None:
            response.handoff.CopyFrom(handoff_to_proto(last.handoff))
    else:
        response.candidates.extend(_candidate(output) for output in outputs)
    return response


def _candidate(output: RequestOutput) -> prefill_pb2.CandidateOutput:
    return prefill_pb2.CandidateOutput(
        index=output.index,
        token_ids=output.token_ids,
        finish_reason=finish_reason_to_proto(output.finish_reason),
        score=output.score,
    )
