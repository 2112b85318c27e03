"""Policies over simulated replicas, in virtual time: shares, homes of sessions, bursts."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.router.simulation.cluster import SimulatedCluster
from benchmarks.router.simulation.replica import Machine
from benchmarks.router.simulation.requests import SimulatedRequest
from benchmarks.router.simulation.router import SimulatedRouter
from benchmarks.router.simulation.virtual_time import run_in_virtual_time
from router.routing.policies import make_policy
from router.routing.policy import PolicySettings

BLOCK_SIZE = 16
PREFILL = Machine(
    prompt_token_s=1e-4, prompt_s=0.0, kv_bytes_per_token=0, num_blocks=4096, block_size=BLOCK_SIZE
)
# A step of 64 sequences takes 50 ms, as long as 64 steps of one.
DECODE = replace(PREFILL, step_s=0.05 / 64, sequence_s=0.05 / 64, num_seats=64, num_blocks=8192)
QUICK = replace(
    PREFILL, prompt_token_s=1e-9, step_s=1e-6, sequence_s=0.0, num_seats=4096, num_blocks=65536
)
"""The other tier, which nothing waits for."""


class Tiers(SimulatedRouter):
    """A router over its own replicas, which remembers what it has chosen."""

    def __init__(self, policy, prefill, decode, max_delay_s=1.0):
        cluster = SimulatedCluster(prefill, decode)
        settings = PolicySettings(max_affinity_delay_s=max_delay_s)
        # Prefill computes all prompts.
        super().__init__(make_policy(policy, settings), cluster.prefill, cluster.decode, 0)
        self.prefill, self.decode = cluster.prefill, cluster.decode
        self.placed = []
        cluster.start([self])

    def place(self, request, decode_ids=None):
        placed = super().place(request, decode_ids)
        self.placed.append((request, placed))
        return placed

    async def serve_poisson(self, requests, per_second):
        """Sends requests in an open loop, and waits until all have ended."""
        rng = random.Random(1)
        async with asyncio.TaskGroup() as tasks:
            await asyncio.sleep(0.01)  # the first reports
            for request in requests:
                await asyncio.sleep(rng.expovariate(per_second))
                tasks.create_task(self.send(request))

    async def send(self, request):
        request.arrival_s = asyncio.get_running_loop().time()
        await self.serve(request)


def slower(machine):
    """Half as fast."""
    return replace(
        machine,
        prompt_token_s=2 * machine.prompt_token_s,
        step_s=2 * machine.step_s,
        sequence_s=2 * machine.sequence_s,
    )


def request_of(name, num_blocks, common=()):
    keys = [*common, *(f"{name}/{index}".encode() for index in range(num_blocks))]
    return SimulatedRequest(0, 0.0, len(keys) * BLOCK_SIZE + 1, 100, keys)


def shares(policy, tier, num_requests, per_second, num_blocks):
    """The numbers of requests that a fast, a slow and a fast replica of a tier get."""

    async def run():
        fast = PREFILL if tier == "prefill" else DECODE
        machines = [fast, slower(fast), fast]
        both = (machines, [QUICK]) if tier == "prefill" else ([QUICK], machines)
        tiers = Tiers(policy, *both)
        requests = [request_of(number, num_blocks) for number in range(num_requests)]
        await tiers.serve_poisson(requests, per_second)
        return [replica.num_requests for replica in getattr(tiers, tier)]

    return run_in_virtual_time(run())


@pytest.mark.parametrize("policy", ["prefix", "least-load"])
def test_a_prefill_replica_that_is_half_as_fast_gets_half_the_work(policy):
    # The three compute 62.5 prompts of 400 tokens per second.
    fast, slow, other = shares(policy, "prefill", 1200, 62.5, 25)
    assert slow / ((fast + other) / 2) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("policy", ["prefix", "least-load"])
def test_a_decode_replica_that_is_half_as_fast_gets_half_the_work(policy):
    # The three generate 3,200 tokens per second.
    fast, slow, other = shares(policy, "decode", 1500, 25.0, 10)
    assert slow / ((fast + other) / 2) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("policy", ["power-of-two", "consistent-hash"])
def test_power_of_two_and_consistent_hash_spare_a_slow_replica(policy):
    fast, slow, other = shares(policy, "decode", 1000, 25.0, 10)
    assert slow < 0.8 * min(fast, other)


def run_sessions(policy):
    """Conversations whose prompts grow: 24 of 8 turns on four prefill replicas."""

    async def run():
        tiers = Tiers(policy, [PREFILL] * 4, [QUICK])
        async with asyncio.TaskGroup() as tasks:
            for turn in range(8):
                for session in range(24):
                    await asyncio.sleep(2.0 / 24)
                    request = request_of(session, 20 * (turn + 1))
                    tasks.create_task(tiers.send(request))
        return tiers

    return run_in_virtual_time(run())


def num_reused(tiers):
    return sum(replica.kv.num_hits for replica in tiers.prefill)


def test_sessions_stay_where_they_are_cached():
    tiers = run_sessions("prefix")
    homes = {}
    for request, placed in tiers.placed:
        homes.setdefault(request.keys[0], set()).add(placed.prefill.worker_id)
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert len(set.union(*homes.values())) == 4
    reusable = sum((len(request.keys) - 20) * BLOCK_SIZE for request, _ in tiers.placed)
    assert num_reused(tiers) == reusable
    assert num_reused(run_sessions("power-of-two")) < 0.7 * reusable


@pytest.mark.parametrize(("max_delay_s", "leaves"), [(5.0, False), (0.2, True)])
def test_a_session_leaves_its_home_when_the_delay_is_too_long(max_delay_s, leaves):
    async def run():
        tiers = Tiers("prefix", [PREFILL] * 2, [QUICK], max_delay_s)
        await asyncio.sleep(0.01)
        await tiers.send(request_of("talk", 600))  # computed in 0.96 s
        home = tiers.placed[0][1].prefill
        # A long prompt keeps the home busy for 1.6 s.
        other = asyncio.create_task(home.compute(request_of("other", 1000)))
        await asyncio.sleep(0.1)
        request = request_of("talk", 900)
        await tiers.send(request)
        await other
        return tiers.placed[1][1].prefill is not home, request.first_token_s

    has_left, first_token_s = run_in_virtual_time(run())
    assert has_left == leaves
    assert (first_token_s < 1.5) == leaves


def burst(policy, prefill, decode, requests):
    """The replicas that requests get which come at once, and what is on decode at the end."""

    async def run():
        tiers = Tiers(policy, prefill, decode, max_delay_s=0.2)
        await asyncio.sleep(0.01)
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                tasks.create_task(tiers.send(request))
        await asyncio.sleep(1.0)
        left = [tiers.loads[replica.worker_id].candidate(1.0) for replica in tiers.decode]
        assert all(candidate.num_requests == 0 for candidate in left)
        return [placed for _, placed in tiers.placed]

    return run_in_virtual_time(run())


@pytest.mark.parametrize("num_requests", [256, 512])
@pytest.mark.parametrize("policy", ["prefix", "least-load", "round-robin"])
def test_a_burst_of_single_turns_uses_every_decode_replica(policy, num_requests):
    requests = [request_of(number, 10) for number in range(num_requests)]
    placed = burst(policy, [QUICK], [DECODE] * 5, requests)
    counts = Counter(each.decode.worker_id for each in placed)
    assert len(counts) == 5
    assert max(counts.values()) <= 1.05 * min(counts.values()) + 1


@pytest.mark.parametrize("policy", ["power-of-two", "consistent-hash"])
def test_random_policies_use_every_decode_replica(policy):
    requests = [request_of(number, 10) for number in range(256)]
    placed = burst(policy, [QUICK], [DECODE] * 5, requests)
    counts = Counter(each.decode.worker_id for each in placed)
    assert min([counts[f"decode-{number:04}"] for number in range(5)]) > 30


def test_a_burst_with_a_common_prefix_spreads_over_prefill_replicas():
    """One replica is warm at first; its queue sends the others elsewhere."""
    common = request_of("common", 100).keys
    requests = [request_of(number, 50, common) for number in range(200)]
    placed = burst("prefix", [PREFILL] * 4, [QUICK], requests)
    counts = Counter(each.prefill.worker_id for each in placed)
    assert len(counts) == 4
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_prompts_that_one_decode_replica_computes_itself_follow_one_another():
    async def run():
        cluster = SimulatedCluster([QUICK], [DECODE])
        policy = make_policy("prefix", PolicySettings())
        router = SimulatedRouter(policy, cluster.prefill, cluster.decode, 10**6)
        cluster.start([router])
        await asyncio.sleep(0.01)  # the first reports
        requests = [request_of(name, 100) for name in "ab"]
        for request in requests:
            request.arrival_s = asyncio.get_running_loop().time()
        await asyncio.gather(*map(router.serve, requests))
        return [request.first_token_s for request in requests]

    first_s, second_s = run_in_virtual_time(run())
    assert second_s - first_s == pytest.approx(1601 * DECODE.prompt_token_s)
