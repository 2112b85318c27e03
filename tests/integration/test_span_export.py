"""Spans reach a collector over gRPC, and a collector that fails does not hold a process."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from baton.common.observe.traceparent import TraceContext
from rpc.tracing import Span, TracingConfig, open_tracer

TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", is_sampled=True)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it gets."""

    def __init__(self):
        self.requests = []

    def Export(self, request, context):
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector():
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector
    server.stop(0).wait()


def span(name, **options):
    now = time.monotonic()
    return Span(name=name, context=TRACE, parent_id="", start=now - 0.25, end=now, **options)


@pytest.mark.parametrize("scheme", ["http://", "grpc://", ""])
def test_spans_reach_a_collector(collector, scheme):
    config = TracingConfig(otlp_traces_endpoint=f"{scheme}127.0.0.1:{collector.port}")
    tracer = open_tracer(config, "baton-test", {"baton.model": "tiny"})
    tracer.send([span("work", attributes={"gen_ai.request.model": "tiny"}, error="INTERNAL")])
    tracer.close()
    (request,) = collector.requests
    (group,) = request.resource_spans
    resource = {one.key: one.value.string_value for one in group.resource.attributes}
    assert (resource["service.name"], resource["baton.model"]) == ("baton-test", "tiny")
    (got,) = group.scope_spans[0].spans
    assert (got.name, got.trace_id.hex(), got.span_id.hex()) == (
        "work",
        TRACE.trace_id,
        TRACE.span_id,
    )
    assert got.end_time_unix_nano - got.start_time_unix_nano == pytest.approx(0.25e9, rel=1e-3)
    assert abs(got.end_time_unix_nano / 1e9 - time.time()) < 60
    assert got.status.message == "INTERNAL"


@contextlib.contextmanager
def silent_port():
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_silent_collector_does_not_hold_the_process():
    with silent_port() as port:
        config = TracingConfig(otlp_traces_endpoint=f"http://127.0.0.1:{port}")
        tracer = open_tracer(config, "baton-test", {})
        started_at = time.monotonic()
        tracer.send(span(f"work-{number}") for number in range(5000))
        tracer.close()
    assert time.monotonic() - started_at < 15
