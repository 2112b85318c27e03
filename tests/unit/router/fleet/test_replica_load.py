"""`ReplicaLoad`: which requests a replica would start soon."""

from contextlib import ExitStack

import pytest

from baton.v1 import worker_pb2
from router.fleet.replica_load import ReplicaLoad


def decode_load(*, running: int = 0, waiting: int = 0, free: int = 100) -> ReplicaLoad:
    """A replica with 16 seats and 100 blocks, and its report."""
    info = worker_pb2.GetInfoResponse(
        num_blocks=100, block_size=16, pool_block_size=16, max_num_seqs=16, max_num_requests=4096
    )
    load = ReplicaLoad(info)
    load.take(worker_pb2.WorkerLoad(num_running=running, num_waiting=waiting, num_free_blocks=free))
    return load


def test_an_idle_replica_gets_as_many_requests_as_it_has_seats():
    load = decode_load()
    with ExitStack() as ends:
        for _ in range(16):
            assert load.may_start(1)
            ends.enter_context(load.reserve(0, 1))
        assert not load.may_start(1)
        assert load.has_room
    assert load.may_start(1)


def test_a_replica_gets_blocks_for_each_request_before_its_prompt_is_computed():
    load = decode_load()
    with load.reserve(0, 60), load.reserve(0, 30):
        assert load.may_start(10)
        assert not load.may_start(11)


@pytest.mark.parametrize(
    ("running", "waiting", "free", "may_start"),
    [
        (16, 0, 50, True),
        (16, 7, 50, True),
        (16, 8, 50, False),  # half of what runs is there in advance
        (8, 3, 0, True),
        (8, 4, 0, False),
        (0, 1, 0, True),
        (0, 2, 0, False),
        (0, 15, 100, True),
    ],
)
def test_without_seats_or_blocks_few_requests_are_sent_in_advance(
    running, waiting, free, may_start
):
    assert decode_load(running=running, waiting=waiting, free=free).may_start(1) is may_start


def test_a_prefill_replica_gets_prompts_while_it_might_lack_some():
    load = ReplicaLoad(worker_pb2.GetInfoResponse(block_size=16))
    with load.reserve(100_000, 0):
        assert load.may_queue_prompt
        with load.reserve(10, 0):
            assert not load.may_queue_prompt
    load.take(worker_pb2.WorkerLoad(num_queued_tokens=8191))
    assert load.may_queue_prompt
