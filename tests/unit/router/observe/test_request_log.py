"""Records of requests: which are kept, their stages and outcomes, and `baton trace`'s text."""

import asyncio
import contextlib
import itertools

import pytest

from baton.cli.trace import format_trace, format_traces
from baton.common.errors import UnavailableError
from baton.common.observe.traceparent import TraceContext, parse_traceparent
from baton.common.request.answer import CandidateOutput
from baton.common.request.results import Timings
from baton.v1 import cluster_pb2
from router.cluster_servicer import ClusterServicer
from router.cluster_servicer import _trace_of as trace_of
from router.observe import request_record
from router.observe.request_log import RequestLog
from router.observe.request_record import RequestRecord
from router.observe.request_timeline import Stage, spans_of, stages_of
from router.routing.candidate import Candidate, Prompt
from router.routing.costs import PrefillPlaces
from router.routing.policies import make_policy
from router.routing.policy import PolicySettings
from rpc.logs import CallInfo, serving
from tests.support.routing import cached_blocks

PARENT = parse_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


@pytest.fixture
def clock(monkeypatch):
    """Seconds of `time.monotonic()` in records, which the test sets."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(request_record, "time", clock)
    return clock


def begin(log, name="r", **options):
    return log.begin(name, "tiny", "chat", **options)


def ended(log, name, error=None, deadline=1e9):
    record = begin(log, name)
    raised = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with raised, log.recording(record, deadline):
        if error is not None:
            raise error
    return record


def output(**timings):
    return CandidateOutput(stages=Timings(**timings))


def record_of(clock, *attempts, ended_at, routed_at=0.002):
    """A record that arrived at 0 ms and had these attempts: (tier, start, first, end, timings)."""
    start = clock.now
    record = RequestRecord(arrived_at=start, accepted_at=start + 0.001)
    record.routed_at = start + routed_at
    record.usage.prompt_tokens = 40
    for tier, started_at, first_at, attempt_end, timings in attempts:
        clock.now = start + started_at
        try:
            with record.attempt(tier, f"{tier}:1") as attempt:
                attempt.started_at = start + started_at
                if first_at is not None:
                    clock.now = start + first_at
                    attempt.take(output(**timings))
                clock.now = start + attempt_end
                if first_at is None:
                    raise UnavailableError("lost")
        except UnavailableError:
            pass
    record.ended_at = start + ended_at
    return record


def rounded(stages):
    return [
        (stage.name, stage.where, round(stage.start_ms, 3), round(stage.end_ms, 3))
        for stage in stages
    ]


def test_the_log_keeps_the_last_records_and_the_last_of_an_id():
    log = RequestLog(capacity=3)
    for name in "abcab":
        ended(log, name)
    assert [record.request_id for record in log.latest(10)] == ["b", "a", "c"]
    assert [record.request_id for record in log.latest(1)] == ["b"]
    ended(log, "d")
    assert log.find("c") is None
    assert log.find("d").request_id == "d"


def test_the_slowest_of_the_kept_records_come_first(clock):
    log = RequestLog(capacity=3)
    for name, seconds in (("dropped", 9), ("a", 2), ("b", 5), ("c", 1)):
        record = log.begin(name, "tiny", "chat")
        record.arrived_at = clock.now
        with log.recording(record, 1e9):
            clock.now += seconds
    assert [record.request_id for record in log.slowest(2)] == ["b", "a"]
    assert len(log.slowest(10)) == 3


@pytest.mark.parametrize(
    ("error", "deadline", "outcome"),
    [
        (UnavailableError("none is ready"), 1e9, "UNAVAILABLE"),
        (asyncio.CancelledError(), 1e9, "CANCELLED"),
        (asyncio.CancelledError(), 0.0, "DEADLINE_EXCEEDED"),
        (GeneratorExit(), 1e9, "CANCELLED"),
        (ZeroDivisionError(), 1e9, "INTERNAL"),
    ],
)
def test_errors_are_outcomes(error, deadline, outcome):
    assert ended(RequestLog(), "r", error, deadline).outcome == outcome


def test_a_client_that_leaves_with_the_whole_answer_has_not_cancelled():
    log = RequestLog()
    record = begin(log)
    record.add_end("stop", is_over=False)
    record.add_end("length", is_over=True)
    with pytest.raises(GeneratorExit), log.recording(record, 1e9):
        raise GeneratorExit
    assert record.outcome == "stop,length"


def test_without_a_tracer_the_callers_span_goes_to_the_workers():
    with serving(CallInfo("r", PARENT)):
        record = begin(RequestLog())
    with record.attempt("decode", "d:1") as attempt:
        assert attempt.traceparent == PARENT.header
    assert record.trace_id == PARENT.trace_id
    assert not list(spans_of(record))


def test_without_a_trace_workers_get_none():
    record = begin(RequestLog())
    with record.attempt("decode", "d:1") as attempt:
        assert attempt.traceparent == ""


def test_the_stages_of_a_split_request(clock):
    prefill = ("prefill", 0.002, 0.022, 0.032, {"queue_ms": 4, "prefill_ms": 10, "transfer_ms": 8})
    decode = ("decode", 0.033, 0.043, 0.060, {"queue_ms": 2, "load_ms": 3, "prefill_ms": 1})
    record = record_of(clock, prefill, decode, ended_at=0.061)
    record.attempts[1].cached_tokens = 40
    assert rounded(stages_of(record)) == [
        ("receive", "router", 0, 1),
        ("route", "router", 1, 2),
        ("rpc", "prefill:1", 2, 5),
        ("prefill queue", "prefill:1", 5, 9),
        ("prefill", "prefill:1", 9, 19),
        ("rpc", "prefill:1", 19, 22),
        ("transfer", "prefill:1", 19, 27),
        ("rpc", "prefill:1", 27, 32),
        ("route", "router", 32, 33),
        ("rpc", "decode:1", 33, 35),
        ("load", "decode:1", 35, 38),
        ("decode queue", "decode:1", 38, 40),
        ("decode", "decode:1", 40, 41),
        ("rpc", "decode:1", 41, 43),
        ("decode", "decode:1", 43, 60),
        ("send", "router", 60, 61),
    ]


def test_a_failed_call_and_a_wait_are_stages(clock):
    failed = ("decode", 0.002, None, 0.010, {})
    again = ("decode", 0.020, 0.030, 0.040, {"prefill_ms": 9})
    record = record_of(clock, failed, again, ended_at=0.040)
    start = record.arrived_at
    record.waits.append((start + 0.010, start + 0.019))
    assert record.attempts[0].error == "UNAVAILABLE"
    names = [stage.name for stage in stages_of(record)]
    assert names[2:4] == ["decode failed", "wait for a replica"]
    assert "prefill" in names[4:]


def test_a_worker_that_says_more_than_its_call_took_moves_no_stage_out_of_it(clock):
    odd = ("decode", 0.002, 0.004, 0.006, {"queue_ms": 9e9, "prefill_ms": 9e9})
    record = record_of(clock, odd, ended_at=0.006)
    assert all(stage.end_ms <= 6.001 for stage in stages_of(record))


def test_a_request_that_was_refused_has_stages_too(clock):
    record = RequestRecord(arrived_at=clock.now, accepted_at=clock.now + 0.001)
    record.ended_at = clock.now + 0.003
    assert rounded(stages_of(record)) == [
        ("receive", "router", 0, 1),
        ("route", "router", 1, 3),
    ]


async def test_the_service_checks_its_request():
    log = RequestLog()
    servicer = ClusterServicer(log, status=None, models=())
    for number in range(30):
        ended(log, f"r{number}")
    answer = await servicer.GetTrace(cluster_pb2.GetTraceRequest(), None)
    assert len(answer.traces) == 20
    for limit in (0, 1001):
        with pytest.raises(Exception, match=f"limit is {limit}"):
            await servicer.GetTrace(cluster_pb2.GetTraceRequest(limit=limit), None)
    with pytest.raises(Exception, match="no record of request 'x'"):
        await servicer.GetTrace(cluster_pb2.GetTraceRequest(request_id="x"), None)


def message_of(stages, **fields):
    return cluster_pb2.RequestTrace(
        **{"request_id": "r-1", "model": "tiny", "outcome": "stop", "total_ms": 100.0} | fields,
        stages=[
            cluster_pb2.TraceStage(
                name=stage.name, where=stage.where, start_ms=stage.start_ms, end_ms=stage.end_ms
            )
            for stage in stages
        ],
    )


def test_a_waterfall_fits_into_80_columns():
    where = ("router", "127.0.0.1:50061", "[2001:db8::1]:50061", "decode-7.ns.svc.example:50062")
    stages = [
        Stage("wait for a replica", place, start, start + took)
        for place, start, took in itertools.product(
            where, (0.0, 49.9, 99.99), (0.0, 0.001, 50.0, 1e6)
        )
    ]
    trace = message_of(stages, request_id="x" * 300, tenant="t", trace_id="0" * 32)
    trace.first_token_ms = 12.5
    lines = list(format_trace(trace))
    table = lines[lines.index("") + 1 :]
    assert len(table) == len(stages) + 1
    assert all(len(line) <= 80 for line in table)
    assert all("#" in line for line in table[1:])
    assert "first token after 12.5 ms" in "\n".join(lines)


def choice_of(tier, *replicas):
    costs = [
        cluster_pb2.ReplicaCost(
            replica=replica,
            seconds=0.3,
            uncached_tokens=120,
            compute_s=0.1,
            load_s=0.05,
            queue_s=0.15,
            num_requests=3,
            weight=0.5,
        )
        for replica in replicas
    ]
    return cluster_pb2.ReplicaChoice(
        tier=tier, policy="prefix", reason="least cost", num_candidates=5, costs=costs
    )


def test_a_trace_says_why_its_replicas_were_chosen():
    choices = [choice_of("prefill", "a:1", "decode-7.ns.svc.example:50062"), choice_of("decode")]
    trace = message_of([], choices=choices, local_prefill_s=1.2, remote_prefill_s=0.35)
    text = "\n".join(format_trace(trace))
    assert "costs all requests 1200.0 ms on decode, 350.0 ms on prefill" in text
    assert "prefill: least cost (prefix, 5 replicas)" in text
    head, chosen, other = text.split("5 replicas)\n")[1].splitlines()[:3]
    assert head.split() == [
        "replica",
        "cost",
        "queue",
        "compute",
        "load",
        "decode",
        "tokens",
        "runs",
        "share",
    ]
    assert chosen.split() == ["a:1", "300.0", "150.0", "100.0", "50.0", "0.0", "120", "3", "0.5"]
    assert other.split()[1:] == chosen.split()[1:]
    assert max(map(len, text.splitlines())) <= 80


def test_a_record_keeps_the_choice_of_each_attempt():
    log = RequestLog()
    record = begin(log)
    policy = make_policy("prefix", PolicySettings())
    prompt = Prompt(num_tokens=40, block_size=4, match=cached_blocks({}))
    candidates = [Candidate(replica_id=name, address=f"{name}:1") for name in "abcd"]
    with log.recording(record, 1e9):
        record.choices["prefill"] = policy.pick_prefill(candidates, prompt)
        record.choices["decode"] = policy.pick_decode(candidates, prompt)
        record.places = PrefillPlaces(0.2, 0.1)
        for tier in ("prefill", "decode", "decode"):
            with record.attempt(tier, "a:1"):
                pass
    trace = trace_of(log.find("r"))
    assert [choice.tier for choice in trace.choices] == ["prefill", "decode"]
    assert [cost.replica for cost in trace.choices[0].costs] == ["a:1", "b:1", "c:1"]
    assert trace.choices[0].costs[0].uncached_tokens == 40
    assert trace.choices[1].costs[0].decode_s > 0
    assert (trace.local_prefill_s, trace.remote_prefill_s) == (0.2, 0.1)


def test_bars_are_where_the_time_was():
    trace = message_of([Stage("route", "router", 0, 50), Stage("decode", "d:1", 50, 100)])
    first, second = (line[35:61] for line in list(format_trace(trace))[-2:])
    assert (first, second) == ("#" * 13 + " " * 13, " " * 13 + "#" * 13)


def test_text_of_others_cannot_change_the_terminal():
    trace = message_of([Stage("a\x1b[31m", "b\n", 0, 1)], request_id="\x1b[2J\u202e")
    lines = [*format_trace(trace), *format_traces(cluster_pb2.GetTraceResponse(traces=[trace]))]
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_a_list_has_a_line_per_request():
    response = cluster_pb2.GetTraceResponse(
        traces=[message_of([], request_id="y" * 100, outcome="DEADLINE_EXCEEDED")]
    )
    head, line = format_traces(response)
    assert line.endswith("         -     100.0")
    assert max(map(len, (head, line))) <= 80


def test_a_new_trace_is_sampled_or_not_and_its_id_is_logged():
    class Tracer:
        sample_rate = 1.0
        sent = ()

        def send(self, spans):
            self.sent = list(spans)

    tracer, call = Tracer(), CallInfo("r")
    with serving(call):
        record = ended(RequestLog(tracer), "r")
    assert isinstance(record.trace, TraceContext)
    assert record.trace.is_sampled
    assert call.trace_id == record.trace.trace_id
    assert [span.name for span in tracer.sent] == ["chat tiny", "route"]
