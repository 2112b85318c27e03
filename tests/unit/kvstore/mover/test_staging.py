"""Staging segments: size, cleared tails, verification, for every data type of KV."""

from itertools import permutations

import pytest
import torch

from kvstore.codec import seal, verify
from kvstore.layout import KvLayout, KvShape
from kvstore.mover.pool_objects import view_blocks
from kvstore.mover.staging import StagingBuffers, slots_per_segment
from kvstore.store import KvObject

_LAYOUTS = [
    KvLayout(num_layers=2, num_kv_heads=3, block_size=4, head_dim=5, dtype=dtype)
    for dtype in ("float32", "bfloat16", "fp8_e4m3")
]


def _segment(layout):
    """Returns a segment in which every payload repeats the bytes 1, 2, ... 255."""
    segment = StagingBuffers(layout, torch.device("cpu")).take()
    count = torch.arange(layout.block_bytes) % 255 + 1
    for slot in segment.slots:
        slot.payload[:] = bytes(count.tolist())
    return segment


def _views(layout, slot):
    payload = torch.frombuffer(slot.payload, dtype=torch.uint8)
    block = payload.view(getattr(torch, layout.pool_dtype)).view(layout.block_shape)
    views = view_blocks(block, layout)
    parts = [views.states.view(torch.uint8)]
    if views.scales is not None:
        parts.append(views.scales.unsqueeze(-1).view(torch.uint8))
    return parts  # each [num_layers, 2, num_kv_heads, block_size, bytes]


def test_a_segment_holds_two_objects_of_half_its_size():
    layout = KvLayout(num_layers=32, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
    assert layout.block_bytes == 2 << 20
    assert slots_per_segment(layout) == 2


def test_a_segment_of_tiny_objects_has_a_bounded_number_of_slots():
    assert slots_per_segment(_LAYOUTS[0]) == 256


@pytest.mark.parametrize("layout", _LAYOUTS, ids=lambda layout: layout.dtype)
def test_memory_behind_a_tail_is_cleared(layout):
    segment, untouched = _segment(layout), _segment(layout)
    segment.clear_after(1, 3)
    parts = zip(_views(layout, segment.slots[1]), _views(layout, untouched.slots[1]), strict=True)
    for part, before in parts:
        assert torch.equal(part[..., :3, :], before[..., :3, :])
        assert not part[..., 3:, :].any()
    assert segment.slots[1].header == untouched.slots[1].header
    assert segment.slots[0] == untouched.slots[0]
    assert segment.slots[2] == untouched.slots[2]


def test_memory_behind_a_tail_is_that_of_its_layer_group():
    shapes = (KvShape(3, 6, num_layers=2), KvShape(1, 9, num_layers=4))
    layout = KvLayout(2, 3, 4, 6, "float32", group_shapes=shapes)
    segment, untouched = _segment(layout), _segment(layout)
    segment.clear_after(0, 1, layer_group=1)
    shape = layout.of_group(1).block_shape
    payloads = (each.slots[0].payload for each in (segment, untouched))
    kept, before = (torch.frombuffer(payload, dtype=torch.int32) for payload in payloads)
    assert torch.equal(kept.view(shape)[..., :1, :], before.view(shape)[..., :1, :])
    assert not kept.view(shape)[..., 1:, :].any()


@pytest.mark.parametrize(("ours", "theirs"), list(permutations(_LAYOUTS, 2)))
def test_a_block_of_another_data_type_fails_verification(ours, theirs):
    """Namespaces keep such a block from being found; verification is the second safeguard."""
    written = _segment(theirs).slots[0]
    seal([written], [b"key"])
    assert verify([written], [b"key"])
    read = bytes(written.payload)[: ours.block_bytes].ljust(ours.block_bytes, b"\0")
    assert not verify([KvObject(written.header, memoryview(read))], [b"key"])


@pytest.mark.parametrize("layout", _LAYOUTS, ids=lambda layout: layout.dtype)
def test_a_changed_last_byte_fails_verification(layout):
    """The last byte of 8-bit KV is part of a scale."""
    slot = _segment(layout).slots[0]
    seal([slot], [b"key"])
    slot.payload[-1] ^= 1
    assert not verify([slot], [b"key"])
