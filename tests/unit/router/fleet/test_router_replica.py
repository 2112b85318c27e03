"""The load of a replica, as routing policies see it, and its breaker."""

import math
from contextlib import suppress

import pytest

from baton.common.errors import BatonError, InternalError, InvalidArgumentError, UnavailableError
from baton.common.request.answer import CandidateOutput
from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.structured_outputs import StructuredOutputs
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2
from router.fleet.replica_load import ReplicaLoad, ReplicaLoads
from router.fleet.tier_replicas import PrefillReplica
from router.observe.request_record import RequestRecord
from router.routing.cache_index import CacheIndex
from router.routing.candidate import Candidate
from rpc.channels import open_channel

INFO = worker_pb2.GetInfoResponse(
    worker_id="w",
    num_blocks=10,
    block_size=4,
    pool_block_size=4,
    max_num_seqs=8,
    max_num_requests=5,
    kv_bytes_per_token=1000,
)
REPORT = worker_pb2.WorkerLoad(
    num_running=1,
    num_waiting=1,
    num_queued_tokens=30,
    num_free_blocks=6,
    num_blocks=10,
    prompt_token_s=0.01,
    queued_prompt_s=0.3,
    decode_step_s=0.2,
    load_bytes_per_s=10_000,
    kv_store_ids=["s"],
)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_candidate_is_what_the_worker_reports():
    load = ReplicaLoad(INFO, "a:1", Clock())
    load.take(REPORT)
    assert load.candidate(0.5) == Candidate(
        replica_id="w",
        address="a:1",
        num_requests=2,
        num_seats=8,
        num_queued_tokens=30,
        queue_s=0.3,
        num_free_blocks=6,
        num_blocks=10,
        prompt_token_s=0.01,
        decode_step_s=0.2,
        load_token_s=0.1,
        store_ids=("s",),
        weight=0.5,
    )
    assert load.candidate(0.5) is load.candidate(0.5)
    assert load.candidate(1.0).weight == 1.0


def test_a_candidate_that_has_measured_nothing_is_no_division_by_zero():
    load = ReplicaLoad(worker_pb2.GetInfoResponse(block_size=4, pool_block_size=4))
    candidate = load.candidate(1.0)
    assert (candidate.num_seats, candidate.load_token_s, candidate.used_share) == (1, 0.0, 0.0)
    assert not candidate.has_speeds


def test_own_requests_are_added_to_a_report_that_cannot_include_them():
    clock = Clock()
    load = ReplicaLoad(INFO, clock=clock)
    load.take(REPORT)
    before = load.candidate(1.0)
    with load.reserve(20, 3), load.reserve(20, 0):
        both = load.candidate(1.0)
        assert (both.num_requests, both.num_queued_tokens, both.num_free_blocks) == (4, 70, 3)
        assert both.queue_s == pytest.approx(0.7)
        assert load.has_room
        with load.reserve(0, 9):
            assert not load.has_room
            assert load.candidate(1.0).num_free_blocks == 0
    assert load.candidate(1.0) == before


def test_a_report_includes_what_had_arrived_before_it_was_made():
    clock = Clock()
    load = ReplicaLoad(INFO, clock=clock)
    busy = worker_pb2.WorkerLoad()
    busy.CopyFrom(REPORT)
    with load.reserve(20, 0), load.reserve(7, 0, is_sent=False):
        clock.now += 5.0
        busy.age_s = 4.95  # a step of five seconds has just ended, and the request came during it
        load.take(busy)
        assert load.candidate(1.0).num_queued_tokens == 57
        busy.age_s = 0.0
        load.take(busy)
        assert load.candidate(1.0).num_queued_tokens == 37  # the other one is not sent yet
    assert load.candidate(1.0).num_queued_tokens == 30


def test_own_requests_count_even_if_reports_never_include_them():
    clock = Clock()
    load = ReplicaLoad(INFO, clock=clock)
    with load.reserve(0, 4), load.reserve(0, 4):
        clock.now += 1.0
        idle = worker_pb2.WorkerLoad(num_free_blocks=10, num_blocks=10)
        load.take(idle)
        assert (load.candidate(1.0).num_requests, load.candidate(1.0).num_free_blocks) == (2, 2)


def test_a_request_ends_at_its_deadline_at_the_latest():
    clock = Clock()
    load = ReplicaLoad(INFO, clock=clock)
    with load.reserve(20, 3, deadline=107.0), load.reserve(5, 0):
        clock.now = 106.9
        assert load.candidate(1.0).num_queued_tokens == 25
        clock.now = 107.0
        assert load.candidate(1.0).num_queued_tokens == 5
    assert load.candidate(1.0).num_requests == 0


def test_the_hit_rate_fades_and_stays_while_nothing_is_looked_up():
    clock = Clock()
    load = ReplicaLoad(INFO, clock=clock)
    assert load.hit_rate == 0.0

    def look_up(hits, queries):
        load.take(worker_pb2.WorkerLoad(prefix_cache_hits=hits, prefix_cache_queries=queries))
        return load.hit_rate

    assert look_up(80, 100) == pytest.approx(0.8)
    clock.now += 3600
    assert look_up(80, 100) == pytest.approx(0.8)
    assert look_up(90, 200) == pytest.approx(0.1)
    assert look_up(190, 300) == pytest.approx(0.55)


def test_the_work_of_late_is_what_was_computed_since_the_first_report():
    clock = Clock()
    old, new = (ReplicaLoad(INFO, clock=clock) for _ in range(2))
    counts = {old: 10**9, new: 0}  # the old one has computed for weeks

    def report(load, growth=0):
        counts[load] += growth
        load.take(worker_pb2.WorkerLoad(prefix_cache_queries=counts[load]))

    def order():
        return [load.candidate(1.0).recent_work for load in (old, new)]

    report(old)
    report(new)
    assert order() == [-math.inf, -math.inf]
    report(old, 100)
    report(new, 200)
    assert order()[0] < order()[1]
    before = order()
    new.take(worker_pb2.WorkerLoad(prefix_cache_queries=100))  # a late report of its other stream
    report(new)
    assert order() == before


async def test_a_replica_that_refuses_a_grammar_has_room_for_requests_without_one():
    async with open_channel("127.0.0.1:1") as channel:
        info = worker_pb2.GetInfoResponse(worker_id="w", block_size=4, pool_block_size=4)
        replica = PrefillReplica("a:1", info, channel, ClusterSecurity(), CacheIndex())
    guided = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    plain_spec, guided_spec = (
        RequestSpec(request_id="r", prompt_token_ids=(1,), params=params)
        for params in (SamplingParams(), guided)
    )
    replica.note_full(guided_spec)
    assert replica.has_room_for(plain_spec)
    assert not replica.has_room_for(guided_spec)
    replica.note_full(plain_spec)
    assert not replica.has_room_for(plain_spec)


async def test_failed_calls_eject_a_replica_until_a_probe_succeeds():
    info = worker_pb2.GetInfoResponse(
        role=worker_pb2.WORKER_ROLE_PREFILL, num_blocks=10, block_size=4, pool_block_size=4
    )
    async with open_channel("127.0.0.1:1") as channel:
        replica = PrefillReplica("a:1", info, channel, ClusterSecurity(), CacheIndex())
    now = replica._breaker._clock() + 60
    replica._breaker._clock = lambda: now
    record = RequestRecord()

    def call(error=None, *, has_output=False):
        with suppress(BatonError, GeneratorExit), replica.attempt(record) as own:
            if has_output:
                own.take(CandidateOutput())
            if error is not None:
                raise error

    for error in (UnavailableError("stops"), InternalError("fails"), InvalidArgumentError("bad")):
        call(error)
    call(GeneratorExit())
    assert not replica.is_ejected
    call(UnavailableError("stops"))
    assert replica.is_ejected
    now += 1
    assert not replica.is_ejected
    with replica.reserve():
        assert replica.is_ejected  # to all but the probe
        call(GeneratorExit(), has_output=True)  # its client left with all it needed
    assert not replica.is_ejected
    assert replica.candidate().weight == 0.1
    replica._load.take(worker_pb2.WorkerLoad(draining=True))
    replica._note_change()
    for _ in range(5):
        call(UnavailableError("drains"))
    assert not replica.is_ejected
    assert [attempt.tier for attempt in record.attempts] == ["prefill"] * 11


@pytest.mark.parametrize(("pool_block_size", "num_blocks"), [(2, 20), (8, 5), (3, 14)])
async def test_blocks_are_counted_in_units_of_block_keys_for_any_pool_block_size(
    pool_block_size, num_blocks
):
    info = worker_pb2.GetInfoResponse(
        worker_id="w", num_blocks=num_blocks, block_size=4, pool_block_size=pool_block_size
    )
    async with open_channel("127.0.0.1:1") as channel:
        replica = PrefillReplica("a:1", info, channel, ClusterSecurity(), CacheIndex())
    replica._load.take(worker_pb2.WorkerLoad(num_free_blocks=num_blocks))
    candidate = replica.candidate()
    assert (candidate.num_blocks, candidate.num_free_blocks) == (10, 10)
    with replica.reserve(num_blocks=9):
        assert replica.candidate().num_free_blocks == 1


async def test_a_worker_of_both_roles_leaves_both_tiers_at_its_first_report():
    both = worker_pb2.GetInfoResponse(
        worker_id="w", role=worker_pb2.WORKER_ROLE_BOTH, block_size=4, pool_block_size=4
    )
    loads = ReplicaLoads()
    async with open_channel("127.0.0.1:1") as channel:
        first, second = (
            PrefillReplica("a:1", both, channel, ClusterSecurity(), CacheIndex(), loads)
            for _ in range(2)
        )
    first._load.take(worker_pb2.WorkerLoad(draining=True))  # comes on the stream of the first
    assert first.is_leaving
    assert second.is_leaving
