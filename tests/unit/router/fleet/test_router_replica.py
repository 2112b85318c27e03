"""`Replica.state`: the load of a replica, as routing policies see it."""

from contextlib import suppress

import pytest

from baton.common.errors import BatonError, InternalError, InvalidArgumentError, UnavailableError
from baton.common.request.answer import CandidateOutput
from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.structured_outputs import StructuredOutputs
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2
from router.fleet.tier_replicas import PrefillReplica
from router.observe.request_record import RequestRecord
from router.routing.cache_index import CacheIndex
from rpc.channels import open_channel


async def test_the_state_is_the_larger_of_reported_and_reserved_load():
    info = worker_pb2.GetInfoResponse(worker_id="w", num_blocks=10, block_size=4, pool_block_size=4)
    async with open_channel("127.0.0.1:1") as channel:
        replica = PrefillReplica("a:1", info, channel, ClusterSecurity(), CacheIndex())
    report = worker_pb2.WorkerLoad(
        num_running=1, num_waiting=1, num_queued_tokens=30, num_free_blocks=6, num_blocks=10
    )
    replica._load.take(report)
    idle = replica.state(overlap_blocks=2)
    assert (idle.replica_id, idle.num_blocks, idle.overlap_blocks) == ("w", 10, 2)
    assert (idle.num_requests, idle.num_queued_tokens, idle.num_free_blocks) == (2, 30, 6)
    with replica.reserve(num_tokens=20, num_blocks=3), replica.reserve(num_tokens=20):
        few = replica.state(0)
        assert (few.num_requests, few.num_queued_tokens, few.num_free_blocks) == (2, 40, 6)
        with replica.reserve(num_blocks=9):
            many = replica.state(0)
            assert (many.num_requests, many.num_free_blocks) == (3, 0)
    assert replica.state(2) == idle


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
    assert replica.state(0).weight == 0.1
    replica.load.draining = True
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
    assert (replica.state(0).num_blocks, replica.state(0).num_free_blocks) == (10, 10)
    with replica.reserve(num_blocks=9):
        assert replica.state(0).num_free_blocks == 1
