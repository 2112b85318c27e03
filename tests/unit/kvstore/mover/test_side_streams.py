"""`SideStreamCopier` with fake streams, whose work runs at once.

`tests/gpu/test_side_streams.py` uses real streams.
"""

from typing import ClassVar

import pytest
import torch

from kvstore.layout import StateLayout, StatePart
from kvstore.mover.side_streams import SideStreamCopier
from kvstore.mover.staging import Segment
from kvstore.transfer_form import BlockSlicing, PoolShare, TransferForm
from tests.support.connector_rig import LAYOUT

SLICING = BlockSlicing.of(LAYOUT)


class FakeStream:
    """Counts its uses as the current stream and waits for it; `every` lists all streams."""

    every: ClassVar[list["FakeStream"]] = []

    def __init__(self, device: torch.device) -> None:
        self.num_waits = 0
        self.num_entered = 0
        self.error: RuntimeError | None = None
        FakeStream.every.append(self)

    def __enter__(self) -> None:
        self.num_entered += 1

    def __exit__(self, *error: object) -> None:
        pass

    def synchronize(self) -> None:
        self.num_waits += 1
        if self.error is not None:
            raise self.error


class FakeEvent:
    def __init__(self, blocking: bool) -> None:
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded


@pytest.fixture
def streams(monkeypatch) -> list[FakeStream]:
    monkeypatch.setattr(FakeStream, "every", [])
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return FakeStream.every


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randn(16, *LAYOUT.block_shape)


def test_gathered_and_scattered_blocks_are_unchanged(streams: list[FakeStream], pool) -> None:
    before = pool.clone()
    copier, segment = SideStreamCopier(pool, SLICING), Segment(LAYOUT, pinned=False)
    assert torch.equal(pool, before), "warming up must not change the pool"

    copier.gather([7, 0, 12], segment).wait()
    copier.scatter(segment, [3, 4, 5]).wait()
    assert torch.equal(pool[3:6], before[[7, 0, 12]])
    rest = [0, 1, 2, *range(6, 16)]
    assert torch.equal(pool[rest], before[rest])


def test_slots_are_gathered_as_they_are_between_converted_blocks(
    streams: list[FakeStream], pool
) -> None:
    states = StateLayout(2, (StatePart("s", 3, 70, "float32"),))
    form = TransferForm(2, "float16", states=states)
    slicing = BlockSlicing(LAYOUT, form, PoolShare(num_blocks=10))
    assert slicing.slots is not None
    assert slicing.slots.units == 8
    slots = pool[10:].view(-1).view(torch.uint8)
    slots.copy_(torch.randint(256, slots.shape, dtype=torch.uint8))
    before = pool.clone()
    copier = SideStreamCopier(pool, slicing)
    assert torch.equal(pool[10:].view(torch.uint8), before[10:].view(torch.uint8))

    segment = Segment(slicing.object_layout, pinned=False)
    second_slot = range(20 + 8, 20 + 16)
    copier.gather([7, *second_slot, 12], segment).wait()
    copier.scatter(segment, [2, *range(20, 28), 3]).wait()
    slot_bytes = slicing.slots.slot_bytes
    assert torch.equal(slots[:slot_bytes], slots[slot_bytes : 2 * slot_bytes])
    assert torch.equal(pool[1, ..., :2, :], before[3, ..., 2:, :].half().float())
    assert torch.equal(pool[1, ..., 2:, :], before[6, ..., :2, :].half().float())


def test_each_direction_has_its_stream(streams: list[FakeStream], pool) -> None:
    copier, segment = SideStreamCopier(pool, SLICING), Segment(LAYOUT, pinned=False)
    out, into = (stream.num_entered for stream in streams)
    copier.gather([1], segment)
    copier.gather([2], segment)
    copier.scatter(segment, [3])

    assert [stream.num_entered for stream in streams] == [out + 2, into + 1]


def test_a_slot_that_is_not_gathered_keeps_its_bytes(streams: list[FakeStream], pool) -> None:
    copier, segment = SideStreamCopier(pool, SLICING), Segment(LAYOUT, pinned=False)
    segment.frames.fill_(7)
    copier.gather([5, 6], segment).wait()

    assert torch.equal(segment.payload[:2], pool[5:7].view(2, -1).view(torch.uint8))
    assert segment.slots[1].payload.tobytes() == pool[6].numpy().tobytes()
    assert segment.frames[2:].eq(7).all()


def test_a_copy_that_fails_to_start_is_waited_for(streams: list[FakeStream], pool) -> None:
    copier, segment = SideStreamCopier(pool, SLICING), Segment(LAYOUT, pinned=False)
    with pytest.raises(RuntimeError):
        copier.gather(range(segment.num_slots + 1), segment)

    assert [stream.num_waits for stream in streams] == [1, 0]


def test_close_waits_for_both_streams_even_if_the_device_is_lost(
    streams: list[FakeStream], pool
) -> None:
    copier = SideStreamCopier(pool, SLICING)
    streams[0].error = RuntimeError("the device is lost")
    copier.close()

    assert [stream.num_waits for stream in streams] == [1, 1]
