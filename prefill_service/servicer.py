"""`PrefillServicer`: PrefillService over an engine of role prefill."""

import asyncio
from typing import Any

from baton.v1 import prefill_pb2, prefill_pb2_grpc
from engine.async_engine import AsyncEngine
from engine.request import EngineRequest, RequestOutput
from engine.wire import (
    check_namespace,
    engine_request,
    finish_reason_to_proto,
    merge_outputs,
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
        """Computes a prompt and returns its first token with the handoff."""
        check_namespace(request.request.namespace, self._engine.namespace)
        output = await self._complete(
            engine_request(request.request, deadline=deadline_of(context))
        )
        if output.error is not None:
            raise output.error
        return _response(output)

    async def ReleaseHandoff(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.ReleaseHandoffRequest, context: Any
    ) -> prefill_pb2.ReleaseHandoffResponse:
        """Drops what was stored for one handoff alone."""
        self._engine.release_handoff(request.handoff_id)
        return prefill_pb2.ReleaseHandoffResponse()

    async def _complete(self, request: EngineRequest) -> RequestOutput:
        """All of a request's outputs as one. Aborts it if the caller goes away."""
        merged: RequestOutput | None = None
        ended = asyncio.Event()

        def on_output(output: RequestOutput) -> None:
            nonlocal merged
            merged = merge_outputs(merged, output)
            if output.finish_reason is not None:
                ended.set()

        self._engine.submit(request, on_output)
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                self._engine.abort([request.request_id])
        assert merged is not None
        return merged


def _response(output: RequestOutput) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        token_ids=output.token_ids,
        finish_reason=finish_reason_to_proto(output.finish_reason),
        handoff=None if output.handoff is None else handoff_to_proto(output.handoff),
        cached_tokens=output.cached_tokens,
        timings=timings_to_proto(output.timings),
    )
