"""The router's spans over fake workers: failed and resumed attempts, and who gets which header."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import router.server
from baton.common.errors import ConfigurationError, ResourceExhaustedError
from baton.common.observe.traceparent import parse_traceparent
from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from rpc.tracing import Tracer, TracingConfig
from tests.support.fake_workers import FakeDecode, FakePrefill, running_workers
from tests.support.running_http import running_http
from tests.support.running_router import request, running_router, token_ids_of

SCRIPT = [50 + i % 200 for i in range(400)]
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def exporter(monkeypatch):
    exporter = InMemorySpanExporter()
    tracer = Tracer(SimpleSpanProcessor(exporter), exporter, Resource({}), sample_rate=1.0)
    monkeypatch.setattr(router.server, "open_tracer", lambda *arguments: tracer)
    return exporter


def by_name(spans):
    return {span.name: span for span in spans}


async def test_every_attempt_is_a_span_below_the_request(exporter):
    refusing = FakePrefill(SCRIPT)
    refusing.refusal = ResourceExhaustedError("the queue is full")
    decodes = FakeDecode(SCRIPT, pause_after=7), FakeDecode(SCRIPT, pause_after=7)
    workers = (refusing, *decodes)
    async with running_workers(*workers), running_router(*workers) as running:
        call = running.stub.GenerateStream(request(request_id="r", max_tokens=20), timeout=30)
        responses = []
        async for response in call:
            responses.append(response)
            if len(token_ids_of(responses)) == 7:
                dying, survivor = sorted(decodes, key=lambda one: not one.starts)
                survivor.resume()
                await dying.stop()
    spans = exporter.get_finished_spans()
    (root,) = (span for span in spans if span.parent is None)
    attempts = [span for span in spans if "baton.attempt" in span.attributes]
    assert {span.parent.span_id for span in attempts} == {root.context.span_id}
    assert [(span.name, span.status.description) for span in attempts] == [
        ("prefill", "RESOURCE_EXHAUSTED"),
        ("decode", "UNAVAILABLE"),
        ("decode", None),
    ]
    sent = [refusing.requests[0], dying.starts[0].spec, survivor.starts[0].spec]
    contexts = [parse_traceparent(spec.traceparent) for spec in sent]
    assert [int(context.span_id, 16) for context in contexts] == [
        span.context.span_id for span in attempts
    ]
    assert root.status.status_code is StatusCode.UNSET


async def test_an_error_is_the_status_of_the_first_span(exporter):
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode) as running:
        message = request([5] * 9000, request_id="too-long")
        with pytest.raises(Exception, match="prompt"):
            await running.generate(message)
        assert running.service.log.find("too-long").outcome == "INVALID_ARGUMENT"
    (root,) = (span for span in exporter.get_finished_spans() if span.parent is None)
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("header", [PARENT, "00-bad", ""])
async def test_without_tracing_workers_get_a_valid_header_as_it_is(header):
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode) as running:
        metadata = [("traceparent", header)] if header else []
        call = running.stub.GenerateStream(request(max_tokens=2), timeout=30, metadata=metadata)
        assert [response async for response in call]
    assert decode.starts[0].spec.traceparent == (header if header == PARENT else "")


async def test_a_trace_over_http_is_that_of_the_header(exporter):
    decode = FakeDecode(SCRIPT)
    async with running_http(decode) as running:
        body = {"model": "scripted", "prompt": [5, 6, 7], "max_tokens": 3}
        headers = {"traceparent": PARENT, "x-request-id": "by-http"}
        answer = await running.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        twice = [("traceparent", PARENT), ("traceparent", PARENT)]
        await running.http.post("/v1/completions", json=body, headers=twice)
        records = running.router.service.log.latest(2)
    assert [record.trace_id == PARENT[3:35] for record in records] == [False, True]
    assert records[1].request_id.startswith("by-http")
    assert decode.starts[0].spec.traceparent[:35] == PARENT[:35]
    roots = [span for span in exporter.get_finished_spans() if span.kind.name == "SERVER"]
    assert roots[0].parent.span_id == int(PARENT[36:52], 16)
    assert roots[0].parent.is_remote
    assert roots[1].parent is None


async def test_chats_are_named_so(exporter):
    decode = FakeDecode(SCRIPT)
    text = TemplateText("{{ messages[0].content }}", "a test")
    template = ChatTemplate(TemplateSource({"default": text}))
    async with running_http(decode, chat_template=template) as running:
        body = {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 3}
        answer = await running.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
    (root,) = (span for span in exporter.get_finished_spans() if span.kind.name == "SERVER")
    assert root.name == "chat scripted"
    assert "secret" not in str([span.to_json() for span in exporter.get_finished_spans()])


@pytest.mark.parametrize(
    "endpoint", ["ftp://host:1", "http://", "://", "http:///path", "https://:4317"]
)
def test_bad_endpoints_are_refused(endpoint):
    with pytest.raises(ConfigurationError, match="--otlp-traces-endpoint"):
        TracingConfig(otlp_traces_endpoint=endpoint)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_bad_sample_rates_are_refused(rate):
    with pytest.raises(ConfigurationError, match="--trace-sample-rate"):
        TracingConfig(trace_sample_rate=rate)


def test_the_missing_extra_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'baton-llm\[tracing\]'"):
        TracingConfig(otlp_traces_endpoint="localhost:4317")


def test_a_process_without_spans_does_not_import_opentelemetry():
    modules = "router.server, router.observe.request_log, worker.server"
    program = (
        f"import sys, {modules}; from rpc.tracing import TracingConfig, open_tracer; "
        "assert open_tracer(TracingConfig(), 'x', {}) is None; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert output.strip() == "[]"
