"""`BlockPool`: eviction order, sharing, and the index of keys."""

from engine.kv_cache.block_pool import Allocation, BlockPool


def test_blocks_without_a_key_are_allocated_before_cached_ones() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.register(blocks[0], b"a")
    pool.register(blocks[1], b"b")
    pool.release(blocks)

    taken = pool.allocate(2)

    assert set(taken).isdisjoint(blocks[:2])
    assert pool.match([b"a", b"b"]) == blocks[:2]


def test_a_sequences_tail_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register(block, key)
    pool.release(blocks)

    assert pool.allocate(1) == [blocks[2]]
    assert pool.match([b"a", b"b", b"c"]) == blocks[:2]


def test_acquiring_a_cached_free_block_keeps_it_from_allocation() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.register(blocks[0], b"a")
    pool.release(blocks)

    pool.acquire(pool.match([b"a"]))

    assert pool.num_free == 1
    assert pool.can_allocate(2) is Allocation.LATER
    assert pool.can_allocate(3) is Allocation.NEVER
    assert pool.allocate(1) != blocks
    pool.check()


def test_a_second_block_with_a_registered_key_does_not_replace_the_first() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.register(second, b"a")

    assert pool.match([b"a"]) == [first]
    pool.check()


def test_each_layer_group_has_its_own_index() -> None:
    pool = BlockPool(4, num_layer_groups=2)
    first, second = pool.allocate(2)
    assert pool.register(first, b"a", 0)
    assert pool.register(second, b"a", 1)
    assert not pool.register(second, b"b", 0)

    assert pool.match([b"a", b"b"], 0) == [first]
    assert pool.match([b"a", b"b"], 1) == [second]
    assert pool.cached_keys() == (b"a",)
    pool.release([first, second])
    pool.allocate(4)
    assert pool.lookup(b"a", 0) is pool.lookup(b"a", 1) is None
    pool.check()


def test_forget_all_empties_the_index_and_keeps_owned_blocks() -> None:
    pool = BlockPool(3)
    held, freed = pool.allocate(2)
    pool.register(held, b"a")
    pool.register(freed, b"b")
    pool.release([freed])

    assert pool.forget_all() == 2

    assert pool.match([b"a"]) == pool.match([b"b"]) == []
    assert pool.references() == {held: 1}
    assert pool.allocate(1) == [freed], (
        "a forgotten block is allocated before one that was never used"
    )
    pool.check()
