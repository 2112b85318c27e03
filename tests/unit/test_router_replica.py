"""`Replica.state`: the load of a replica, as routing policies see it."""

import pytest

from baton.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2
from router.replica import Replica
from rpc.channels import open_channel


async def test_the_state_is_the_larger_of_reported_and_reserved_load():
    info = worker_pb2.GetInfoResponse(worker_id="w", num_blocks=10, block_size=4, pool_block_size=4)
    async with open_channel("127.0.0.1:1") as channel:
        replica = Replica("a:1", info, channel, ClusterSecurity())
    replica.load = worker_pb2.WorkerLoad(
        num_running=1, num_waiting=1, num_queued_tokens=30, num_free_blocks=6, num_blocks=10
    )
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


@pytest.mark.parametrize(("pool_block_size", "num_blocks"), [(2, 20), (8, 5), (3, 14)])
async def test_blocks_are_counted_in_units_of_block_keys_for_any_pool_block_size(
    pool_block_size, num_blocks
):
    info = worker_pb2.GetInfoResponse(
        worker_id="w", num_blocks=num_blocks, block_size=4, pool_block_size=pool_block_size
    )
    async with open_channel("127.0.0.1:1") as channel:
        replica = Replica("a:1", info, channel, ClusterSecurity())
    replica.load = worker_pb2.WorkerLoad(num_free_blocks=num_blocks)
    assert (replica.state(0).num_blocks, replica.state(0).num_free_blocks) == (10, 10)
    with replica.reserve(num_blocks=9):
        assert replica.state(0).num_free_blocks == 1
