"""Slots for states: their number, their memory, and how often sequences keep them."""

import pytest
import torch

from engine.config import EngineConfig
from engine.kv_cache.spec import StateSpacing, default_state_interval
from engine.runner import ModelInfo
from engine.runtime.state_pool import (
    StateMemory,
    decide_num_host_slots,
    decide_num_slots,
    num_region_blocks,
    split_pairs,
)
from kvstore.layout import KvLayout, StateLayout, StatePart

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, block_size=8, head_dim=5, dtype="float32")
STATES = StateLayout(2, (StatePart("a", 3, 5, "bfloat16"), StatePart("b", 2, 4, "float32")))


def _decide(num_bytes=10_000, max_blocks=None, states=STATES, **flags) -> int:
    config = EngineConfig(model="m", **{"max_num_seqs": 2, **flags})
    return decide_num_slots(config, states, 100, num_bytes, max_blocks)


def test_slots_are_for_what_runs_and_a_quarter_of_the_memory_and_at_most_half_of_it():
    assert STATES.slot_bytes == 2 * (32 + 32)
    assert _decide(100_000) == 3 * 2 + 100_000 // 4 // 128
    assert _decide(100_000, max_blocks=9) == 3 * 2 + 9, "a state without a block is of no use"
    assert _decide(1_000) == 3, "half of the memory"
    assert _decide(100) == 3
    assert _decide(num_state_slots=1) == 1
    assert _decide(num_gpu_blocks_override=40) == 6 + 4000 // 4 // 128
    assert _decide(kv_cache_memory_bytes=4000) == 6 + 4000 // 4 // 128
    assert _decide(states=None) == 0


def test_host_slots_are_in_the_proportion_of_blocks():
    assert decide_num_host_slots(10, 100, 50) == 5
    assert decide_num_host_slots(10, 100, 1) == 1
    assert decide_num_host_slots(10, 100, 0) == 0


@pytest.mark.parametrize(
    ("layer_slices", "head_slices", "unit_bytes"), [(1, 1, 16), (1, 2, 40), (2, 1, 100), (2, 2, 12)]
)
def test_parts_of_slots_are_apart_and_inside_of_their_blocks(layer_slices, head_slices, unit_bytes):
    parts = (StatePart("a", 6, 5, "bfloat16"), StatePart("b", 2, 4, "float32"))
    states = StateLayout(2, parts).sliced(layer_slices, head_slices, unit_bytes)
    num_blocks = num_region_blocks(states, LAYOUT, 7)
    assert num_blocks == -(-7 * states.slot_bytes // LAYOUT.block_bytes)
    pool = torch.zeros(2 + num_blocks + 1, *LAYOUT.block_shape)
    memory = StateMemory.of(pool[2 : 2 + num_blocks], states, 1)
    assert len(memory.slots) >= 7
    parts = [part for layer in memory.layers for part in layer]
    shapes = [(head_slices, 6 // head_slices, 5), (head_slices, 2 // head_slices, 4)]
    assert [tuple(part.shape[1:]) for part in parts] == shapes * 2
    assert [part.dtype for part in parts] == [torch.bfloat16, torch.float32] * 2
    for number, part in enumerate(parts, 1):
        for slot in range(len(memory.slots)):
            part[slot] = 10 * slot + number
    for number, part in enumerate(parts, 1):
        for slot in range(len(memory.slots)):
            assert (part[slot] == 10 * slot + number).all()
    assert not pool[:2].any()
    assert not pool[-1].any()


def test_pairs_of_slots_are_told_by_their_ids():
    pairs = ((0, 3), (9, 20), (5, 1), (10, 22))
    assert split_pairs(pairs, 9, 20) == (((0, 3), (5, 1)), ((0, 0), (1, 2)))


@pytest.mark.parametrize(
    ("state_bytes", "block_size", "interval"),
    [(81_920, 16, 32), (81_920, 32, 32), (73 * 2**20, 16, 1024), (16, 16, 16), (2**30, 2048, 2048)],
)
def test_a_state_is_kept_where_its_bytes_are_a_quarter_of_those_of_k_and_v(
    state_bytes, block_size, interval
):
    """The first is LFM2-1.2B: 12,288 bytes of K and V per token."""
    layout = KvLayout(6, 8, block_size, 64, "bfloat16")
    states = StateLayout(1, (StatePart("s", 1, state_bytes // 2, "bfloat16"),))
    info = ModelInfo(4096, 9, (), b"", layout, states=states)
    assert default_state_interval(info) == interval
    spacing = StateSpacing.of(interval)
    assert spacing.cached_interval % interval == 0
    assert spacing.cached_interval >= 512
