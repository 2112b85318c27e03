"""Records and spans of requests over real engines: one tier and two."""

from collections import Counter

import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import export
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import rpc.tracing
from baton.v1 import cluster_pb2, cluster_pb2_grpc, common_pb2
from router.observe.request_timeline import stages_of
from rpc.tracing import TracingConfig
from tests.support.fake_workers import Changes
from tests.support.running_router import request
from tests.support.tiers_here import running_tiers

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = tuple(range(5, 105))
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE, SPAN = int(PARENT[3:35], 16), int(PARENT[36:52], 16)
TIERS = {"split": ("prefill", "decode"), "whole": ("decode",)}


class TracedRouter:
    """A router, and the spans that all processes have sent."""

    def __init__(self, router, exporter, is_split):
        self.router, self.exporter, self.is_split = router, exporter, is_split

    async def generate(self, request_id, *, metadata=(), prompt=PROMPT, **stopping):
        """Generates; returns the record and the spans."""
        self.exporter.clear()
        message = request(prompt, request_id=request_id, ignore_eos=True, **stopping)
        stream = self.router.stub.GenerateStream(message, timeout=60, metadata=metadata)
        self.messages = [message async for message in stream]
        record = self.router.service.log.find(request_id)
        if record.trace.is_sampled:  # workers may send theirs after the answer
            await self.exporter.changes.until(lambda: self.num_worker_spans == len(record.attempts))
        return record, self.exporter.get_finished_spans()

    @property
    def num_worker_spans(self):
        return sum(span.name.endswith(" worker") for span in self.exporter.get_finished_spans())


class NotifyingExporter(InMemorySpanExporter):
    """Keeps spans; a test can wait for them. All processes export on the event loop."""

    def __init__(self):
        super().__init__()
        self.changes = Changes()

    def export(self, spans):
        result = super().export(spans)
        self.changes.notify()
        return result


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TIERS)
async def traced(request, tmp_path_factory, loads_are_worth_it):
    exporter = NotifyingExporter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc.tracing, "_import_exporter", lambda: lambda endpoint: exporter)
        patch.setattr(export, "BatchSpanProcessor", export.SimpleSpanProcessor)
        tracing = TracingConfig(otlp_traces_endpoint="http://127.0.0.1:1")
        folder = tmp_path_factory.mktemp(request.param)
        async with running_tiers(folder, *TIERS[request.param], tracing=tracing) as router:
            yield TracedRouter(router, exporter, request.param == "split")


def explained(stages, total_ms):
    """The share of the whole time that lies within any stage."""
    covered_ms, until = 0.0, 0.0
    for stage in stages:
        covered_ms += max(0.0, stage.end_ms - max(stage.start_ms, until))
        until = max(until, stage.end_ms)
    return covered_ms / total_ms


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(3, 2), (40, 1), (100, 40)])
async def test_stages_explain_the_time(traced, num_prompt, max_tokens):
    name = f"explained-{num_prompt}-{max_tokens}"
    record, _ = await traced.generate(name, prompt=PROMPT[:num_prompt], max_tokens=max_tokens)
    stages = stages_of(record)
    total_ms = record.ms_since_arrival(record.ended_at)
    assert explained(stages, total_ms) > 0.95, stages
    assert all(0 <= stage.start_ms <= stage.end_ms <= total_ms + 0.01 for stage in stages)
    assert record.outcome == "length"
    assert record.usage.completion_tokens == max_tokens


async def test_stages_name_what_happened_where(traced):
    record, _ = await traced.generate("named", prompt=PROMPT[::-1], max_tokens=30)
    stages = Counter((stage.name, stage.where) for stage in stages_of(record))
    prefill, decode = record.attempts[0].where, record.attempts[-1].where
    wanted = {("receive", "router"), ("route", "router"), ("prefill", prefill), ("decode", decode)}
    if traced.is_split:
        wanted |= {("transfer", prefill), ("load", decode), ("prefill queue", prefill)}
        assert prefill != decode
    assert wanted <= stages.keys()


async def test_timings_of_the_answer_are_those_of_the_record(traced):
    record, _ = await traced.generate("timed", max_tokens=5)
    timings = traced.messages[-1].timings
    first_ms = record.ms_since_arrival(record.first_token_at)
    assert timings.first_token_ms == pytest.approx(first_ms)
    assert timings.route_ms == pytest.approx(record.ms_since_arrival(record.routed_at))
    assert timings.total_ms <= record.ms_since_arrival(record.ended_at)
    assert timings.decode_ms == pytest.approx(timings.total_ms - timings.first_token_ms)


async def test_one_trace_goes_over_all_processes(traced):
    record, spans = await traced.generate(
        "one-trace", prompt=PROMPT[1:], metadata=[("traceparent", PARENT)], max_tokens=9
    )
    assert {span.context.trace_id for span in spans} == {TRACE}
    by_id = {span.context.span_id: span for span in spans}
    (root,) = (span for span in spans if span.parent.span_id == SPAN)
    assert all(span is root or span.parent.span_id in by_id for span in spans)
    services = {span.resource.attributes["service.name"] for span in spans}
    tiers = {"baton-decode", "baton-prefill"} if traced.is_split else {"baton-decode"}
    assert services == {"baton-router", *tiers}
    names = Counter(span.name for span in spans)
    wanted = {"queue": 1 + traced.is_split, "decode worker": 1}
    if traced.is_split:
        assert names["prefill"] == 2, "the router's span of the call, and the worker's of its part"
        wanted |= {"prefill worker": 1, "transfer": 1, "load": 1}
    assert wanted.items() <= names.items(), names
    assert record.trace_id == PARENT[3:35]


async def test_spans_lie_within_their_parents(traced):
    _, spans = await traced.generate("within", prompt=PROMPT[2:], max_tokens=9)
    by_id = {span.context.span_id: span for span in spans}
    slack_ns = 2_000_000  # the clocks' offset is read anew for each batch of spans
    for span in spans:
        parent = by_id.get(span.parent.span_id) if span.parent else None
        if parent is not None:
            assert parent.start_time - slack_ns <= span.start_time
            assert span.start_time <= span.end_time
    (root,) = (span for span in spans if span.parent is None)
    assert root.kind.name == "SERVER"


async def test_the_first_span_has_attributes_of_generative_ai_and_no_text(traced):
    _, spans = await traced.generate("attributes", prompt=PROMPT, max_tokens=4)
    (root,) = (span for span in spans if span.parent is None)
    assert root.name == "text_completion tiny"
    assert (
        dict(root.attributes).items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.max_tokens": 4,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.usage.input_tokens": len(PROMPT),
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.response.finish_reasons": ("length",),
            "baton.request_id": "attributes",
        }.items()
    )


async def test_a_caller_decides_whether_its_trace_is_sampled(traced):
    metadata = [("traceparent", PARENT[:-1] + "0")]
    record, spans = await traced.generate("unsampled", metadata=metadata, max_tokens=4)
    assert not spans
    assert record.trace_id == PARENT[3:35]
    _, spans = await traced.generate("bad", metadata=[("traceparent", "00-1-2-3")], max_tokens=4)
    assert spans
    assert TRACE not in {span.context.trace_id for span in spans}


async def test_a_stop_text_ends_the_spans_of_decode(traced):
    record, _ = await traced.generate("whole-text", max_tokens=40)
    text = "".join(message.text for message in traced.messages)
    stop = text[len(text) // 2 :][:3]
    record, spans = await traced.generate("stopped", max_tokens=40, stop=[stop])
    assert record.outcome == "stop"
    assert "decode worker" in {span.name for span in spans}


async def test_operators_get_the_record(traced):
    await traced.generate("asked-for", max_tokens=4)
    stub = cluster_pb2_grpc.ClusterServiceStub(traced.router.channel)
    answer = await stub.GetTrace(cluster_pb2.GetTraceRequest(request_id="asked-for"), timeout=10)
    (trace,) = answer.traces
    assert (trace.model, trace.outcome, trace.operation) == ("tiny", "length", "text_completion")
    assert trace.usage == common_pb2.Usage(
        prompt_tokens=len(PROMPT), completion_tokens=4, cached_tokens=trace.usage.cached_tokens
    )
    assert 0 < trace.first_token_ms < trace.total_ms
    assert {"route", "decode"} <= {stage.name for stage in trace.stages}
    latest = await stub.GetTrace(cluster_pb2.GetTraceRequest(limit=2), timeout=10)
    assert latest.traces[0].request_id == "asked-for"
    assert len(latest.traces) == 2
