"""`KvCacheSpec`: block counts of layer groups, compared with counts by brute force."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.kv_cache.spec import KvCacheSpec, group_layers, spec_of
from kvstore.layout import KvShape
from tests.support.fake_model import fake_info

WINDOWS = st.none() | st.integers(1, 9)
SPECS = st.builds(
    KvCacheSpec,
    block_size=st.integers(1, 5),
    windows=st.lists(WINDOWS, min_size=1, max_size=3).map(tuple),
    max_chunk=st.integers(1, 7),
)


def seen_blocks(spec: KvCacheSpec, layer_group: int, start: int, end: int) -> set[int]:
    """Returns the blocks that queries at positions `start` to `end - 1` read or write."""
    window = spec.windows[layer_group]
    positions = {
        key
        for query in range(start, end)
        for key in range(0 if window is None else max(0, query - window + 1), query + 1)
    }
    return {position // spec.block_size for position in positions}


@given(st.lists(st.sampled_from([None, 4, 8]), min_size=1, max_size=12))
def test_layers_are_grouped_by_window(windows: list[int | None]) -> None:
    layer_groups = group_layers(windows)
    kinds = set(windows)
    assert layer_groups.layers_per_block == min(windows.count(kind) for kind in kinds)
    assert len(set(layer_groups.slots)) == len(windows) == len(layer_groups.slots)
    for window, (layer_group, index) in zip(windows, layer_groups.slots, strict=True):
        assert layer_groups.windows[layer_group] == window
        assert 0 <= index < layer_groups.layers_per_block
    for kind in kinds:
        needed = -(-windows.count(kind) // layer_groups.layers_per_block)
        assert layer_groups.windows.count(kind) == needed


def test_layers_with_one_window_are_one_layer_group() -> None:
    layer_groups = group_layers([None] * 4)
    assert layer_groups.windows == (None,)
    assert layer_groups.slots == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_overlapped_steps_keep_the_blocks_of_one_more_chunk() -> None:
    options = {"model": "m", "block_size": 8, "max_num_batched_tokens": 100}
    assert spec_of(EngineConfig(**options), fake_info(8, 99, windows=(None, 9))) == KvCacheSpec(
        8, (None, 9), 100
    )
    config = EngineConfig(**options, async_scheduling=True, long_prefill_token_threshold=30)
    assert spec_of(config, fake_info(8, 99)) == KvCacheSpec(8, (None,), 60)


def test_layer_groups_of_the_gemma_3_pattern() -> None:
    """Gemma 3 repeats five layers with a window and one without."""
    layer_groups = group_layers(([512] * 5 + [None]) * 2)
    assert layer_groups.windows == (512,) * 5 + (None,)
    assert layer_groups.layers_per_block == 2


def test_layers_of_several_shapes_share_blocks_of_one_size() -> None:
    """Gemma 4 26B: five layers with a window and eight heads, one without and two wider heads."""
    sliding, full = KvShape(8, 256), KvShape(2, 512)
    groups = group_layers(([1024] * 5 + [None]) * 5, shapes=([sliding] * 5 + [full]) * 5)
    assert groups.shapes[0] == KvShape(8, 256, num_layers=3)
    assert groups.windows.count(None) == 1
    assert groups.windows.count(1024) == 9


@given(st.data())
def test_blocks_of_all_shapes_have_one_size(data: st.DataObject) -> None:
    shapes = st.builds(KvShape, st.integers(1, 4), st.sampled_from([8, 16, 24]))
    kinds = data.draw(st.lists(st.tuples(st.sampled_from([None, 8]), shapes), min_size=1))
    last = {kind: number for number, kind in enumerate(kinds[: len(kinds) // 2 + 1])}
    sources = [last.get(kind, number) for number, kind in enumerate(kinds)]
    windows = [window for window, _ in kinds]
    groups = group_layers(windows, shapes=[shape for _, shape in kinds], sources=sources)
    assert len({shape.width for shape in groups.shapes}) <= 1
    own = [slot for number, slot in enumerate(groups.slots) if sources[number] == number]
    assert len(set(own)) == len(own)
    for number, ((window, shape), (group, index)) in enumerate(
        zip(kinds, groups.slots, strict=True)
    ):
        assert groups.slots[number] == groups.slots[sources[number]]
        assert groups.windows[group] == window
        if groups.shapes:
            found = groups.shapes[group]
            assert (found.num_kv_heads, found.head_dim) == (shape.num_kv_heads, shape.head_dim)
            assert index < found.num_layers


@given(spec=SPECS, position=st.integers(0, 40))
def test_the_first_live_block_is_the_first_that_is_read(spec: KvCacheSpec, position: int) -> None:
    for layer_group in range(spec.num_layer_groups):
        later = seen_blocks(spec, layer_group, position, position + 10)
        assert spec.first_live(layer_group, position) == min(later)


@given(spec=SPECS, num_tokens=st.integers(1, 40))
def test_max_live_is_the_number_of_blocks_of_the_worst_chunk(
    spec: KvCacheSpec, num_tokens: int
) -> None:
    total = 0
    for layer_group in range(spec.num_layer_groups):
        chunks = [
            (start, min(start + length, num_tokens))
            for start in range(num_tokens)
            for length in range(1, spec.max_chunk + 1)
        ]
        worst = max(len(seen_blocks(spec, layer_group, *chunk)) for chunk in chunks)
        most = spec.max_live(layer_group, num_tokens)
        assert most >= worst
        # The count is exact if the sequence is long enough for the worst offset to occur.
        span = (spec.windows[layer_group] or 0) + spec.max_chunk + spec.block_size
        if spec.windows[layer_group] is None or num_tokens >= span:
            assert most == worst
        total += most
    assert spec.blocks_for(num_tokens) == total


@given(
    block_size=st.integers(1, 4),
    window=st.integers(1, 9),
    max_chunk=st.integers(1, 5),
    is_async=st.booleans(),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    num_decoded=st.integers(0, 12),
)
def test_max_live_suffices_while_a_step_is_in_flight(
    block_size: int,
    window: int,
    max_chunk: int,
    is_async: bool,
    chunks: list[int],
    num_decoded: int,
) -> None:
    config = EngineConfig(
        model="m",
        block_size=block_size,
        max_num_batched_tokens=max_chunk,
        async_scheduling=is_async,
    )
    spec = spec_of(config, replace(fake_info(block_size, 99), windows=(window,)))
    lengths = [min(length, max_chunk) for length in chunks] + [1] * num_decoded
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        num_computed = starts[max(0, index - 1)] if is_async else start
        live = seen_blocks(spec, 0, num_computed, start + length)
        assert len(live) <= spec.max_live(0, sum(lengths))


@given(spec=SPECS, num_blocks=st.integers(0, 40), limit=st.integers(0, 60))
def test_max_tokens_is_the_longest_sequence_that_fits(
    spec: KvCacheSpec, num_blocks: int, limit: int
) -> None:
    fits = [n for n in range(limit + 1) if spec.blocks_for(n) <= num_blocks]
    assert spec.max_tokens(num_blocks, limit) == max(fits)


@given(
    spec=SPECS, num_shared=st.integers(0, 12), num_more=st.integers(0, 12), num=st.integers(1, 4)
)
def test_branches_use_at_most_blocks_for_branches(
    spec: KvCacheSpec, num_shared: int, num_more: int, num: int
) -> None:
    """Each branch has its own blocks from the first token that it does not share."""
    num_tokens = num_shared + num_more
    bound = spec.blocks_for_branches(num_shared, num_tokens, num)
    num_common = num_shared // spec.block_size
    for start in range(num_shared, num_tokens):
        blocks = set()
        for layer_group in range(spec.num_layer_groups):
            for index in seen_blocks(spec, layer_group, start, start + 1):
                owners = [0] if index < num_common else range(num)
                blocks |= {(layer_group, index, owner) for owner in owners}
        assert len(blocks) <= bound
