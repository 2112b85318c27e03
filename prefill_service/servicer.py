"""`PrefillServicer`: PrefillService over an engine."""

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from typing_extensions import override

from baton.common.request.spec_wire import receive_spec
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from engine.loop.async_engine import AsyncEngine
from engine.request import EngineRequest
from engine.wire import check_namespace
from prefill_service.prompt_events import PromptEvents
from rpc.worker_spans import WorkerSpans

__all__ = ["PrefillServicer"]

_MAX_SENT = 1024
"""Callers that cancel a call do so within milliseconds of its end, if at all."""


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
        spec = await receive_spec(request.spec)
        events = PromptEvents(spec.params)
        self._engine.submit(EngineRequest(spec=spec, hands_over=True), events.add)
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
