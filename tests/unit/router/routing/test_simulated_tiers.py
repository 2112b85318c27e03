"""Policies over simulated replicas, in virtual time: shares, homes of sessions, bursts."""

import random
from collections import Counter

import pytest

from router.routing.policies import make_policy
from router.routing.policy import PolicySettings
from tests.support.simulated_tier import BLOCK_SIZE, Job, SimulatedTier, VirtualTime


def keys_of(name, num_blocks):
    return [f"{name}/{index}".encode() for index in range(num_blocks)]


def tier_of(policy, speeds, **options):
    time = VirtualTime()
    settings = PolicySettings(max_affinity_delay_s=options.pop("max_delay_s", 1.0))
    return SimulatedTier(make_policy(policy, settings), time, speeds, **options), time


def send_poisson(tier, time, send, num_jobs, per_second, make_job, seed=1):
    """Sends jobs in an open loop; returns them once all have ended."""
    rng, jobs, moment = random.Random(seed), [], 0.0
    for number in range(num_jobs):
        moment += rng.expovariate(per_second)
        jobs.append(make_job(number))
        time.after(moment, lambda job=jobs[-1]: send(job))
    time.run(moment + 1000)
    return jobs


@pytest.mark.parametrize("policy", ["prefix", "least-load"])
def test_a_prefill_replica_that_is_half_as_fast_gets_half_the_work(policy):
    tier, time = tier_of(policy, [1.0, 0.5, 1.0])
    # 250 prompts of 400 tokens per second are all that the three can compute.
    send_poisson(tier, time, tier.prefill, 3000, 62.5, lambda n: Job(keys_of(n, 25)))
    fast, slow, other = (replica.num_served for replica in tier.replicas)
    assert slow / ((fast + other) / 2) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("policy", ["prefix", "least-load"])
def test_a_decode_replica_that_is_half_as_fast_gets_half_the_work(policy):
    tier, time = tier_of(policy, [1.0, 0.5, 1.0])
    # The three generate 3,200 tokens per second.
    send_poisson(tier, time, tier.decode, 2000, 25.0, lambda n: Job(keys_of(n, 10)))
    fast, slow, other = (replica.num_served for replica in tier.replicas)
    assert slow / ((fast + other) / 2) == pytest.approx(0.5, rel=0.1)


def test_power_of_two_and_consistent_hash_spare_a_slow_replica():
    for policy in ("power-of-two", "consistent-hash"):
        tier, time = tier_of(policy, [1.0, 0.5, 1.0])
        send_poisson(tier, time, tier.decode, 1000, 25.0, lambda n: Job(keys_of(n, 10)))
        fast, slow, other = (replica.num_served for replica in tier.replicas)
        assert slow < 0.8 * min(fast, other), policy


def run_sessions(policy, num_turns=8, num_sessions=24, seconds_between=2.0, **options):
    """Conversations whose prompts grow; returns the tier and its jobs."""
    tier, time = tier_of(policy, [1.0] * 4, **options)
    jobs = []
    for turn in range(num_turns):
        for session in range(num_sessions):
            job = Job(keys_of(session, 20 * (turn + 1)))
            jobs.append((session, job))
            moment = turn * seconds_between + session * seconds_between / num_sessions
            time.after(moment, lambda job=job: tier.prefill(job))
    time.run(1000)
    return tier, jobs


def test_sessions_stay_where_they_are_cached():
    tier, jobs = run_sessions("prefix")
    homes = {session: {job.replica for s, job in jobs if s == session} for session, _ in jobs}
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert len({job.replica for _, job in jobs}) == 4
    num_reused = sum(replica.num_hit_tokens for replica in tier.replicas)
    assert num_reused == sum((len(job.keys) - 20) * BLOCK_SIZE for _, job in jobs)
    others, _ = run_sessions("power-of-two")
    assert sum(replica.num_hit_tokens for replica in others.replicas) < 0.7 * num_reused


def test_a_session_leaves_its_home_when_the_delay_is_too_long():
    for max_delay_s, leaves in ((5.0, False), (0.2, True)):
        tier, time = tier_of("prefix", [1.0, 1.0], max_delay_s=max_delay_s)
        first = Job(keys_of("talk", 600))  # computed in 0.96 s
        tier.prefill(first)
        time.run(1.0)
        # A long prompt keeps the home busy for 1.6 s.
        tier.replicas[first.replica].prefill(Job(keys_of("other", 1000)), lambda: None)
        time.run(1.1)
        second = Job(keys_of("talk", 900))
        tier.prefill(second)
        assert (second.replica != first.replica) == leaves
        time.run(10.0)
        assert (second.started_after_s < 1.5) == leaves


@pytest.mark.parametrize("num_requests", [256, 512])
@pytest.mark.parametrize("policy", ["prefix", "least-load", "round-robin"])
def test_a_burst_of_single_turns_uses_every_decode_replica(policy, num_requests):
    tier, time = tier_of(policy, [1.0] * 5)
    for number in range(num_requests):
        tier.decode(Job(keys_of(number, 10)))
    counts = Counter(choice.replica_id for choice in tier.choices)
    assert len(counts) == 5
    assert max(counts.values()) <= 1.05 * min(counts.values()) + 1
    time.run(1000)
    assert all(replica.load.candidate(1.0).num_requests == 0 for replica in tier.replicas)


@pytest.mark.parametrize("policy", ["power-of-two", "consistent-hash"])
def test_random_policies_use_every_decode_replica(policy):
    tier, _ = tier_of(policy, [1.0] * 5)
    for number in range(256):
        tier.decode(Job(keys_of(number, 10)))
    counts = Counter(choice.replica_id for choice in tier.choices)
    assert min(counts.values()) > 30


def test_a_burst_with_a_common_prefix_spreads_over_prefill_replicas():
    """One replica is warm at first; its queue sends the others elsewhere."""
    tier, _ = tier_of("prefix", [1.0] * 4, max_delay_s=0.2)
    common = keys_of("common", 100)
    for number in range(200):
        tier.prefill(Job([*common, *keys_of(number, 50)]))
    counts = Counter(choice.replica_id for choice in tier.choices)
    assert len(counts) == 4
    assert max(counts.values()) < 1.3 * min(counts.values())
