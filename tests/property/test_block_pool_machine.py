"""State machine over the block pool, compared with a model of sets."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.kv_cache.block_pool import Allocation, BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Owners hold lists of blocks; keys are small numbers, so they collide."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 1), reserved=st.integers(0, 2))
    def allocate(self, count: int, reserved: int) -> None:
        answer = self.pool.can_allocate(count, reserved)
        free = NUM_BLOCKS - len({block for owner in self.owners for block in owner})
        if count > NUM_BLOCKS:
            assert answer is Allocation.NEVER
        else:
            assert (answer is Allocation.OK) == (count + reserved <= free)
        if answer is Allocation.OK:
            in_order = list(self.pool._free)
            blocks = self.pool.allocate(count)
            assert blocks == in_order[:count], "blocks are not taken in eviction order"
            held = {block for owner in self.owners for block in owner}
            assert len(set(blocks)) == count
            assert held.isdisjoint(blocks)
            self.owners.append(blocks)

    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        if self.owners:
            blocks = self.owners.pop(index % len(self.owners))
            self.pool.release(blocks)
            left = {block for owner in self.owners for block in owner}
            freed = [block for block in blocks if block not in left]
            order = [block for block in self.pool._free if block in freed]
            cached = set(self.pool._block_of[0].values())
            assert [b for b in order if b in cached] == [b for b in freed[::-1] if b in cached]

    @rule()
    def forget_all(self) -> None:
        num_cached = len(self.pool.cached_keys())
        assert self.pool.forget_all() == num_cached
        assert self.pool.cached_keys() == ()

    @rule(index=st.integers(0, 20))
    def forget(self, index: int) -> None:
        if self.owners:
            blocks = self.owners[index % len(self.owners)]
            self.pool.forget(blocks)
            assert not set(blocks) & set(self.pool._block_of[0].values())

    @rule(index=st.integers(0, 20), key=st.integers(0, 3))
    def register(self, index: int, key: int) -> None:
        if self.owners and self.owners[index % len(self.owners)]:
            self.pool.register(self.owners[index % len(self.owners)][0], bytes([key]))

    @rule(keys=st.lists(st.integers(0, 3), max_size=4, unique=True))
    def share(self, keys: list[int]) -> None:
        blocks = self.pool.match([bytes([key]) for key in keys])
        held = {block for owner in self.owners for block in owner}
        assert self.pool.num_held(blocks) == len(held & set(blocks))
        self.pool.acquire(blocks)
        self.owners.append(blocks)

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        held = {block for owner in self.owners for block in owner}
        assert self.pool.num_free == NUM_BLOCKS - len(held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestManyPools(PoolMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
