"""`KvCacheManager`: admission, growth, fences, swaps and events."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.block_pool import Allocation
from engine.kv_cache.block_table import NO_BLOCK, BlockTable, TableChange
from engine.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared
from engine.kv_cache.manager import KvCacheManager
from engine.kv_cache.prefix_cache import runs_of
from engine.kv_cache.spec import KvCacheSpec, StateSpacing

KEYS = [bytes([index]) for index in range(32)]
SIZE = 4


def make_manager(num_blocks: int = 16, windows=(None,), *, max_chunk: int = 24, **options):
    spec = KvCacheSpec(SIZE, windows, max_chunk)
    return KvCacheManager(num_blocks, spec, **{"enable_prefix_caching": True, **options})


def admit(kv: KvCacheManager, num_tokens: int, **options) -> BlockTable:
    return kv.admit(num_tokens, kv.match_prefix(KEYS, num_tokens), **options)


def compute(kv: KvCacheManager, num_tokens: int) -> BlockTable:
    """Admits a sequence and registers all its blocks as computed."""
    table = admit(kv, num_tokens)
    kv.register(table, KEYS, num_tokens)
    return table


# Prefix cache.


def test_a_prefix_match_leaves_one_token_to_compute():
    kv = make_manager()
    kv.free(compute(kv, 2 * SIZE))
    assert kv.match_prefix(KEYS, 2 * SIZE).num_blocks == 1
    assert kv.match_prefix(KEYS, 2 * SIZE + 1).num_blocks == 2
    assert kv.match_prefix(KEYS[:1], 2 * SIZE + 1).num_blocks == 1


def test_a_partial_block_is_not_cached():
    kv = make_manager()
    kv.free(compute(kv, 2 * SIZE - 1))
    assert kv.match_prefix(KEYS, 10 * SIZE).num_blocks == 1


def test_blocks_filled_by_decoding_are_cached_too():
    kv = make_manager()
    table = compute(kv, SIZE)
    kv.append(table, SIZE, 2 * SIZE)
    kv.register(table, KEYS, 2 * SIZE)
    kv.free(table)
    assert kv.match_prefix(KEYS, 10 * SIZE).num_blocks == 2


def test_no_block_is_matched_or_counted_without_prefix_caching():
    kv = make_manager(enable_prefix_caching=False)
    kv.free(compute(kv, 9))
    assert kv.match_prefix(KEYS, 9).num_blocks == 0
    assert (kv.num_queries, kv.num_hits) == (0, 0)


def test_admissions_count_queries_and_hits():
    kv = make_manager()
    compute(kv, 9)
    kv.match_prefix(KEYS, 100)
    admit(kv, 10)
    assert (kv.num_queries, kv.num_hits) == (19, 2 * SIZE)


def test_discarded_blocks_are_not_found():
    kv = make_manager()
    table = compute(kv, 9)
    kv.discard(KEYS[1:2])
    assert kv.match_prefix(KEYS, 9).num_blocks == 1
    kv.discard(KEYS)
    assert kv.match_prefix(KEYS, 9).num_blocks == 0
    kv.free(table)
    kv.check()


def test_free_blocks_and_blocks_behind_a_window_are_discarded_too():
    kv = make_manager(32, windows=(None, 6))
    table = compute(kv, 20)
    kv.release_behind(table, 20)
    kv.free(compute(kv, 24))
    kv.discard(KEYS[:6])
    assert [kv.pool.lookup(key, layer_group) for key in KEYS for layer_group in range(2)] == [
        None
    ] * 64
    kv.check()


def test_owners_keep_their_blocks_when_the_prefix_cache_is_reset():
    kv = make_manager()
    table = compute(kv, 9)
    assert kv.reset_prefix_cache() == 2
    assert kv.match_prefix(KEYS, 9).num_blocks == 0
    assert kv.can_append(table, 9, 10)
    kv.free(table)
    kv.check()


def test_tables_from_before_a_reset_are_not_cached_after_it():
    """Their old blocks were computed with the replaced weights, and later ones depend on them."""
    kv = make_manager(num_host_blocks=8)
    running, leaving = compute(kv, 9), compute(kv, 9)
    swapped = kv.swap_out([leaving], 1)
    kv.step_started(1)
    kv.step_reported(1)
    kv.reset_prefix_cache()
    (back,) = kv.swap_in(swapped, 2)
    kv.step_started(2)
    kv.step_reported(2)
    for table in (running, back, kv.fork(running)):
        kv.append(table, 9, 12)
        kv.register(table, KEYS, 12)
    assert [kv.pool.lookup(key) for key in KEYS] == [None] * 32
    kv.free(compute(kv, 9))
    assert kv.match_prefix(KEYS, 9).num_blocks == 2, "sequences computed after the reset are cached"


def test_a_prefix_match_needs_no_blocks_behind_the_window():
    kv = make_manager(32, windows=(6,))
    table = compute(kv, 20)
    kv.append(table, 20, 21)
    kv.release_behind(table, 20)  # the window reaches back to position 15, in block 3
    assert table.blocks[0][:3] == [NO_BLOCK] * 3
    held = set(table.held())
    kv.pool.forget([b for b in range(32) if b not in held])  # evicts the blocks behind the window

    match = kv.match_prefix(KEYS, 21)

    assert match.num_blocks == 5
    assert match.first_live == (3,)
    assert match.blocks == (tuple(table.blocks[0][3:5]),)


def test_the_longest_prefix_that_every_layer_group_has_is_matched():
    kv = make_manager(64, windows=(None, 5, 9))
    table = compute(kv, 6 * SIZE)
    full, narrow, wide = table.blocks
    kv.pool.forget([wide[4]])
    # Without the wide window's block 4, there is no prefix of 5 or 6 blocks.
    assert kv.match_prefix(KEYS, 100).num_blocks == 4
    kv.pool.forget([narrow[3]])
    assert kv.match_prefix(KEYS, 100).num_blocks == 3
    kv.pool.forget([full[1]])
    assert kv.match_prefix(KEYS, 100).num_blocks == 1


def test_a_layer_group_with_a_longer_prefix_is_searched_again_for_the_shorter_one():
    kv = make_manager(64, windows=(9, 5))
    wide, narrow = compute(kv, 6 * SIZE).blocks
    kv.pool.forget([narrow[3]])
    assert kv.match_prefix(KEYS, 100).num_blocks == 6
    kv.pool.forget([wide[4]])
    assert kv.match_prefix(KEYS, 100).num_blocks == 3


# Admission.


def test_only_a_sequence_that_runs_alone_may_use_the_watermark():
    kv = make_manager(4)
    match = kv.match_prefix([], 16)
    assert kv.can_admit(16, match, alone=False) is Allocation.LATER
    assert kv.can_admit(16, match, alone=True) is Allocation.OK
    assert kv.can_admit(17, match, alone=True) is Allocation.NEVER


def test_cached_free_blocks_count_as_free_blocks_to_allocate():
    kv = make_manager(4)
    kv.free(compute(kv, 9))
    other = kv.pool.allocate(1)
    match = kv.match_prefix(KEYS, 13)
    assert match.num_blocks == 2
    assert kv.can_admit(13, match, alone=True) is Allocation.LATER
    kv.pool.release(other)
    assert kv.can_admit(13, match, alone=True) is Allocation.OK
    assert kv.can_admit(13, match, alone=False) is Allocation.LATER


def test_a_layer_group_with_a_window_is_allocated_at_most_max_live_blocks():
    kv = make_manager(windows=(None, 5), max_chunk=4)
    table = admit(kv, 40)
    assert [len(list(filter(lambda b: b >= 0, blocks))) for blocks in table.blocks] == [10, 3]


def test_a_load_is_allocated_the_blocks_that_the_next_token_attends_to():
    kv = make_manager(32, windows=(None, 5), max_chunk=4)
    table = admit(kv, 21, num_loaded=20)
    assert table.first_live == [0, 4]
    assert [len(blocks) for blocks in table.blocks] == [6, 6]
    assert table.blocks[1][:4] == [NO_BLOCK] * 4


def test_a_load_continues_the_cached_prefix():
    kv = make_manager(32, windows=(None, 9), max_chunk=4)
    first = compute(kv, 9)
    table = admit(kv, 17, num_loaded=16)
    assert table.blocks[0][:2] == first.blocks[0][:2]
    assert table.first_live == [0, 2]
    assert table.num_registered == 2
    assert kv.pool.references()[first.blocks[1][1]] == 1, "a block behind the window is not held"


def test_states_that_are_still_loaded_are_not_cached():
    """A request that ends meanwhile leaves its computed blocks to the cache."""
    spec = KvCacheSpec(SIZE, max_chunk=24, states=StateSpacing(SIZE, SIZE))
    kv = KvCacheManager(16, spec, enable_prefix_caching=True, num_slots=3)
    table = admit(kv, 9)
    kv.append(table, 0, 9)
    kv.register(table, KEYS, 9)
    kv.free(table)
    kv.pool.forget([kv.pool.lookup(KEYS[1], 1)])
    assert kv.match_prefix(KEYS, 9).num_blocks == 1, "there are no states at the second one's end"
    match = kv.match_prefix(KEYS, 9, num_loaded=8)
    table = kv.admit(9, match, num_loaded=8)
    kv.register(table, KEYS, match.num_blocks * SIZE)
    kv.free(table)
    assert kv.match_prefix(KEYS, 9).num_blocks == 1


def test_blocks_that_are_computed_again_are_named_again():
    """A sequence goes back to a state, and its old blocks leave the cache meanwhile."""
    spec = KvCacheSpec(SIZE, max_chunk=24, states=StateSpacing(SIZE, SIZE))
    kv = KvCacheManager(16, spec, enable_prefix_caching=True, num_slots=8)
    kv.pool.log_tokens(SIZE)
    log, tokens = kv.pool.token_log, range(17)
    table = admit(kv, len(tokens))
    kv.append(table, 0, len(tokens))
    kv.register(table, KEYS, len(tokens))
    log.record(table, KEYS, tokens, "")
    kv.states.rewind(table, 2 * SIZE)
    kv.discard(KEYS[2:4])
    log.take_events()
    kv.append(table, 2 * SIZE, len(tokens))
    kv.register(table, KEYS, len(tokens))
    log.record(table, KEYS, tokens, "")
    named = {(event.layer_group, key) for event in log.take_events() for key in event.keys}
    assert named == {(layer_group, key) for layer_group in range(2) for key in KEYS[2:4]}


# Growth.


def test_an_append_within_a_block_needs_no_change():
    kv = make_manager()
    table = admit(kv, 5)
    assert kv.num_missing(table, 5, 8) == 0
    assert kv.append(table, 5, 8) == []


def test_new_blocks_are_one_table_change():
    kv = make_manager()
    table = admit(kv, 5)
    (change,) = kv.append(table, 5, 17)
    assert change == TableChange(0, 2, tuple(table.blocks[0][2:]))
    assert len(table.blocks[0]) == 5


@given(st.sets(st.integers(0, 20)).map(sorted))
def test_runs_cover_all_indices_and_are_as_long_as_possible(indices):
    runs = runs_of(indices)
    assert [index for run in runs for index in run] == indices
    assert all(one.stop < other.start for one, other in itertools.pairwise(runs))


def test_an_append_before_the_end_of_the_table_needs_no_block():
    kv = make_manager()
    table = admit(kv, 20)
    assert kv.num_missing(table, 4, 8) == 0
    assert kv.append(table, 4, 8) == []


def test_a_shared_partial_block_is_copied_by_all_but_the_last_writer():
    kv = make_manager()
    table = admit(kv, 6)
    fork = kv.fork(table)
    shared = table.blocks[0][1]

    assert kv.num_missing(fork, 6, 7) == 1
    (change,) = kv.append(fork, 6, 7)
    assert kv.append(table, 6, 7) == [], "the other owner has its own copy"

    assert change == TableChange(0, 1, (fork.blocks[0][1],))
    assert kv.take_copies() == ((shared, fork.blocks[0][1]),)
    assert table.blocks[0] == [fork.blocks[0][0], shared]
    kv.check()


def test_a_shared_block_without_tokens_is_replaced_and_not_copied():
    kv = make_manager()
    table = admit(kv, 9)
    fork = kv.fork(table)
    assert kv.append(fork, 8, 9) == [TableChange(0, 2, (fork.blocks[0][2],))]
    assert fork.blocks[0][2] != table.blocks[0][2]
    assert kv.take_copies() == ()


def test_a_cached_block_is_never_written():
    """The block is forked while its last owner computes, and cached once that owner ends."""
    kv = make_manager()
    table = admit(kv, 4)
    kv.append(table, 0, 4)
    kv.step_started(1)
    fork = kv.fork(table)
    kv.register(table, KEYS, 4)
    kv.step_reported(1)
    cached = table.blocks[0][0]
    kv.free(table)
    assert kv.num_missing(fork, 2, 3) == 1
    kv.append(fork, 2, 3)
    assert kv.take_copies() == ((cached, fork.blocks[0][0]),)
    assert kv.match_prefix(KEYS, 5).blocks == ((cached,),)


def test_a_copy_of_a_copy_reads_the_first_source():
    kv = make_manager()
    table = admit(kv, 6)
    fork = kv.fork(table)
    kv.append(fork, 6, 7)
    second = kv.fork(fork)
    kv.append(second, 6, 7)
    source = table.blocks[0][1]
    assert kv.take_copies() == ((source, fork.blocks[0][1]), (source, second.blocks[0][1]))


def test_a_copy_whose_target_is_freed_is_not_made():
    kv = make_manager(4)
    table = admit(kv, 6)
    fork = kv.fork(table)
    kv.append(fork, 6, 7)
    kv.free(fork)
    kv.free(table)
    assert kv.take_copies() == ()
    assert kv.pool.num_free == 4


def test_a_copy_into_a_block_that_only_an_earlier_step_holds_is_not_made():
    """The block becomes free when that step reports, and another owner may then write to it."""
    kv = make_manager()
    table = admit(kv, 6)
    kv.step_started(1)
    fork = kv.fork(table)
    kv.append(fork, 6, 7)
    kv.free(fork)
    assert kv.take_copies() == ()
    kv.step_started(2)
    kv.step_reported(1)
    assert kv.held_blocks() == []
    kv.check()


def test_the_source_of_a_copy_is_held_until_its_step_reports():
    kv = make_manager()
    table = admit(kv, 6)
    fork = kv.fork(table)
    source = table.blocks[0][1]
    kv.step_started(1)
    kv.append(fork, 6, 7)
    kv.free(table)
    kv.take_copies()
    kv.step_started(2)
    kv.step_reported(1)
    assert kv.held_blocks() == [source]
    assert kv.num_fenced == 1
    kv.step_reported(2)
    assert kv.held_blocks() == []
    assert kv.pool.num_references(source) == 0


def test_an_append_releases_no_blocks():
    """A step in flight may still read blocks that the next step does not."""
    kv = make_manager(32, windows=(None, 4), max_chunk=5)
    table = admit(kv, 12)
    held = list(table.held())
    kv.append(table, 12, 13)
    assert set(table.held()) > set(held)


def test_blocks_behind_every_window_are_released():
    kv = make_manager(32, windows=(None, 4, 9), max_chunk=24)
    table = compute(kv, 20)
    kv.append(table, 20, 21)
    before = [list(blocks) for blocks in table.blocks]
    kv.release_behind(table, 20)  # the windows reach back to positions 17 and 12
    assert table.first_live == [0, 4, 3]
    assert table.blocks[0] == before[0]
    assert table.blocks[1] == [NO_BLOCK] * 4 + before[1][4:]
    assert table.blocks[2] == [NO_BLOCK] * 3 + before[2][3:]
    assert kv.pool.num_free == 32 - 6 - 2 - 3
    assert kv.num_missing(table, 20, 24) == 0
    kv.release_behind(table, 16)
    assert table.first_live == [0, 4, 3], "released blocks are not restored"
    kv.free(table)
    kv.check()


def test_shared_blocks_behind_a_window_are_not_freed():
    kv = make_manager(windows=(4,))
    table = admit(kv, 12)
    fork = kv.fork(table)
    kv.release_behind(table, 12)
    assert kv.pool.num_held(fork.blocks[0]) == 3
    assert fork.first_live == [0]


def test_released_blocks_that_a_step_in_flight_reads_are_fenced():
    kv = make_manager(4, windows=(4,), max_chunk=4)
    table = admit(kv, 8)
    kv.step_started(1)
    kv.release_behind(table, 8)
    assert (kv.pool.num_free, kv.num_fenced) == (2, 1)
    kv.step_reported(1)
    assert (kv.pool.num_free, kv.num_fenced) == (3, 0)


def test_blocks_are_cached_before_they_leave_their_window():
    """With overlapped steps, the next one is built before the one that fills a block reports."""
    kv = make_manager(32, windows=(6,), max_chunk=20)
    table = admit(kv, 20)
    kv.step_started(1)
    kv.append(table, 20, 21)
    kv.step_started(2)
    kv.register(table, KEYS, 20)
    kv.release_behind(table, 20)
    kv.step_reported(1)
    kv.step_reported(2)
    assert all(kv.pool.lookup(key) is not None for key in KEYS[:5])
    assert kv.match_prefix(KEYS[:3], 13).num_blocks == 3, "released blocks can still be matched"


@given(
    block_size=st.integers(1, 4),
    windows=st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3),
    max_chunk=st.integers(1, 7),
    num_open_steps=st.integers(1, 2),
    num_prompt=st.integers(1, 12),
    num_output=st.integers(0, 12),
    num_branches=st.integers(1, 3),
)
def test_branches_that_fit_into_the_pool_alone_can_always_append(
    block_size, windows, max_chunk, num_open_steps, num_prompt, num_output, num_branches
):
    """The blocks that a step in flight reads are not released, so they count too."""
    spec = KvCacheSpec(block_size, tuple(windows), max_chunk * num_open_steps)
    num_tokens = num_prompt + num_output
    num_blocks = spec.blocks_for_branches(num_prompt, num_tokens, num_branches)
    kv = KvCacheManager(num_blocks, spec, enable_prefix_caching=True)
    match = kv.match_prefix([], num_prompt)
    assert kv.can_admit(num_prompt, match, alone=True) is Allocation.OK
    tables = [kv.admit(num_prompt, match)]
    spans = [
        (start, min(start + max_chunk, num_prompt)) for start in range(0, num_prompt, max_chunk)
    ]
    spans += [(position, position + 1) for position in range(num_prompt, num_tokens)]
    for step, span in enumerate(spans, 1):
        num_computed, _ = spans[max(0, step - num_open_steps)]
        if span[0] == num_prompt:
            tables += [kv.fork(tables[0]) for _ in range(num_branches - 1)]
        for table in tables:
            kv.release_behind(table, num_computed)
            assert kv.can_append(table, *span)
            kv.append(table, *span)
        kv.take_copies()
        kv.step_started(step)
        kv.step_reported(step)
        kv.check()


# Fences.


def test_freed_blocks_are_fenced_until_the_newest_step_reports():
    kv = make_manager(4)
    table = admit(kv, 8)
    kv.step_started(1)
    kv.step_started(2)
    kv.free(table)
    assert (kv.pool.num_free, kv.num_fenced) == (2, 2)
    kv.step_reported(1)
    assert kv.pool.num_free == 2
    kv.step_reported(2)
    assert (kv.pool.num_free, kv.num_fenced) == (4, 0)


def test_a_fenced_block_can_be_hit():
    kv = make_manager(4)
    table = compute(kv, 9)
    kv.step_started(1)
    kv.free(table)
    again = admit(kv, 9)
    assert kv.num_fenced == 1
    kv.step_reported(1)
    assert sorted(kv.pool.references()) == sorted(again.held())


def test_fenced_tables_are_evicted_in_the_order_in_which_they_were_freed():
    kv = make_manager(6)
    first, second = compute(kv, 8), admit(kv, 12)
    kv.append(second, 8, 12)
    kv.register(second, KEYS, 12)
    blocks = list(second.held())
    kv.step_started(1)
    kv.free(first)
    kv.free(second)
    kv.step_reported(1)
    kv.pool.allocate(3)  # the blocks that were never cached
    assert kv.pool.allocate(3) == blocks[::-1]


def test_tails_are_evicted_before_heads_in_all_layer_groups():
    kv = make_manager(8, windows=(None, 99))
    table = compute(kv, 16)
    heads = {blocks[0] for blocks in table.blocks}
    tails = {blocks[-1] for blocks in table.blocks}
    kv.free(table)
    assert set(kv.pool.allocate(2)) == tails
    kv.pool.allocate(4)
    assert set(kv.pool.allocate(2)) == heads


# Swapping.


def test_sharing_survives_a_swap():
    kv = make_manager(num_host_blocks=4)
    table = compute(kv, 10)
    fork = kv.fork(table)
    kv.append(fork, 10, 11)
    kv.take_copies()
    old = [*table.held(), *fork.held()]

    swapped = kv.swap_out([table, fork], 1)
    swap_ins, swap_outs = kv.take_swaps()
    assert (swap_ins, kv.num_host_used) == ((), 4)
    assert [block for block, _ in swap_outs] == list(dict.fromkeys(old))
    assert kv.can_swap_in(swapped, alone=True) is Allocation.LATER, "the swap-out has not run yet"
    kv.step_started(1)
    kv.step_reported(1)
    assert kv.pool.num_free == 16

    assert kv.can_swap_in(swapped, num_extra=12, alone=True) is Allocation.OK
    assert kv.can_swap_in(swapped, num_extra=12, alone=False) is Allocation.LATER
    assert kv.can_swap_in(swapped, num_extra=13, alone=True) is Allocation.NEVER
    tables = kv.swap_in(swapped, 2)
    host_of = dict(swap_outs)
    in_of = dict(kv.take_swaps()[0])
    assert [b for t in tables for b in t.held()] == [in_of[host_of[block]] for block in old]
    assert tables[0].blocks[0][:2] == tables[1].blocks[0][:2]
    assert tables[0].num_registered == 0
    assert kv.num_host_used == 0
    for back in tables:
        kv.free(back)
    assert kv.pool.num_free == 16


def test_swapped_blocks_are_held_until_their_step_reports():
    kv = make_manager(4, num_host_blocks=4)
    swapped = kv.swap_out([admit(kv, 8)], 1)
    assert kv.num_fenced == 2
    kv.step_started(1)
    assert kv.pool.num_free == 2
    kv.step_reported(1)
    assert kv.pool.num_free == 4
    kv.drop_swapped(swapped)
    assert kv.num_host_used == 0


def test_a_swap_out_must_fit_into_the_host_pool():
    kv = make_manager(num_host_blocks=2)
    tables = [admit(kv, 8), admit(kv, 4)]
    assert kv.can_swap_out(tables[:1])
    assert not kv.can_swap_out(tables)
    assert kv.can_swap_out([tables[1], kv.fork(tables[1])])


def test_the_target_of_a_pending_copy_is_swapped_out_from_its_source():
    """A step swaps out before it copies."""
    kv = make_manager(num_host_blocks=4)
    table = admit(kv, 6)
    fork = kv.fork(table)
    kv.append(fork, 6, 7)
    source = list(table.blocks[0])
    kv.swap_out([fork], 1)
    kv.free(table)
    _, swap_outs = kv.take_swaps()
    kv.take_copies()
    assert [block for block, _ in swap_outs] == source
    assert kv.pool.num_held(source) == 2, "the source is held until it is swapped out"


def test_the_source_of_a_copy_is_swapped_in_even_if_its_owner_ends():
    kv = make_manager(num_host_blocks=4)
    swapped = kv.swap_out([admit(kv, 3)], 1)
    kv.take_swaps()
    kv.step_started(1)
    (table,) = kv.swap_in(swapped, 2)
    source = table.blocks[0][0]
    fork = kv.fork(table)
    kv.append(fork, 3, 4)
    kv.free(table)
    assert kv.take_swaps()[0] == ((swapped.host_blocks[0], source),)
    assert kv.take_copies() == ((source, fork.blocks[0][0]),)


def test_a_block_freed_before_its_swap_in_is_skipped_while_a_step_is_in_flight():
    kv = make_manager(num_host_blocks=4)
    swapped = kv.swap_out([admit(kv, 3)], 1)
    kv.take_swaps()
    kv.step_started(1)
    (table,) = kv.swap_in(swapped, 2)
    kv.free(table)
    assert kv.take_swaps() == ((), ())


def test_a_block_freed_before_its_swap_in_is_not_copied_in():
    kv = make_manager(num_host_blocks=4)
    swapped = kv.swap_out([admit(kv, 8)], 1)
    kv.take_swaps()
    kv.step_started(1)
    kv.step_reported(1)
    (table,) = kv.swap_in(swapped, 2)
    kv.free(table)
    assert kv.take_swaps() == ((), ())


def test_swapped_in_blocks_are_cached_once_their_step_has_reported():
    kv = make_manager(num_host_blocks=4)
    swapped = kv.swap_out([compute(kv, 8)], 1)
    kv.step_started(1)
    kv.step_reported(1)
    kv.discard(KEYS)
    (table,) = kv.swap_in(swapped, 2)
    kv.register(table, KEYS, 8)
    kv.step_started(2)
    kv.register(table, KEYS, 8)
    assert kv.match_prefix(KEYS, 9).num_blocks == 0
    kv.step_reported(2)
    kv.register(table, KEYS, 8)
    assert kv.match_prefix(KEYS, 9).num_blocks == 2


# Events.


def test_events_report_stored_removed_and_cleared_blocks():
    kv = make_manager(4)
    assert kv.events.start_recording() == ((), (CacheCleared(0),))
    kv.free(compute(kv, 13))
    assert kv.events.take_events() == (BlocksStored(1, tuple(KEYS[:3]), None),)
    table = kv.admit(13, kv.match_prefix(KEYS, 9))
    assert kv.events.take_events() == (BlocksRemoved(2, (KEYS[2],)),)
    kv.register(table, KEYS, 13)
    kv.reset_prefix_cache()
    assert kv.events.take_events() == (BlocksStored(3, (KEYS[2],), KEYS[1]), CacheCleared(4))


def test_events_report_the_blocks_of_every_layer_group():
    kv = make_manager(windows=(None, 5))
    kv.events.start_recording()
    kv.free(compute(kv, 9))
    kv.pool.allocate(16)
    stored, windowed, *removed = kv.events.take_events()
    assert stored == BlocksStored(1, tuple(KEYS[:2]), None)
    assert windowed == BlocksStored(2, tuple(KEYS[:2]), None, 1)
    assert {(event.layer_group, *sorted(event.keys)) for event in removed} == {
        (0, *sorted(KEYS[:2])),
        (1, *sorted(KEYS[:2])),
    }


def test_recording_starts_with_a_snapshot():
    kv = make_manager()
    compute(kv, 9)
    assert kv.events.take_events() == (), "recording has not started"
    assert kv.events.start_recording() == (
        (),
        (CacheCleared(0), BlocksStored(0, tuple(KEYS[:2]), None)),
    )
    assert kv.events.take_events() == ()
    kv.events.stop_recording()
    kv.reset_prefix_cache()
    assert kv.events.take_events() == ()


def test_a_snapshot_has_runs_with_the_blocks_before_them():
    kv = make_manager()
    table = compute(kv, 13)
    kv.discard(KEYS[:1])
    _, snapshot = kv.events.start_recording()
    assert snapshot == (CacheCleared(0), BlocksStored(0, tuple(KEYS[1:3]), KEYS[0]))
    kv.free(table)


def test_a_step_cannot_start_twice():
    kv = make_manager()
    kv.step_started(1)
    with pytest.raises(AssertionError, match="numbered"):
        kv.step_started(1)
