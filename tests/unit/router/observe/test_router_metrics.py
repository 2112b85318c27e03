"""What the router counts of a request, a call and its replicas."""

from prometheus_client import CollectorRegistry, generate_latest

from baton.common.observe.metrics_collector import MetricsCollector
from baton.common.request.answer import CandidateOutput, TokenCounts
from baton.common.request.results import Timings
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2
from router.fleet.tier import Tier
from router.observe.metrics import FleetCounts, ReplicaGauges, RouterMetrics
from router.observe.request_log import RequestLog
from router.observe.request_record import RequestRecord
from rpc.discovery.discovery import Discovery
from rpc.logs import CURRENT_CALL, CallInfo


def ended_record(**fields: object) -> RequestRecord:
    usage = TokenCounts(prompt_tokens=10, cached_tokens=4, completion_tokens=5)
    record = RequestRecord(model="m", tenant="acme", usage=usage, **fields)
    record.arrived_at, record.routed_at, record.first_token_at = 100.0, 100.25, 101.0
    with record.attempt("prefill", "p:1") as prefill:
        prefill.take(CandidateOutput(stages=Timings(queue_ms=250, prefill_ms=500)))
    for error in ("UNAVAILABLE", ""):
        with record.attempt("decode", "d:1") as decode:
            decode.take(CandidateOutput(token_ids=[1]))
            decode.error = error
    record.add_end("stop", is_over=True)
    record.ended_at = 103.0
    return record


def text_of(metrics: RouterMetrics) -> list[str]:
    registry = CollectorRegistry()
    registry.register(MetricsCollector(metrics))
    return generate_latest(registry).decode().splitlines()


def test_an_ended_request_is_counted_once():
    metrics = RouterMetrics()
    metrics.count_request(ended_record())
    lines = text_of(metrics)
    for line in (
        'baton_router_requests_total{model="m",outcome="stop"} 1.0',
        'baton_router_prompt_tokens_total{model="m",tenant="acme"} 10.0',
        'baton_router_cached_prompt_tokens_total{model="m",tenant="acme"} 4.0',
        'baton_router_generated_tokens_total{model="m",tenant="acme"} 5.0',
        'baton_router_request_seconds_sum{model="m"} 3.0',
        'baton_router_first_token_seconds_sum{model="m"} 1.0',
        'baton_router_time_per_output_token_seconds_sum{model="m"} 0.5',
        'baton_router_route_seconds_sum{model="m"} 0.25',
        'baton_router_stage_seconds_sum{stage="queue"} 0.25',
        'baton_router_stage_seconds_sum{stage="prefill"} 0.5',
        'baton_router_prompts_total{model="m",tier="prefill"} 1.0',
        'baton_router_attempts_total{result="ok",tier="decode"} 1.0',
        'baton_router_attempts_total{result="UNAVAILABLE",tier="decode"} 1.0',
        'baton_router_resumes_total{model="m"} 1.0',
    ):
        assert line in lines


def test_series_that_are_known_begin_at_zero():
    """A rate takes the first value of a series for its beginning, and misses the first event."""
    metrics = RouterMetrics()
    metrics.expect(["m"], [""])
    metrics.count_call("http", "503")
    lines = text_of(metrics)
    for line in (
        'baton_router_requests_total{model="m",outcome="stop"} 0.0',
        'baton_router_requests_total{model="m",outcome="UNAVAILABLE"} 0.0',
        'baton_router_generated_tokens_total{model="m",tenant=""} 0.0',
        'baton_router_attempts_total{result="UNAVAILABLE",tier="decode"} 0.0',
        'baton_router_prompts_total{model="m",tier="prefill"} 0.0',
        'baton_router_resumes_total{model="m"} 0.0',
        'baton_router_first_token_seconds_count{model="m"} 0.0',
        'baton_router_calls_total{protocol="grpc",status="OK"} 0.0',
        'baton_router_calls_total{protocol="http",status="429"} 0.0',
        'baton_router_calls_total{protocol="http",status="503"} 1.0',
    ):
        assert line in lines
    assert not any('protocol="grpc",status="200"' in line for line in lines)


def test_requests_of_batches_have_no_times_as_nobody_waits_for_them():
    metrics, log = RouterMetrics(), RequestLog()
    call = CURRENT_CALL.set(CallInfo(is_counted=False))
    try:
        assert not log.begin("id", "m", "chat").is_awaited
    finally:
        CURRENT_CALL.reset(call)
    record = ended_record()
    record.is_awaited = False
    metrics.count_request(record)
    lines = text_of(metrics)
    assert 'baton_router_requests_total{model="m",outcome="stop"} 1.0' in lines
    assert 'baton_router_stage_seconds_sum{stage="prefill"} 0.5' in lines
    assert not [line for line in lines if line.startswith("baton_router_first_token_seconds_sum")]


def test_a_failed_request_has_its_error_as_outcome():
    metrics = RouterMetrics()
    log = RequestLog(metrics=metrics)
    record = log.begin("id", "m", "chat")
    try:
        with log.recording(record, deadline=1e12):
            raise GeneratorExit
    except GeneratorExit:
        pass
    assert 'baton_router_requests_total{model="m",outcome="CANCELLED"} 1.0' in text_of(metrics)


def test_gauges_are_read_when_they_are_exported():
    metrics = RouterMetrics()
    metrics.read_running = lambda: 3
    metrics.read_fleets = lambda: [FleetCounts("m", "decode", connected=3, ready=2, ejected=1)]
    metrics.read_replicas = lambda: [
        ReplicaGauges("m", "prefill", "a:1", backlog_s=1.5, num_requests=3, hit_rate=0.25)
    ]
    metrics.count_call("http", "429")
    lines = text_of(metrics)
    labels = '{model="m",replica="a:1",tier="prefill"}'
    assert f"baton_router_replica_backlog_seconds{labels} 1.5" in lines
    assert f"baton_router_replica_requests{labels} 3.0" in lines
    assert f"baton_router_replica_hit_ratio{labels} 0.25" in lines
    assert "baton_router_running_requests 3.0" in lines
    assert 'baton_router_replicas{model="m",state="connected",tier="decode"} 3.0' in lines
    assert 'baton_router_replicas{model="m",state="ready",tier="decode"} 2.0' in lines
    assert 'baton_router_replicas{model="m",state="ejected",tier="decode"} 1.0' in lines
    assert 'baton_router_calls_total{protocol="http",status="429"} 1.0' in lines


def test_a_replica_may_be_lost_while_a_scrape_counts_the_replicas():
    tier = Tier(
        worker_pb2.WORKER_ROLE_DECODE,
        Discovery(()),
        Discovery(()),
        lambda _: None,
        lambda *_: None,
        ClusterSecurity(),
        check=lambda _: None,
        on_change=lambda: None,
        on_forget=lambda _: None,
    )

    class Replica:
        @property
        def takes_requests(self) -> bool:
            tier._connected.pop("b:1", None)  # as the event loop does meanwhile
            return True

    tier._connected.update({"a:1": Replica(), "b:1": Replica(), "c:1": Replica()})
    assert len(tier.candidates) == 3
