"""`WorkerSpans`: the spans of a worker's requests, below the router's."""

import time
from collections.abc import Sequence

from baton.common.observe.traceparent import parse_traceparent
from baton.common.request.request_spec import RequestSpec
from baton.v1 import worker_pb2
from rpc.tracing import Span, Tracer, TracingConfig, open_tracer

__all__ = ["Stages", "WorkerSpans"]

Stages = Sequence[tuple[str, float, float]]
"""Names of stages, each with `time.monotonic()` at its start and at its end."""


class WorkerSpans:
    """Sends the spans of requests that have ended.

    Args:
        tracer: sends them.
        tier: prefill or decode.
    """

    def __init__(self, tracer: Tracer, tier: str) -> None:
        self._tracer = tracer
        self._tier = tier

    @classmethod
    def open(
        cls, config: TracingConfig, tier: str, worker: worker_pb2.GetInfoResponse
    ) -> "WorkerSpans | None":
        """Begins to send spans; returns None if the config has no collector.

        Args:
            config: the flags.
            tier: prefill or decode.
            worker: the worker's description.
        """
        attributes = {"service.instance.id": worker.worker_id, "baton.model": worker.model}
        tracer = open_tracer(config, f"baton-{tier}", attributes)
        return None if tracer is None else cls(tracer, tier)

    def close(self) -> None:
        """Sends what is queued, for at most a few seconds. Blocks."""
        self._tracer.close()

    def send(self, spec: RequestSpec, stages: Stages, error: str = "") -> None:
        """Sends one span for the request and one per stage, unless the request is not traced.

        Args:
            spec: the request.
            stages: its stages; none if it had no turn.
            error: the status name of its error; empty without one.
        """
        parent = parse_traceparent(spec.traceparent)
        if parent is None or not parent.is_sampled or not stages:
            return
        own = parent.child()
        request = Span(
            name=f"{self._tier} worker",
            context=own,
            parent_id=parent.span_id,
            start=min(start for _, start, _ in stages),
            end=max(end for _, _, end in stages),
            attributes={"baton.request_id": spec.request_id},
            error=error,
            is_server=True,
        )
        parts = [
            Span(name=name, context=own.child(), parent_id=own.span_id, start=start, end=end)
            for name, start, end in stages
        ]
        self._tracer.send([request, *parts])

    def send_cancelled(self, spec: RequestSpec, stages: Stages) -> None:
        """Sends the spans of a request that the router ended, for example at a stop text.

        Args:
            spec: the request.
            stages: its stages when they were last reported; the last one lasts until now.
        """
        if stages:
            name, start, _ = stages[-1]
            self.send(spec, [*stages[:-1], (name, start, time.monotonic())])
