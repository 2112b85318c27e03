"""Transfers between pools of any two layouts: gathered from one, scattered into the other.

The reference works token by token and head by head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.state_pool import StateMemory, num_region_blocks
from kernels.reference.cache import quantize_kv, write_kv
from kvstore.layout import FP8, INT8, NARROW_DTYPES, KvLayout, StateLayout, StatePart
from kvstore.mover import staging
from kvstore.mover.copies import ConvertingCopier, HostCopier
from kvstore.mover.mover import copier_for
from kvstore.mover.pool_objects import ConvertedObjects, view_blocks
from kvstore.mover.staging import Segment
from kvstore.transfer_form import BlockSlicing, PoolShare, RangeError, TransferForm, object_runs

DTYPES = ("float32", "bfloat16", "float16", FP8, INT8)
NUM_POOL_BLOCKS, NUM_SLOTS = 5, 3
LAYERS, HEADS, HEAD_DIM = 4, 4, 8


@pytest.fixture(autouse=True, scope="module")
def small_segments() -> Iterator[None]:
    """Shrinks segments: with tiny blocks, 4 MiB would hold tens of thousands of slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_SEGMENT_BYTES", 2**16)
        yield


@dataclass(frozen=True)
class Pool:
    """One rank's pool."""

    slicing: BlockSlicing
    blocks: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """K and V, or latent vectors, in float32:
        `[num_layers, parts, heads, tokens of the pool, head_dim]`.
        """
        views = view_blocks(self.blocks[:NUM_POOL_BLOCKS], self.slicing.layout)
        states = views.states.float()
        if views.scales is not None:
            states = states * views.scales.unsqueeze(-1)
        return states.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)

    @property
    def states(self) -> list[torch.Tensor]:
        """Per layer and part, the states' bytes, `[num_slots, heads, bytes]`; views of the pool."""
        if self.slicing.slots is None:
            return []
        memory = StateMemory.of(self.blocks[NUM_POOL_BLOCKS:], self.slicing.slots, 1)
        return [part.view(torch.uint8).flatten(1, 2) for layer in memory.layers for part in layer]

    def units_of(self, slot: int) -> list[int]:
        """Numbers of the transfer blocks that a slot is moved as."""
        if self.slicing.slots is None:
            return []
        units = self.slicing.slots.units
        first = NUM_POOL_BLOCKS * self.slicing.transfer_blocks + slot * units
        return list(range(first, first + units))


def make_pool(
    form: TransferForm,
    num_parts: int,
    share: PoolShare,
    dtype: str,
    seed: int = 0,
    *,
    is_latent: bool = False,
) -> Pool:
    """A pool of random numbers, of one vector per token if latent; slots of random bytes."""
    heads, num_kinds = (1, 1) if is_latent else (HEADS // share.degree, 2)
    size = num_parts * form.block_size
    layout = KvLayout(LAYERS, heads, size, HEAD_DIM, dtype, num_kinds)
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_POOL_BLOCKS, LAYERS, num_kinds, heads, size, HEAD_DIM)
    states = torch.randn(shape, generator=generator)
    slicing = BlockSlicing(layout, form, replace(share, num_blocks=NUM_POOL_BLOCKS))
    num_blocks = NUM_POOL_BLOCKS + num_region_blocks(slicing.slots, layout, NUM_SLOTS)
    blocks = torch.zeros(num_blocks, *layout.block_shape, dtype=_torch(layout.pool_dtype))
    views = view_blocks(blocks[:NUM_POOL_BLOCKS], layout)
    if views.scales is None:
        views.states.copy_(states)
    else:
        narrow, scales = quantize_kv(states, views.states.dtype)
        views.states.view(torch.uint8).copy_(narrow.view(torch.uint8))
        views.scales.copy_(scales)
    region = blocks[NUM_POOL_BLOCKS:].view(-1).view(torch.uint8)
    region.copy_(torch.randint(256, region.shape, dtype=torch.uint8, generator=generator))
    return Pool(slicing, blocks)


def _torch(dtype: str) -> torch.dtype:
    return getattr(torch, dtype)


def as_type(tokens: torch.Tensor, dtype: str) -> torch.Tensor:
    """Rounds tokens to a type; returns them in float32."""
    if dtype not in NARROW_DTYPES:
        return tokens.to(_torch(dtype)).float()
    narrow, scales = quantize_kv(tokens, _torch(NARROW_DTYPES[dtype]))
    return narrow.float() * scales.unsqueeze(-1)


def gather(pool: Pool, block_ids: list[int]) -> dict[bytes, bytes]:
    """Returns objects by key, made from the transfer block's index in `block_ids`."""
    ids = pool.slicing.object_ids(block_ids)
    segment = Segment(pool.slicing.object_layout, pinned=False, num_slots=len(ids))
    segment.frames.fill_(0xAA)
    keys = pool.slicing.object_keys([index.to_bytes(2) for index in range(len(block_ids))])
    copy = copier_for(pool.blocks, pool.slicing).gather(ids, segment)
    if copy is not None:
        copy.wait()
    return {key: bytes(segment.payload[i].numpy()) for i, key in enumerate(keys)}


def scatter(pool: Pool, objects: dict[bytes, bytes], block_ids: list[int]) -> None:
    keys = pool.slicing.object_keys([index.to_bytes(2) for index in range(len(block_ids))])
    segment = Segment(pool.slicing.object_layout, pinned=False, num_slots=len(keys))
    for index, key in enumerate(keys):
        segment.payload[index] = torch.frombuffer(bytearray(objects[key]), dtype=torch.uint8)
    copy = copier_for(pool.blocks, pool.slicing).scatter(
        segment, pool.slicing.object_ids(block_ids)
    )
    if copy is not None:
        copy.wait()


state_parts = st.builds(
    StatePart,
    st.just("part"),
    st.sampled_from([4, 12]),
    st.integers(1, 40),
    st.sampled_from(["bfloat16", "float32"]),
)
state_layouts = st.builds(
    StateLayout, st.sampled_from([4, 8]), st.lists(state_parts, min_size=1, max_size=2).map(tuple)
)
forms = st.builds(
    TransferForm,
    st.sampled_from([1, 2, 4]),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.none() | state_layouts,
)


@dataclass(frozen=True)
class Places:
    """Transfer blocks of a tier, and a slot."""

    block_ids: list[int]
    slot: int

    def in_order(self, pool: Pool) -> list[int]:
        """Returns the numbers of the blocks, with those of the slot's units among them."""
        middle = len(self.block_ids) // 2
        units = pool.units_of(self.slot)
        return [*self.block_ids[:middle], *units, *self.block_ids[middle:]]


@st.composite
def two_sides(draw: st.DrawFn) -> tuple[TransferForm, list[list[Pool]], list[Places]]:
    """A form, the ranks of two tiers that agree on it, and places in each tier's pool."""
    form, sides, places = draw(forms), [], []
    is_latent = draw(st.sampled_from([False, False, True]))
    if is_latent:
        form = replace(form, num_head_slices=1, states=None)
    count = draw(st.integers(1, NUM_POOL_BLOCKS))
    for side in range(2):
        degree = draw(st.sampled_from([d for d in (1, 2, 4) if form.num_head_slices % d == 0]))
        num_parts, dtype = draw(st.integers(1, 4)), draw(st.sampled_from(DTYPES))
        sides.append(
            [
                make_pool(
                    form,
                    num_parts,
                    PoolShare(rank, degree),
                    dtype,
                    10 * side + rank,
                    is_latent=is_latent,
                )
                for rank in range(degree)
            ]
        )
        numbers = range(NUM_POOL_BLOCKS * num_parts)
        slot = draw(st.integers(0, NUM_SLOTS - 1))
        places.append(Places(draw(st.permutations(numbers))[:count], slot))
    return form, sides, places


def tokens_at(pools: list[Pool], block_ids: list[int], size: int) -> torch.Tensor:
    """`[num_layers, parts, all heads, transfer blocks, tokens, head_dim]`."""
    tokens = torch.cat([pool.tokens for pool in pools], dim=2)
    return tokens.unflatten(3, (-1, size))[:, :, :, block_ids]


def states_of(pools: list[Pool]) -> list[torch.Tensor]:
    """Per layer and part, the bytes of the states of all heads, `[num_slots, all heads, bytes]`."""
    return [torch.cat(parts, dim=1) for parts in zip(*(p.states for p in pools), strict=True)]


@settings(max_examples=150, deadline=None)
@given(two_sides())
def test_blocks_are_transferred_between_any_two_pools(drawn) -> None:
    form, (sources, targets), (source_places, target_places) = drawn
    source_ids, target_ids = source_places.block_ids, target_places.block_ids
    objects: dict[bytes, bytes] = {}
    for pool in sources:
        before = pool.blocks.clone().view(torch.uint8)
        objects |= gather(pool, source_places.in_order(pool))
        assert torch.equal(pool.blocks.view(torch.uint8), before)
    num_blocks = len(source_places.in_order(sources[0]))
    assert len(objects) == num_blocks * form.num_head_slices * form.num_layer_slices

    num_tokens = NUM_POOL_BLOCKS * targets[0].slicing.layout.block_size
    others = sorted(set(range(num_tokens // form.block_size)) - set(target_ids))
    untouched = tokens_at(targets, others, form.block_size)
    expected_states = states_of(targets)
    for states, sent_states in zip(expected_states, states_of(sources), strict=True):
        states[target_places.slot] = sent_states[source_places.slot]
    for pool in targets:
        scatter(pool, objects, target_places.in_order(pool))

    sent = tokens_at(sources, source_ids, form.block_size)
    source_type, target_type = sources[0].slicing.layout.dtype, targets[0].slicing.layout.dtype
    expected = sent if source_type == form.dtype else as_type(sent, form.dtype)
    if target_type != form.dtype:
        expected = as_type(expected, target_type)
    assert torch.equal(tokens_at(targets, target_ids, form.block_size), expected)
    assert torch.equal(tokens_at(targets, others, form.block_size), untouched)
    assert all(map(torch.equal, states_of(targets), expected_states))


@settings(max_examples=100, deadline=None)
@given(two_sides())
def test_the_byte_runs_of_an_object_equal_its_gathered_bytes(drawn) -> None:
    _, sides, places = drawn
    for pools, side_places in zip(sides, places, strict=True):
        for pool in pools:
            block_ids = side_places.in_order(pool)
            ids = pool.slicing.object_ids(block_ids)
            for number, gathered in zip(ids, gather(pool, block_ids).values(), strict=True):
                found = object_runs(pool.slicing, number)
                if found is None:
                    assert not pool.slicing.holds_state(number)
                    assert pool.slicing.layout.dtype != pool.slicing.form.dtype
                    continue
                block_id, runs = found
                assert len(runs) <= min(end.slicing.max_runs for side in sides for end in side)
                block = bytes(pool.blocks[block_id:].view(-1).view(torch.uint8).numpy())
                assert b"".join(block[start : start + size] for start, size in runs) == gathered
                ends = [start + size for start, size in runs[:-1]]
                assert all(a != b for a, (b, _) in zip(ends, runs[1:], strict=True)), (
                    "runs are not merged"
                )


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_parts=st.integers(1, 3),
    num_slices=st.sampled_from([1, 2, 4]),
    num_tokens=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_only_the_valid_tokens_of_a_partial_tail_are_sent(
    dtype: str, num_parts: int, num_slices: int, num_tokens: int, seed: int
) -> None:
    form = TransferForm(4, dtype, num_slices)
    pool = make_pool(form, num_parts, PoolShare(), "bfloat16", seed)
    segment = Segment(pool.slicing.object_layout, pinned=False)
    ids = pool.slicing.object_ids([2])
    copy = copier_for(pool.blocks, pool.slicing).gather(ids, segment)
    if copy is not None:
        copy.wait()
    for slot in range(len(ids)):
        segment.clear_after(slot, num_tokens)
    other = make_pool(form, num_parts, PoolShare(), "float32", seed + 1)
    copy = copier_for(other.blocks, other.slicing).scatter(segment, ids)
    if copy is not None:
        copy.wait()
    sent, arrived = (tokens_at([each], [2], 4)[:, :, :, 0] for each in (pool, other))
    assert torch.equal(arrived[..., :num_tokens, :], as_type(sent, dtype)[..., :num_tokens, :])
    assert not arrived[..., num_tokens:, :].any()


@pytest.mark.parametrize(
    ("dtype", "narrow"), [("bfloat16", INT8), ("float16", FP8), ("float32", INT8)]
)
def test_blocks_loaded_into_an_8_bit_pool_equal_those_written_by_the_engine(
    dtype: str, narrow: str
) -> None:
    form = TransferForm(4, dtype)
    source = make_pool(form, 1, PoolShare(), dtype)
    target = make_pool(form, 2, PoolShare(), narrow, seed=1)
    expected = target.blocks.clone()
    views = view_blocks(expected, target.slicing.layout)
    states = view_blocks(source.blocks, source.slicing.layout).states
    for layer in range(LAYERS):
        key, value = (states[3, layer, index].transpose(0, 1) for index in (0, 1))
        slots = torch.arange(4 * 7, 4 * 8)
        write_kv((key, value), views.states[:, layer], slots, views.scales[:, layer])

    scatter(target, gather(source, [3]), [7])

    assert torch.equal(target.blocks, expected)


@pytest.mark.parametrize("poison", [0xFF, 0x7F])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathering_a_block_reads_no_neighbouring_block(dtype: str, poison: int) -> None:
    form = TransferForm(4, "float16", 2)
    source = make_pool(form, 3, PoolShare(), dtype)
    clean = gather(source, [4])
    for number in range(NUM_POOL_BLOCKS * 3):
        if number != 4:
            _fill(source, number, poison)
    assert gather(source, [4]) == clean


def _fill(pool: Pool, number: int, byte: int) -> None:
    block, part = divmod(number, pool.slicing.transfer_blocks)
    views = view_blocks(pool.blocks, pool.slicing.layout)
    tokens = slice(part * pool.slicing.form.block_size, (part + 1) * pool.slicing.form.block_size)
    views.states[block, :, :, :, tokens].view(torch.uint8).fill_(byte)
    if views.scales is not None:
        views.scales[block, :, :, :, tokens].view(torch.uint8).fill_(byte)


@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", FP8, INT8])
@pytest.mark.parametrize("number", [65_600.0, -1e6])
def test_a_number_beyond_the_range_of_the_transfer_type_is_refused(
    pool_dtype: str, number: float
) -> None:
    states = StateLayout(4, (StatePart("s", 1, 300, "float32"),))
    form = TransferForm(4, "float16", states=states)
    pool = make_pool(form, 2, PoolShare(), pool_dtype)
    states = torch.full((1, HEAD_DIM), number)
    views = view_blocks(pool.blocks, pool.slicing.layout)
    if views.scales is None:
        views.states[1, 0, 1, 2, 5] = number
    else:
        narrow, scales = quantize_kv(states, views.states.dtype)
        views.states.view(torch.uint8)[1, 0, 1, 2, 5] = narrow.view(torch.uint8)[0]
        views.scales[1, 0, 1, 2, 5] = scales[0]
    for places in ([2, 3], [1, *pool.units_of(1), 2, 3], [2, 3, *pool.units_of(0), 1]):
        with pytest.raises(RangeError):
            gather(pool, places)
    assert len(gather(pool, [*pool.units_of(0), 2])) == len(pool.units_of(0)) + 1


@pytest.mark.parametrize("narrow", NARROW_DTYPES)
def test_non_finite_numbers_stay_non_finite(narrow: str) -> None:
    form = TransferForm(4, "float16")
    pool = make_pool(form, 1, PoolShare(), "bfloat16")
    pool.blocks[1, 0, 0, 0, 0, :2] = torch.tensor([torch.inf, torch.nan])
    other = make_pool(form, 1, PoolShare(), narrow)
    scatter(other, gather(pool, [1]), [2])
    assert not other.tokens[0, 0, 0, 8].isfinite().any()
    assert other.tokens[0, 0, 1, 8].isfinite().all()


def test_only_blocks_that_need_conversion_use_the_converting_copier() -> None:
    layout = KvLayout(LAYERS, HEADS, 4, HEAD_DIM, "bfloat16")
    pool = torch.zeros(2, *layout.block_shape, dtype=torch.bfloat16)
    assert isinstance(copier_for(pool, BlockSlicing.of(layout)), HostCopier)
    slicing = BlockSlicing(layout, TransferForm(2, "bfloat16"))
    assert isinstance(copier_for(pool, slicing), ConvertingCopier)


@pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 6])
def test_heads_of_odd_sizes_are_copied_exactly(head_dim: int) -> None:
    layout = KvLayout(1, 2, 6, head_dim, "bfloat16")
    slicing = BlockSlicing(layout, TransferForm(2, "bfloat16", 2))
    pool = torch.randn(3, *layout.block_shape).to(torch.bfloat16)
    segment = Segment(slicing.object_layout, pinned=False)
    objects = ConvertedObjects(pool, slicing)
    objects.read([9], segment.payload[:1])
    found = segment.payload[0].view(torch.bfloat16).view(slicing.object_layout.block_shape)
    assert torch.equal(found[:, :, 0], pool[1, :, :, 1, 2:4])
    target = torch.zeros_like(pool)
    ConvertedObjects(target, slicing).write(segment.payload[:1], [0])
    assert torch.equal(target[0, :, :, 0, :2], pool[1, :, :, 1, 2:4])
