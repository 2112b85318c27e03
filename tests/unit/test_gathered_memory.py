"""`GatheredMemory`: blocks are copied into a segment before they are sent."""

import math

import pytest
import torch

from kvstore.mover.staging import Segment
from kvstore.peer.leases import BlockRead, LentBlock
from kvstore.peer.lent_memory import GatheredMemory, TailSlots
from tests.support.peer_rig import LAYOUT

NUM_SLOTS = 2


class FakeGather:
    """Fills the slot of block `n` with the byte `n`."""

    def gather(self, object_ids, segment, timeout_s):
        for slot, object_id in enumerate(object_ids):
            segment.payload[slot] = object_id


@pytest.fixture
def memory():
    segment = Segment(LAYOUT, pinned=False, num_slots=NUM_SLOTS)
    return GatheredMemory(FakeGather(), [segment], TailSlots(LAYOUT, 4))


def read_frames(memory, object_ids, tail_slot=None):
    blocks = [LentBlock(b"k", b"header %d" % each, each) for each in object_ids]
    if tail_slot is not None:
        blocks.insert(1, LentBlock(b"k", b"tail", 0, tail_slot))
    return memory.frames(BlockRead(1, None, blocks, math.inf), 0.0)


def block_bytes_of(number):
    return bytes([number]) * LAYOUT.block_bytes


def test_a_reader_that_stops_holds_no_segment(memory):
    stopped = read_frames(memory, [1, 2, 3])
    first = next(stopped)
    assert [bytes(payload) for _, payload in next(read_frames(memory, [4, 5]))] == [
        block_bytes_of(4),
        block_bytes_of(5),
    ]
    assert [bytes(payload) for _, payload in first] == [block_bytes_of(1), block_bytes_of(2)]
    assert next(stopped) == [(b"header 3", block_bytes_of(3))]


def test_tails_are_read_in_their_place_among_blocks(memory):
    memory.tails.segment.payload[3] = torch.full((LAYOUT.block_bytes,), 9, dtype=torch.uint8)
    frames = [frame for some in read_frames(memory, [1, 2], tail_slot=3) for frame in some]
    assert frames == [
        (b"header 1", block_bytes_of(1)),
        (b"tail", block_bytes_of(9)),
        (b"header 2", block_bytes_of(2)),
    ]


def test_tails_alone_need_no_segment(memory):
    memory._num_free.acquire()
    memory.tails.segment.payload[3] = 7
    read = BlockRead(1, None, [LentBlock(b"k", b"tail", 0, 3)], math.inf)
    assert list(memory.frames(read, 0.0)) == [[(b"tail", block_bytes_of(7))]]
