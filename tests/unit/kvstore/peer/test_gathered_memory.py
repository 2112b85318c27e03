"""`GatheredMemory`: blocks are copied into a segment before they are sent."""

import math
import resource
from pathlib import Path

import pytest
import torch

from kvstore.layout import KvLayout
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


@pytest.mark.parametrize(
    ("block_bytes", "objects_per_tail", "num_objects", "expected"),
    [
        (2 << 20, 1, 10_000, 256),
        (1 << 20, 8, 10_000, 512),  # 64 tails of 8 MiB
        (64 << 20, 1, 10_000, 16),
        (1 << 10, 1, 10_000, 1024),
        (1 << 10, 1, 100, 100),
    ],
)
def test_there_are_slots_for_some_hundred_tails(
    block_bytes, objects_per_tail, num_objects, expected
):
    layout = KvLayout(1, 1, 1, block_bytes // 8, "float32")
    assert layout.block_bytes == block_bytes
    tails = TailSlots(layout, num_objects, objects_per_tail)
    assert tails.segment.num_slots == expected


def test_slots_take_memory_only_when_they_are_used():
    before = _resident_bytes()
    tails = TailSlots(KvLayout(1, 1, 1, 1 << 18, "float32"), 256)
    assert tails.segment.frames.nbytes > 512 << 20
    assert _resident_bytes() - before < 64 << 20


def _resident_bytes():
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * resource.getpagesize()


def test_the_slot_that_became_free_last_is_used_next():
    tails = TailSlots(LAYOUT, 4)
    first, second = tails.take(), tails.take()
    tails.give_back([first])
    assert tails.take() == first
    assert second != first


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
