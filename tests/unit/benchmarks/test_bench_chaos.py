"""`baton bench chaos`: its schedule, its judgement of tokens, and its counts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.errors import InternalError, UnavailableError
from baton.common.request.results import CompletionChunk
from benchmarks.chaos.cluster import ComputedTokens
from benchmarks.chaos.outcome import ChaosOutcome, judge, make_report
from benchmarks.chaos.requests import (
    KINDS,
    Event,
    Record,
    has_ended,
    make_requests,
    make_schedule,
    send_all,
)
from benchmarks.report import format_report

TARGETS = ("router-0", "prefill-0", "decode-0")
REQUESTS = make_requests(6, vocab_size=100, seed=1)


def record(tokens=((1, 2), (3,)), **fields):
    own = {"request": REQUESTS[0], "router": 0, "sent_s": 1.0, "ended_s": 2.0} | fields
    return Record(tokens={i: list(each) for i, each in enumerate(tokens)}, **own)


@settings(deadline=None)  # other work may hold the core up
@given(st.integers(0, 99), st.floats(0.5, 5), st.floats(0, 100))
def test_a_schedule_depends_on_its_arguments_alone(seed, interval_s, duration_s):
    def schedule():
        return make_schedule(
            TARGETS, KINDS, interval_s=interval_s, duration_s=duration_s, seed=seed
        )

    events = schedule()
    assert events == schedule()
    assert len(events) == int(duration_s / interval_s)
    assert all(event.target in TARGETS and event.kind in KINDS for event in events)
    times = [event.at_s for event in events]
    assert times == pytest.approx([interval_s * (i + 1) for i in range(len(events))])


def test_a_rolling_restart_drains_every_process_in_turn():
    events = make_schedule(TARGETS, KINDS, interval_s=2, duration_s=1, seed=0, rolling=2)
    assert [event.target for event in events] == [*TARGETS, *TARGETS]
    assert {event.kind for event in events} == {"drain"}


def test_requests_are_of_all_kinds_and_depend_on_the_seed_alone():
    assert make_requests(6, vocab_size=100, seed=1) == REQUESTS
    assert make_requests(6, vocab_size=100, seed=2) != REQUESTS
    greedy, seeded, several = (request.params for request in REQUESTS[:3])
    assert (greedy.temperature, seeded.temperature, several.n) == (0, 1, 2)
    assert seeded.seed != several.seed


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ({}, "right"),
        ({"tokens": ((1, 2), (4,))}, "wrong"),
        ({"tokens": ((1,), (3,))}, "missing"),
        ({"tokens": ((1, 2, 2), (3,))}, "twice"),
        ({"tokens": (), "error": "UNAVAILABLE"}, "refused"),
        ({"tokens": (), "error": "RESOURCE_EXHAUSTED"}, "refused"),
        ({"tokens": ((1,),), "error": "UNAVAILABLE"}, "lost"),
        ({"tokens": (), "error": "INTERNAL"}, "lost"),
        ({"first_error": "router ended", "first_tokens": {0: [1]}}, "right"),
        ({"first_error": "router ended", "first_tokens": {0: [2]}}, "wrong"),
    ],
)
def test_tokens_are_judged_by_those_of_the_quiet_run(own, verdict):
    assert judge(record(**own), record()) == verdict


@pytest.mark.parametrize(
    ("kind", "target", "code", "tries"),
    [
        ("kill", "router-0", "UNAVAILABLE", 2),
        ("kill", "router-0/1", "UNAVAILABLE", 2),
        ("kill", "router-1/0", "UNAVAILABLE", 1),
        ("drain", "router-0", "UNAVAILABLE", 2),
        ("freeze", "router-0", "UNAVAILABLE", 1),
        ("kill", "router-0", "INTERNAL", 1),
        ("", "", "UNAVAILABLE", 1),
    ],
)
async def test_only_what_a_router_lost_by_its_end_is_sent_again(kind, target, code, tries):
    error = UnavailableError("gone") if code == "UNAVAILABLE" else InternalError("bug")
    happened = [Event(0.0, kind, target)] if kind else []
    records = await send_all(
        REQUESTS[:1],
        [FakeClient(error), FakeClient(None)],
        rate=1.0,
        salt="",
        has_ended=lambda router, since_s: has_ended(happened, f"router-{router}", since_s),
        first_serving=serving,
    )
    assert records[0].num_tries == tries
    assert bool(records[0].error) == (tries == 1)


async def serving(preferred):
    return preferred


class FakeClient:
    """Streams one token, then fails or ends."""

    def __init__(self, error):
        self.error = error

    async def stream(self, prompt, params, **options):
        yield CompletionChunk(request_id="r", index=0, text="", token_ids=[7])
        if self.error is not None:
            raise self.error


def test_counters_go_on_over_restarts():
    computed = ComputedTokens()
    for name, value in (("a", 5), ("b", 100), ("a", 8), ("b", 101), ("a", 2), ("a", 3)):
        computed.read(name, value)
    assert computed.total == 3 + 1 + 2 + 1


def test_a_report_says_what_went_wrong():
    bad = record(error="UNAVAILABLE", message="no decode replica is ready", tokens=())
    slow = record(router=1, longest_gap_s=9.0)
    outcome = ChaosOutcome(
        [record(), bad, slow], ["right", "refused", "right"], 1.02, [], ["baton-x"]
    )
    events = [Event(1.5, "kill", "router-1"), Event(1.5, "freeze", "decode-0")]
    report = make_report(outcome, events, {"model": "demo"}, {"flags": {}})
    text = format_report(report)
    assert not outcome.is_good
    assert "no decode replica is ready" in text
    assert "baton-x" in text
    assert report.results["verdicts"] == {"right": 2, "refused": 1}
    assert report.results["gaps_of_other_routers_s"][-1] < report.results["gaps_s"][-1] == 9.0


def test_a_run_without_a_fault_is_good():
    outcome = ChaosOutcome([record()], ["right"], 1.0, [], [])
    assert outcome.is_good
    assert "nothing" in format_report(make_report(outcome, [], {}, {}))
