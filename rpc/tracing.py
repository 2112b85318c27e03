"""`Tracer`: sends the spans of this process to a collector, by OpenTelemetry's protocol OTLP.

Spans are made when they have ended, from times that were measured anyway (`Span`). A process
without `--otlp-traces-endpoint` imports nothing of OpenTelemetry.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag
from baton.common.observe.traceparent import TraceContext, parse_traceparent
from baton.common.request.request_spec import RequestSpec
from baton.common.version import __version__
from baton.v1 import worker_pb2

__all__ = ["Span", "Stages", "Tracer", "TracingConfig", "WorkerSpans", "open_tracer"]

_FLUSH_S = 2.0
_SCHEMES = {"http": "http", "grpc": "http", "https": "https", "grpcs": "https"}

AttributeValue = str | bool | int | float | tuple[str, ...]
Stages = Sequence[tuple[str, float, float]]
"""Names of stages, each with `time.monotonic()` at its start and at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """The flags of tracing.

    Raises:
        ConfigurationError: a value is out of range, or OpenTelemetry is not installed; names the
            flag.
    """

    otlp_traces_endpoint: str | None = flag(
        None,
        "send spans to this collector by OTLP over gRPC, for example http://localhost:4317 "
        "(default: no spans); needs the extra tracing",
        metavar="URL",
    )
    trace_sample_rate: float = flag(
        1.0, "share of the traces that begin here that is recorded; a caller's decision wins"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.trace_sample_rate <= 1:
            raise ConfigurationError(
                f"--trace-sample-rate is {self.trace_sample_rate}; it must be in [0, 1]"
            )
        if self.otlp_traces_endpoint is not None:
            _collector_url(self.otlp_traces_endpoint)
            _import_exporter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span that has ended.

    Attributes:
        name: its name.
        context: its ids.
        parent_id: 16 hex digits; empty for the first span of a trace.
        start: `time.monotonic()` at its start.
        end: `time.monotonic()` at its end.
        attributes: further facts.
        error: what failed; empty for success.
        is_server: whether it is the work for a caller's request, not a part of that work.
    """

    name: str
    context: TraceContext
    parent_id: str
    start: float
    end: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    error: str = ""
    is_server: bool = False


class Tracer:
    """Sends spans in the background. `open_tracer` makes it.

    Args:
        processor: an OpenTelemetry SpanProcessor.
        exporter: the SpanExporter that it calls.
        resource: the OpenTelemetry Resource that all spans have.
        sample_rate: the share of new traces that is recorded.

    Attributes:
        sample_rate: the same.
    """

    def __init__(self, processor: Any, exporter: Any, resource: Any, sample_rate: float) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self.sample_rate = sample_rate
        self._processor = processor
        self._exporter = exporter
        self._resource = resource
        self._scope = InstrumentationScope("baton", __version__)

    def send(self, spans: Iterable[Span]) -> None:
        """Queues spans; those of traces that are not sampled are dropped. Does not block: when the
        queue is full, the oldest spans are dropped.
        """
        epoch_s = time.time() - time.monotonic()
        for span in spans:
            if span.context.is_sampled:
                self._processor.on_end(self._ended_span(span, epoch_s))

    def close(self) -> None:
        """Sends what is queued, for at most a few seconds. Blocks."""
        flush = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        flush.start()
        flush.join(_FLUSH_S)
        if flush.is_alive():  # the exporter would repeat its call of a silent collector
            self._exporter.shutdown()
            flush.join(_FLUSH_S)

    def _ended_span(self, span: Span, epoch_s: float) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        status = Status(StatusCode.ERROR, span.error) if span.error else Status()
        return ReadableSpan(
            span.name,
            context=_span_context(span.context, span.context.span_id, is_remote=False),
            parent=(
                _span_context(span.context, span.parent_id, is_remote=span.is_server)
                if span.parent_id
                else None
            ),
            resource=self._resource,
            attributes=span.attributes,
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=status,
            start_time=int((span.start + epoch_s) * 1e9),
            end_time=int((max(span.end, span.start) + epoch_s) * 1e9),
            instrumentation_scope=self._scope,
        )


def open_tracer(
    config: TracingConfig, service: str, attributes: Mapping[str, str]
) -> Tracer | None:
    """Begins to send spans; returns None if the config has no collector.

    Args:
        config: the flags.
        service: the process's `service.name`.
        attributes: further attributes of the process.
    """
    if config.otlp_traces_endpoint is None:
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(
        {"service.name": service, "service.version": __version__, **attributes}
    )
    exporter = _import_exporter()(endpoint=_collector_url(config.otlp_traces_endpoint))
    return Tracer(BatchSpanProcessor(exporter), exporter, resource, config.trace_sample_rate)


def _import_exporter() -> Any:
    """Returns the class of the exporter.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigurationError(
            f"--otlp-traces-endpoint needs {error.name}, which is not installed; run "
            "pip install 'baton-llm[tracing]'"
        ) from None
    return OTLPSpanExporter


def _collector_url(endpoint: str) -> str:
    """The URL of a collector as the exporter reads it; without a scheme it is http.

    Raises:
        ConfigurationError: it has another scheme, or no host.
    """
    url = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    if url.scheme not in _SCHEMES or not url.hostname:
        raise ConfigurationError(
            f"--otlp-traces-endpoint is {endpoint!r}; it must be http://HOST:PORT or "
            "https://HOST:PORT"
        )
    return f"{_SCHEMES[url.scheme]}://{url.netloc}"


def _span_context(trace: TraceContext, span_id: str, *, is_remote: bool) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED if trace.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int(trace.trace_id, 16), int(span_id, 16), is_remote, flags)


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
