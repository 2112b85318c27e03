"""State machine over the block pool, compared with a model of sets."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.kv_cache.block_pool import Allocation, BlockPool

NUM_BLOCKS = 6
NUM_SLOTS = 3


class PoolMachine(RuleBasedStateMachine):
    """Owners hold lists of blocks and slots; keys are small numbers, so they collide."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 2, NUM_SLOTS)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 1), reserved=st.integers(0, 2))
    def allocate(self, count: int, reserved: int) -> None:
        answer = self.pool.can_allocate(count, reserved)
        free = NUM_BLOCKS - len(self._held(slots=False))
        if count > NUM_BLOCKS:
            assert answer is Allocation.NEVER
        else:
            assert (answer is Allocation.OK) == (count + reserved <= free)
        if answer is Allocation.OK:
            in_order = list(self.pool._free)
            blocks = self.pool.allocate(count)
            assert blocks == in_order[:count], "blocks are not taken in eviction order"
            assert len(set(blocks)) == count
            assert (self._held(slots=False) | self._held(slots=True)).isdisjoint(blocks)
            self.owners.append(blocks)

    @rule(count=st.integers(0, NUM_SLOTS))
    def allocate_slots(self, count: int) -> None:
        if count <= self.pool.num_free_slots:
            in_order = list(self.pool._free_slots)
            slots = self.pool.allocate_slots(count)
            assert slots == in_order[:count], "slots are not taken in eviction order"
            assert self._held(slots=True).isdisjoint(slots)
            self.owners.append(slots)

    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        if self.owners:
            blocks = self.owners.pop(index % len(self.owners))
            self.pool.release(blocks)
            left = {block for owner in self.owners for block in owner}
            freed = [block for block in blocks if block not in left]
            order = [block for block in self.pool._free if block in freed]
            order += [slot for slot in self.pool._free_slots if slot in freed]
            cached = {block for block_of in self.pool._block_of for block in block_of.values()}
            if not all(map(self.pool.is_slot, blocks)):
                cached = {block for block in cached if not self.pool.is_slot(block)}
            assert [b for b in order if b in cached] == [b for b in freed[::-1] if b in cached]

    @rule()
    def forget_all(self) -> None:
        num_cached = len(self.pool.cached_keys())
        assert self.pool.forget_all() == num_cached
        assert self.pool.cached_keys() == ()
        assert self.pool.num_cached_slots == 0

    @rule(index=st.integers(0, 20))
    def forget(self, index: int) -> None:
        if self.owners:
            blocks = self.owners[index % len(self.owners)]
            keys = [self.pool._key_of[block] for block in blocks if not self.pool.is_slot(block)]
            self.pool.forget(blocks)
            slots = [self.pool.lookup(key, 1) for key in keys if key is not None]
            free = set(self.pool._free_slots)
            assert free.isdisjoint(slots), "a state without its block is cached"
            assert not any(map(self.pool.is_cached, blocks))

    @rule(index=st.integers(0, 20), key=st.integers(0, 3))
    def register(self, index: int, key: int) -> None:
        if self.owners and self.owners[index % len(self.owners)]:
            block = self.owners[index % len(self.owners)][0]
            self.pool.register(block, bytes([key]), int(self.pool.is_slot(block)))

    @rule(keys=st.lists(st.integers(0, 3), max_size=4, unique=True), layer_group=st.integers(0, 1))
    def share(self, keys: list[int], layer_group: int) -> None:
        blocks = self.pool.match([bytes([key]) for key in keys], layer_group)
        assert self.pool.num_held(blocks) == len(
            (self._held(slots=False) | self._held(slots=True)) & set(blocks)
        )
        self.pool.acquire(blocks)
        self.owners.append(blocks)

    def _held(self, *, slots: bool) -> set[int]:
        held = {block for owner in self.owners for block in owner}
        return {block for block in held if self.pool.is_slot(block) == slots}

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        assert self.pool.num_free == NUM_BLOCKS - len(self._held(slots=False))
        assert self.pool.num_free_slots == NUM_SLOTS - len(self._held(slots=True))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
