"""The simulation of policies: virtual time, requests of a trace, replicas, routers."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.errors import InternalError
from benchmarks.router.policies import measure_policies, policy_table
from benchmarks.router.simulation.decode import SimulatedDecode
from benchmarks.router.simulation.prefill import SimulatedPrefill
from benchmarks.router.simulation.replica import Machine
from benchmarks.router.simulation.requests import (
    BLOCK_TOKENS,
    SimulatedRequest,
    make_requests,
    synthetic_trace,
)
from benchmarks.router.simulation.run import ORACLE, Setting, simulate
from benchmarks.router.simulation.virtual_time import run_in_virtual_time
from benchmarks.router.workers import measure_workers, workers_table
from benchmarks.workloads.trace import TraceLine
from router.routing.policies import POLICIES

MACHINE = Machine(prompt_token_s=1e-3, prompt_s=0.0, step_s=0.1, sequence_s=0.0, num_blocks=64)


def test_an_hour_of_waits_takes_no_time_and_keeps_its_order():
    async def wait():
        loop, calls = asyncio.get_running_loop(), []
        loop.call_later(3600.0, calls.append, "last")
        loop.call_later(1.0, calls.append, "first")
        await asyncio.sleep(1800.0)
        calls.append(loop.time())
        await asyncio.sleep(1800.1)
        return calls

    assert run_in_virtual_time(wait()) == ["first", 1800.0, "last"]


def test_a_wait_that_nothing_would_end_is_an_error():
    with pytest.raises(InternalError, match="no timer"):
        run_in_virtual_time(asyncio.Event().wait())


def test_an_error_of_a_callback_ends_the_run():
    async def wait():
        asyncio.get_running_loop().call_later(1.0, int, "none")
        await asyncio.sleep(2.0)

    with pytest.raises(ValueError, match="none"):
        run_in_virtual_time(wait())


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


def start(replica_class, told):
    """A replica in the running loop."""
    replica = replica_class("r", MACHINE, told.take_events, told.take_report)
    replica.start()
    return replica


def test_a_prefill_replica_computes_in_order_and_only_what_it_has_not_cached():
    told, done = Told(), []
    requests = [request_of(n, keys) for n, keys in enumerate(([1, 2], [1, 2, 3], [7]))]

    async def compute(replica, request):
        await replica.compute(request)
        done.append((request.number, asyncio.get_running_loop().time()))

    async def run():
        replica = start(SimulatedPrefill, told)
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                tasks.create_task(compute(replica, request))
            await asyncio.sleep(0.001)
            assert replica.coming_blocks(request_of(9, [1, 2, 3, 4])) == 3
            assert replica.cached_tokens(requests[1]) == 0  # nothing is computed yet
            assert replica.queue_s == pytest.approx(1.024 + 1.537 + 0.513)
        await asyncio.sleep(1.0)
        return replica

    replica = run_in_virtual_time(run())
    computed = [1025, 513, 513]
    assert done == [(n, pytest.approx(sum(computed[: n + 1]) / 1000)) for n in range(3)]
    assert [request.cached_tokens for request in requests] == [0, 1024, 0]
    assert replica.busy_s == pytest.approx(2.051)
    assert told.num_stored == 4
    assert told.loads[0].num_free_blocks == told.loads[-1].num_free_blocks == 64
    assert [told.loads[0].num_cached_blocks, told.loads[-1].num_cached_blocks] == [0, 4]
    waits = [load.queued_prompt_s for load in told.loads]
    # Reports come every 50 ms, and do not know of coming hits.
    assert max(waits) == pytest.approx(1.025 + 1.537 + 0.513, abs=0.06)
    assert waits[-1] == 0.0
    replica.kv.check()


async def generate(replica, requests, locals_=()):
    """Runs requests to their end; returns when each began and ended."""
    clock, began, ended = asyncio.get_running_loop().time, {}, {}

    async def run_one(request):
        begin = lambda: began.setdefault(request.number, clock())  # noqa: E731
        await replica.generate(request, begin, is_local=request.number in locals_)
        ended[request.number] = clock()

    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            tasks.create_task(run_one(request))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert replica.num_open == len(requests)
    return began, ended


def test_a_decode_replica_generates_side_by_side_and_waits_for_blocks():
    requests = [request_of(0, range(40)), request_of(1, [50]), request_of(2, range(60, 100))]

    async def run():
        replica = start(SimulatedDecode, Told())
        _, ended = await generate(replica, requests)
        return replica, ended

    replica, ended = run_in_virtual_time(run())
    # Two run at once, for ten steps; the third has no blocks before the first ends.
    load_s = 40 * BLOCK_TOKENS * MACHINE.kv_bytes_per_token / MACHINE.load_bytes_per_s
    assert ended[0] == pytest.approx(load_s + 1.0, abs=0.01)
    assert ended[1] < ended[0] < ended[2]
    assert [request.num_generated for request in requests] == [10, 10, 10]
    assert replica.num_open == 0
    assert replica.kv.pool.num_free == 64
    replica.kv.check()


def test_a_prompt_that_decode_computes_delays_the_others():
    async def run():
        requests = request_of(0, [], 1), request_of(1, [], 500)
        return await generate(start(SimulatedDecode, Told()), requests, locals_=(1,))

    began, ended = run_in_virtual_time(run())
    assert began[1] == pytest.approx(0.5)
    assert ended[0] == pytest.approx(1.5, abs=0.01)  # ten steps, and half a second between them
    assert ended[1] == pytest.approx(1.5, abs=0.01)


REQUESTS = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),  # arrival
        st.one_of(st.none(), st.floats(0.0, 6.0)),  # when its client leaves
        st.integers(1, 60),  # blocks
        st.booleans(),  # whether decode computes the prompt
    ),
    max_size=12,
)


@given(requests=REQUESTS, is_prefill=st.booleans())
@settings(max_examples=60, deadline=None)
def test_requests_that_leave_at_any_moment_leave_nothing_behind(requests, is_prefill):
    async def serve(replica, number, arrival_s, timeout_s, num_blocks, is_local):
        await asyncio.sleep(arrival_s)
        request = request_of(number, range(num_blocks))
        try:
            async with asyncio.timeout(timeout_s):
                if is_prefill:
                    await replica.compute(request)
                else:
                    await replica.generate(request, lambda: None, is_local=is_local)
                assert request.num_generated == (0 if is_prefill else 10)
        except TimeoutError:
            assert timeout_s is not None
            assert 0 <= request.num_generated <= 10

    async def run():
        told = Told()
        replica = start(SimulatedPrefill if is_prefill else SimulatedDecode, told)
        async with asyncio.TaskGroup() as tasks:
            for number, request in enumerate(requests):
                tasks.create_task(serve(replica, number, *request))
        await asyncio.sleep(1.0)
        return replica, told.loads[-1]

    replica, load = run_in_virtual_time(run())
    assert load.num_running == load.num_waiting == load.num_queued_tokens == 0
    assert load.queued_prompt_s == 0.0
    assert replica.kv.pool.num_free == load.num_free_blocks == 64
    assert replica.busy_s >= 0
    replica.kv.check()


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
        *(("prefix", number) for number in (1, 4, 8)),
        *((policy, 1) for policy in POLICIES if policy != "prefix"),
        (ORACLE, 1),
    ]
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_choices_among_many_workers_are_timed_on_a_trace():
    rows = measure_workers(is_smoke=True)
    assert all(0 < row.look_up_p50_ms <= row.decision_p50_ms for row in rows)
    assert all(row.num_blocks and row.num_requests == 30 for row in rows)
    assert all(len(row) == len(workers_table(rows).columns) for row in workers_table(rows).rows)
