"""The screen of `baton top`: texts, rates, and what fits."""

import itertools

import pytest

from baton.cli.top_view import Sample, Style, _short, render
from baton.v1 import cluster_pb2, worker_pb2

READY, DRAINING, LOST = 1, 2, 3
PREFILL, DECODE = 1, 2


def replica(address, role=DECODE, state=READY, model="tiny", **options):
    load, counters = options.pop("load", {}), options.pop("counters", {})
    if state == LOST:
        return cluster_pb2.ReplicaStatus(
            model=model, role=role, address=address, state=state, **options
        )
    return cluster_pb2.ReplicaStatus(
        model=model,
        role=role,
        address=address,
        state=state,
        worker_id=f"id of {address}",
        load=worker_pb2.WorkerLoad(**{"num_blocks": 100, "num_free_blocks": 60, **load}),
        counters=worker_pb2.WorkerCounters(**counters),
        **options,
    )


def sample(at, *replicas, uptime_s=3720.0, **activity):
    return Sample(
        at,
        cluster_pb2.GetClusterResponse(
            version="0.9.0",
            uptime_s=uptime_s + at,
            activity=cluster_pb2.RouterActivity(**activity),
            replicas=replicas,
        ),
    )


def text_of(lines):
    return "\n".join(line.text for line in lines)


def screen(*args, **options):
    return text_of(render("127.0.0.1:50051", *args, **options))


BEFORE = sample(
    100.0,
    replica("10.0.0.1:50061", PREFILL, counters={"prompt_tokens": 1000, "saved_bytes": 0}),
    replica("10.0.0.2:50062", counters={"generated_tokens": 50}),
    finished={"stop": 10, "length": 2},
    failed={"UNAVAILABLE": 1},
)
NOW = sample(
    102.0,
    replica(
        "10.0.0.1:50061",
        PREFILL,
        load={
            "num_running": 3,
            "num_waiting": 12,
            "num_queued_tokens": 20_400,
            "prefix_cache_queries": 4000,
            "prefix_cache_hits": 1000,
        },
        counters={"prompt_tokens": 5000, "saved_bytes": 3_000_000, "generated_tokens": 4},
        backlog_s=2.04,
    ),
    replica(
        "10.0.0.2:50062",
        state=DRAINING,
        load={"num_running": 64, "num_preemptions": 1},
        counters={"generated_tokens": 2450, "loaded_bytes": 2_999_000, "failed_transfers": 2},
        hit_rate=0.42,
    ),
    replica("10.0.0.3:50063", state=LOST, problem="connection refused"),
    num_running=7,
    finished={"stop": 16, "length": 2, "CANCELLED": 4},
    failed={"UNAVAILABLE": 1, "RESOURCE_EXHAUSTED": 4},
    refused={"credentials": 12, "token_rate": 8},
    num_resumes=3,
    first_token={"count": 9, "p50_ms": 120.4, "p99_ms": 12_000},
    token={"count": 9, "p50_ms": 11.5, "p99_ms": 30.0},
)

GOLDEN = """\
router 127.0.0.1:50051  baton 0.9.0  up 1h 3m
requests  7 running  5/s  22 finished  4 cancelled  3 resumed
errors    2/s  5 in all  4 RESOURCE_EXHAUSTED  1 UNAVAILABLE  20 calls refused
tokens    1.2k/s generated  2k/s of prompts  25% prefix hits  0% loaded
times     first token 120 ms (p99 12 s)  per token 12 ms (p99 30 ms)
transfer  1.5MB/s saved  1.5MB/s loaded  2 failed

tier    replica               state      run wait  queue   KV  tok/s prom/s hits
prefill 10.0.0.1:50061        ready        3   12  2.04s  40%      2     2k  25%
decode  10.0.0.2:50062        draining    64    0  0.00s  40%   1.2k      0  42%
decode  10.0.0.3:50063        LOST     connection refused"""


def test_a_screen_of_80_columns():
    assert screen(BEFORE, NOW) == GOLDEN


def test_without_an_earlier_look_there_are_counts_and_no_rates():
    text = screen(None, NOW)
    assert "7 running  -/s  22 finished" in text
    assert "-B/s saved  -B/s loaded  2 failed" in text


def test_a_long_reason_of_a_loss_keeps_its_end():
    problem = "failed to connect to all addresses; last error: UNKNOWN: Connection refused"
    lost = sample(1.0, replica("10.0.0.3:50063", state=LOST, problem=problem))
    row = screen(None, lost).splitlines()[-1]
    assert row.startswith("decode  10.0.0.3:50063        LOST     ..")
    assert row.endswith(": Connection refused")
    assert len(row) == 80


def test_a_cluster_without_replicas():
    text = screen(None, sample(0.0))
    assert text.endswith("No replica has been found yet.")
    assert "0 running" in text


def test_long_names_are_cut_to_their_columns():
    name = "a-very-long-name." * 9 + "svc:50061"
    now = sample(1.0, replica(name, model="m" * 200), replica("b:1", model="other\x1b[31m"))
    lines = render(name, None, now)
    assert max(len(line.text) for line in lines) <= 80
    (row,) = (line.text for line in lines if "svc:50061" in line.text and "decode" in line.text)
    assert row.startswith("decode  ..")
    assert "\x1b" not in text_of(lines)


@pytest.mark.parametrize("width", [20, 60, 80, 100, 132, 200])
def test_no_line_is_longer_than_the_terminal(width):
    lines = render("127.0.0.1:50051", BEFORE, NOW, width=width)
    assert max(len(line.text) for line in lines) <= width


def test_a_wider_terminal_shows_more_columns():
    heads = [screen(BEFORE, NOW, width=width) for width in (80, 140)]
    assert "loaded/s" not in heads[0]
    assert "loaded/s" in heads[1]


def test_thirty_replicas_and_a_small_terminal():
    replicas = [replica(f"10.0.0.{i}:1") for i in range(10, 39)]
    now = sample(1.0, *replicas, replica("10.0.0.99:1", state=LOST, problem="gone"))
    assert len(render("a", None, now)) == 7 + 1 + 30
    lines = render("a", None, now, height=24)
    assert len(lines) == 24
    assert "10.0.0.99" in text_of(lines), "lost replicas are shown first"
    assert lines[-1].text == "... and 15 more, which a taller terminal shows"
    assert "10.0.0.38" not in text_of(lines)


def test_models_have_headings_if_there_are_several():
    now = sample(1.0, replica("a:1"), replica("b:1", model="other"))
    assert "model other" in screen(None, now)
    assert "model tiny" not in screen(None, sample(1.0, replica("a:1")))


def test_recent_errors_stand_below_the_table():
    errors = [
        {"time_s": i, "code": "UNAVAILABLE", "message": "no replica " * 20, "request_id": f"r{i}"}
        for i in range(9)
    ]
    lines = render("a", None, sample(1.0, errors=errors))
    assert [" r0: " in line.text for line in lines].count(True) == 1
    assert len(lines) == 7 + 2 + 2 + 5
    assert max(len(line.text) for line in lines) <= 80


def test_problems_of_kv_stores_stand_below_the_table():
    problem = worker_pb2.KvBackendStatus(name="KV store redis://c:6379/0", problem="is down")
    now = sample(1.0, replica("b:1"))
    now.cluster.replicas[0].kv_backends.append(problem)
    now.cluster.warnings.append("the tiers have different KV stores")
    assert screen(None, now).endswith(
        "\n\nwarnings\nthe tiers have different KV stores\nb:1: KV store redis://c:6379/0 is down"
    )


def test_a_lost_router_is_shown_above_its_last_state():
    lines = render("a", BEFORE, NOW, problem="failed to connect")
    assert lines[1].text == "NO ANSWER, trying again: failed to connect"
    assert lines[1].style is Style.BAD
    assert "22 finished" in text_of(lines)
    assert len(render("a", None, None, problem="failed to connect")) == 2


def test_a_worker_that_restarted_has_no_rates_until_the_next_look():
    old = replica("a:1", counters={"generated_tokens": 1000})
    new = replica("a:1", counters={"generated_tokens": 10})
    new.worker_id = "another"
    assert "-/s generated" in screen(sample(0.0, old), sample(2.0, new))


def test_a_worker_that_did_not_answer_in_time_has_no_rates():
    old, new = replica("a:1"), replica("a:1")
    new.ClearField("counters")
    assert "-/s generated" in screen(sample(0.0, old), sample(2.0, new))


def test_a_router_that_restarted_has_no_rates_until_the_next_look():
    before = sample(0.0, finished={"stop": 100})
    now = sample(2.0, uptime_s=-1.5, finished={"stop": 1})
    assert "0 running  -/s  1 finished" in screen(before, now)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.25, "0.2"),
        (7, "7"),
        (99.4, "99.4"),
        (99.96, "100"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (20_400, "20.4k"),
        (3e9, "3G"),
        (2.0**63, "9223P"),
    ],
)
def test_short_numbers(number, text):
    assert _short(number) == text


def test_short_numbers_fit():
    for power, digit in itertools.product(range(17), (1.0, 1.04, 5.55, 9.99, 9.996)):
        assert len(_short(digit * 10.0**power)) <= 5
