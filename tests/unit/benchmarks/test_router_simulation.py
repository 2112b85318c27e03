"""The simulation of policies: virtual time, requests of a trace, replicas, routers."""

import pytest

from benchmarks.router.policies import measure_policies, policy_table
from benchmarks.router.simulation.decode import SimulatedDecode
from benchmarks.router.simulation.prefill import SimulatedPrefill
from benchmarks.router.simulation.replica import Speeds
from benchmarks.router.simulation.requests import (
    BLOCK_TOKENS,
    SimulatedRequest,
    make_requests,
    synthetic_trace,
)
from benchmarks.router.simulation.run import ORACLE, Setting, simulate
from benchmarks.router.simulation.virtual_time import VirtualTime
from benchmarks.workloads.trace import TraceLine
from router.routing.policies import POLICIES

SPEEDS = Speeds(prompt_token_s=1e-3, prompt_s=0.0, step_s=0.1, sequence_s=0.0, num_blocks=64)


def test_calls_come_in_the_order_of_their_times_and_of_equal_times_in_order():
    time, calls = VirtualTime(), []

    def call(name):
        calls.append((time.now, name))
        if name == "b":
            time.call_later(1.0, lambda: call("d"))
            time.call_at(0.5, lambda: call("c"))  # past: now

    time.call_at(2.0, lambda: call("b"))
    time.call_at(1.0, lambda: call("a"))
    time.call_at(2.0, lambda: call("b2"))
    time.run()
    assert calls == [(1.0, "a"), (2.0, "b"), (2.0, "b2"), (2.0, "c"), (3.0, "d")]


def test_requests_share_the_keys_of_common_beginnings():
    lines = [
        TraceLine(0, 3 * BLOCK_TOKENS, 8, (1, 2, 3)),
        TraceLine(6000, 3 * BLOCK_TOKENS + 5, 8, (1, 2, 4, 5)),
        TraceLine(12_000, 2 * BLOCK_TOKENS, 8, (1, 2)),
        TraceLine(18_000, 2 * BLOCK_TOKENS, 8, (2, 1)),
        TraceLine(24_000, 9 * BLOCK_TOKENS, 8, tuple(range(9))),
    ]
    requests = make_requests(lines, time_scale=0.5, max_total_tokens=2000, seed=1)
    assert [request.number for request in requests] == [0, 1, 2, 3]  # the last is too long
    first, second, third, fourth = requests
    assert second.keys[:2] == first.keys[:2]
    assert second.keys[2] != first.keys[2]
    assert len(second.keys) == 3
    assert third.keys == first.keys[:2]
    assert not {*fourth.keys} & {*first.keys}  # a block's key counts those before it
    shared = [request.num_shared_tokens // BLOCK_TOKENS for request in requests]
    assert shared == [0, 2, 1, 0]  # one token of the third is computed
    assert [request.is_follow_up for request in requests] == [False, True, True, False]
    for request, line in zip(requests, lines, strict=False):
        assert 0 <= request.arrival_s - line.timestamp_ms / 2000 <= 1.5


def test_a_folded_trace_arrives_in_parts_at_once_which_share_first_blocks_alone():
    lines = [TraceLine(9000 * n, 2 * BLOCK_TOKENS + 1, 8, (0, 1, n + 2)) for n in range(4)]
    requests = make_requests(lines, num_folds=2, max_total_tokens=2000, seed=1)
    assert sorted(request.arrival_s // 3 for request in requests) == [0, 1, 3, 4]
    assert {request.number for request in requests[:2]} == {0, 2}
    assert len({request.keys[0] for request in requests}) == 1
    assert len({request.keys[1] for request in requests}) == 2
    assert sorted(request.num_shared_tokens for request in requests) == [0, 512, 1024, 1024]


def request_of(number, keys, num_tokens=None):
    num_tokens = num_tokens or len(keys) * BLOCK_TOKENS + 1
    return SimulatedRequest(number, 0.0, num_tokens, 10, [bytes([key]) * 16 for key in keys])


class Told:
    """Events and reports of a replica."""

    def __init__(self):
        self.num_stored = 0
        self.loads = []

    def take_events(self, replica, events):
        for event in events:
            if event.HasField("stored"):
                self.num_stored += len(event.stored.keys)

    def take_report(self, replica, report):
        self.loads.append(report)


def test_a_prefill_replica_computes_in_order_and_only_what_it_has_not_cached():
    time, told = VirtualTime(), Told()
    replica = SimulatedPrefill("p", SPEEDS, time, told.take_events, told.take_report)
    replica.start()
    done = []
    first, second, third = (request_of(n, keys) for n, keys in enumerate(([1, 2], [1, 2, 3], [7])))
    for request in (first, second, third):
        replica.submit(request, lambda ended=request: done.append((ended.number, time.now)))
    assert replica.coming_blocks(request_of(9, [1, 2, 3, 4])) == 3
    assert replica.cached_tokens(second) == 0  # nothing is computed yet
    time.run()
    computed = [1025, 513, 513]
    assert done == [(n, pytest.approx(sum(computed[: n + 1]) / 1000)) for n in range(3)]
    assert [first.cached_tokens, second.cached_tokens, third.cached_tokens] == [0, 1024, 0]
    assert replica.busy_s == pytest.approx(2.051)
    assert told.num_stored == 4
    assert told.loads[0].num_free_blocks == told.loads[-1].num_free_blocks == 64
    waits = [load.queued_prompt_s for load in told.loads]
    # Reports come every 50 ms, and do not know of coming hits.
    assert max(waits) == pytest.approx(1.025 + 1.537 + 0.513, abs=0.06)
    assert waits[-1] == 0.0
    replica.kv.check()


def test_a_decode_replica_generates_side_by_side_and_waits_for_blocks():
    time, told = VirtualTime(), Told()
    replica = SimulatedDecode("d", SPEEDS, time, told.take_events, told.take_report)
    replica.start()
    ended = {}
    for request in (request_of(0, range(40)), request_of(1, [50]), request_of(2, range(60, 100))):
        replica.submit(
            request,
            is_local=False,
            on_begin=lambda: None,
            on_done=lambda number=request.number: ended.setdefault(number, time.now),
        )
    assert replica.num_open == 3
    time.run()
    # Two run at once, for ten steps; the third has no blocks before the first ends.
    load_s = 40 * BLOCK_TOKENS * SPEEDS.kv_bytes_per_token / SPEEDS.load_bytes_per_s
    assert ended[0] == pytest.approx(load_s + 1.0, abs=0.01)
    assert ended[1] < ended[0] < ended[2]
    assert replica.num_open == 0
    assert replica.kv.pool.num_free == 64
    replica.kv.check()


def test_a_prompt_that_decode_computes_delays_the_others():
    time, told = VirtualTime(), Told()
    replica = SimulatedDecode("d", SPEEDS, time, told.take_events, told.take_report)
    replica.start()
    ended, began = {}, []
    for request, is_local in ((request_of(0, [], 1), False), (request_of(1, [], 500), True)):
        replica.submit(
            request,
            is_local=is_local,
            on_begin=lambda: began.append(time.now),
            on_done=lambda number=request.number: ended.setdefault(number, time.now),
        )
    time.run()
    assert began[-1] == pytest.approx(0.5)
    assert ended[0] == pytest.approx(1.5, abs=0.01)  # ten steps, and half a second between them
    assert ended[1] == pytest.approx(1.5, abs=0.01)


def small_setting(**changes):
    options = {"lines": synthetic_trace(120), "num_replicas": 4, "load": 0.7}
    return Setting(**options | changes)


@pytest.mark.parametrize("policy", [ORACLE, *POLICIES])
def test_every_policy_serves_every_request(policy):
    outcome = simulate(small_setting(), policy, 1, seed=0)
    assert 0 <= outcome.hit_rate <= outcome.possible_hit_rate
    assert 0 < outcome.first_token_p50_s <= outcome.first_token_p90_s
    assert 1 <= outcome.most_to_mean_load <= 4
    assert 0.9 < outcome.believed_to_held <= 1.1


def test_knowledge_of_caches_is_worth_something_and_is_seen():
    prefix = simulate(small_setting(), "prefix", 1, seed=0)
    blind = simulate(small_setting(), "round-robin", 1, seed=0)
    assert prefix.follow_up_hits > blind.follow_up_hits + 0.2
    assert prefix.first_token_p90_s < blind.first_token_p90_s


def test_several_routers_know_the_same_caches():
    one = simulate(small_setting(), "prefix", 1, seed=0)
    four = simulate(small_setting(), "prefix", 4, seed=0)
    assert four.follow_up_hits > 0.9 * one.follow_up_hits


def test_a_run_is_a_function_of_its_seed():
    outcomes = [simulate(small_setting(), "prefix", 2, seed=seed) for seed in (3, 3, 4)]
    assert outcomes[0] == outcomes[1] != outcomes[2]


def test_the_table_has_a_row_for_each_policy_and_number_of_routers():
    rows = measure_policies(is_smoke=True)
    table = policy_table(rows)
    assert [row[:2] for row in table.rows] == [
        (ORACLE, 1),
        *((policy, 1) for policy in POLICIES),
        ("prefix", 4),
        ("prefix", 8),
    ]
    assert all(len(row) == len(table.columns) for row in table.rows)
