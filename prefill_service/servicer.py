"""`PrefillServicer`: PrefillService over an engine of role prefill."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from baton.v1 import prefill_pb2, prefill_pb2_grpc
from engine.async_engine import AsyncEngine
from engine.wire import check_namespace, engine_request
from prefill_service.prompt_events import PromptEvents
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
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Computes a prompt and tells of it; frees it if the caller goes away."""
        check_namespace(request.request, self._engine.namespace, self._engine.kv_form)
        engine_form = engine_request(request.request, deadline=deadline_of(context))
        events = PromptEvents()
        self._engine.submit(engine_form, events.add)
        try:
            async with aclosing(events.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            self._let_go(engine_form.request_id, events)

    async def ReleaseHandoff(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.ReleaseHandoffRequest, context: Any
    ) -> prefill_pb2.ReleaseHandoffResponse:
        """Drops what was stored for one handoff alone."""
        self._engine.release_handoff(request.handoff_id)
        return prefill_pb2.ReleaseHandoffResponse()

    def _let_go(self, request_id: str, events: PromptEvents) -> None:
        """Frees what the caller was not told of. The handoff that it was told of is its own:
        it may have gone away because it has all it wants.
        """
        if events.last is None:
            self._engine.abort([request_id])
        elif not events.is_end_told and events.last.handoff is not None:
            self._engine.release_handoff(events.last.handoff.handoff_id)
