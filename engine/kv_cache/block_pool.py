"""`BlockPool`: owns every KV block, and every slot for states, of one engine. Pure: no torch.

A block is free or has one or more owners. A free block stays in the prefix
cache until it is allocated again, so freed blocks fill the cache. The free list
is in eviction order: blocks that are not cached come first, then cached ones,
least recently freed first. After PagedAttention (Kwon et al. 2023) and vLLM's
automatic prefix caching.

Slots hold the states of recurrent layers (`engine.kv_cache.spec`). They are blocks of a
second kind: their ids follow those of the blocks, and they have a free list of their own.

All operations are O(1) per block.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from engine.kv_cache.events import CachedRun, KvEventLog
from engine.kv_cache.token_log import TokenLog

__all__ = ["Allocation", "BlockPool"]


class Allocation(Enum):
    """Whether a number of blocks can be allocated.

    Attributes:
        OK: now.
        LATER: once other blocks have been freed.
        NEVER: the pool has fewer blocks in total.
    """

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockPool:
    """Reference counts, hash index and free lists of `num_blocks` blocks and `num_slots` slots.

    Methods that take blocks take slots too, unless they say otherwise.

    Args:
        num_blocks: blocks in the pool.
        num_layer_groups: number of layer groups (`engine.kv_cache.spec`). Their blocks
            are cached under the same keys; each layer group has its own index.
        num_slots: slots in the pool, for the last layer group; 0 without recurrent layers.

    Attributes:
        events: the log of blocks entering and leaving the index.
        token_log: the tokens of the blocks in the index; None unless `log_tokens` was called.
    """

    def __init__(self, num_blocks: int, num_layer_groups: int = 1, num_slots: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.events = KvEventLog(self.cached_runs)
        self.token_log: TokenLog | None = None
        self._ref_counts = [0] * (num_blocks + num_slots)
        self._key_of: list[bytes | None] = [None] * (num_blocks + num_slots)
        self._parent_of: list[bytes | None] = [None] * (num_blocks + num_slots)
        self._layer_group_of = [0] * (num_blocks + num_slots)
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(num_layer_groups)]
        self._free = _FreeList(range(num_blocks))
        self._free_slots = _FreeList(range(num_blocks, num_blocks + num_slots))

    @property
    def num_free(self) -> int:
        """Blocks without an owner, cached ones included."""
        return len(self._free)

    @property
    def num_free_slots(self) -> int:
        """Slots without an owner, cached ones included."""
        return len(self._free_slots)

    @property
    def num_cached(self) -> int:
        """Blocks in the index, of all layer groups; without slots."""
        return sum(len(block_of) for block_of in self._block_of) - self.num_cached_slots

    @property
    def num_cached_slots(self) -> int:
        """Slots in the index."""
        return len(self._block_of[-1]) if self.num_slots else 0

    def is_slot(self, block_id: int) -> bool:
        """Whether an id is that of a slot."""
        return block_id >= self.num_blocks

    def can_allocate(self, num_blocks: int, num_reserved: int = 0) -> Allocation:
        """Whether `num_blocks` can be allocated while `num_reserved` others stay free."""
        if num_blocks > self.num_blocks:
            return Allocation.NEVER
        return Allocation.OK if num_blocks + num_reserved <= self.num_free else Allocation.LATER

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks off the free list and evicts them from the prefix cache.

        The caller has checked `can_allocate`.
        """
        return self._take(self._free.pop_first(num_blocks))

    def allocate_slots(self, num_slots: int) -> list[int]:
        """Takes slots as `allocate` takes blocks. The caller has checked `num_free_slots`."""
        return self._take(self._free_slots.pop_first(num_slots))

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds an owner to each block; takes free ones off the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._list_of(block_id).remove(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Removes an owner from each block of a sequence.

        Blocks without an owner become free. The tail of a sequence is evicted
        before its head, because sequences share prefixes.

        Args:
            block_ids: in sequence order.
        """
        ref_counts = self._ref_counts
        for block_id in reversed(block_ids):
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                self._list_of(block_id).push(block_id, first=self._key_of[block_id] is None)

    def num_references(self, block_id: int) -> int:
        """Returns the number of the block's owners."""
        return self._ref_counts[block_id]

    def num_held(self, block_ids: Iterable[int]) -> int:
        """Returns how many of the blocks have an owner: acquiring these takes no free block."""
        return sum(self._ref_counts[block_id] > 0 for block_id in block_ids)

    def references(self) -> dict[int, int]:
        """Returns the number of owners of each block that has one."""
        return {block_id: count for block_id, count in enumerate(self._ref_counts) if count}

    # Hash index.

    def is_cached(self, block_id: int) -> bool:
        """Whether the block is in the index."""
        return self._key_of[block_id] is not None

    def lookup(self, key: bytes, layer_group: int = 0) -> int | None:
        """Returns the block cached under `key`; None if there is none."""
        return self._block_of[layer_group].get(key)

    def match(self, keys: Iterable[bytes], layer_group: int = 0) -> list[int]:
        """Returns the blocks of the longest cached prefix of `keys`. Changes nothing."""
        block_ids = []
        block_of = self._block_of[layer_group]
        for key in keys:
            block_id = block_of.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def register(
        self, block_id: int, key: bytes, layer_group: int = 0, parent: bytes | None = None
    ) -> bool:
        """Adds a full, computed block that has an owner to the index.

        Args:
            block_id: the block.
            key: its key.
            layer_group: its layer group.
            parent: key of the block before it in its sequence; None for the first.

        Returns:
            False if the block or its key is in the index already; nothing changes then.
        """
        if self._key_of[block_id] is not None or key in self._block_of[layer_group]:
            return False
        self._key_of[block_id] = key
        self._parent_of[block_id] = parent
        self._layer_group_of[block_id] = layer_group
        self._block_of[layer_group][key] = block_id
        return True

    def forget(self, block_ids: Iterable[int]) -> None:
        """Removes blocks from the index, so that no further sequence shares them.

        Without the block of layer group 0 that ends there, no sequence can begin at a state.
        So a free slot with the same key is forgotten, too.
        """
        removed: dict[int, list[bytes]] = {}
        for block_id in block_ids:
            key = self._key_of[block_id]
            if key is not None:
                self._key_of[block_id] = None
                layer_group = self._layer_group_of[block_id]
                del self._block_of[layer_group][key]
                removed.setdefault(layer_group, []).append(key)
                if self._ref_counts[block_id] == 0:  # no longer cached, so evicted first
                    self._move_to_front(block_id)
        for layer_group, keys in removed.items():
            self.events.record_removed(keys, layer_group)
            if self.token_log is not None:
                self.token_log.forget(keys, layer_group)
        if self.num_slots and 0 in removed:
            self._forget_free_slots(removed[0])

    def forget_all(self) -> int:
        """Empties the index; returns how many blocks, without slots, were in it.

        The free ones are allocated next, as after `forget`, and so before blocks that were
        never used: the system has yet to back those with memory.
        """
        num_cached = self.num_cached
        for free in (self._free, self._free_slots):
            for block_id in [block_id for block_id in free if self.is_cached(block_id)]:
                self._move_to_front(block_id)
        self._key_of = [None] * len(self._key_of)
        for block_of in self._block_of:
            block_of.clear()
        self.events.record_cleared()
        if self.token_log is not None:
            self.token_log.clear()
        return num_cached

    def cached_keys(self, layer_group: int = 0) -> tuple[bytes, ...]:
        """Returns every key in a layer group's index."""
        return tuple(self._block_of[layer_group])

    def cached_runs(self) -> Iterator[CachedRun]:
        """Yields all blocks in the index, as runs of consecutive ones."""
        for layer_group, block_of in enumerate(self._block_of):
            run: list[bytes] = []
            parent = None
            for key, block_id in block_of.items():
                before = self._parent_of[block_id]
                if run and before != run[-1]:
                    yield layer_group, tuple(run), parent
                    run = []
                if not run:
                    parent = before
                run.append(key)
            if run:
                yield layer_group, tuple(run), parent

    def log_tokens(self, block_size: int) -> None:
        """Starts `token_log`, while the index is empty.

        Args:
            block_size: tokens per block.
        """
        self.token_log = TokenLog(
            lambda key, layer_group: key in self._block_of[layer_group],
            len(self._block_of),
            block_size,
            max_pending=2 * (self.num_blocks + self.num_slots),
        )

    def check(self) -> None:
        """Verifies the invariants; for tests and an idle engine.

        Raises:
            AssertionError: the pool is corrupt, which is a bug.
        """
        self._check_free(self._free, range(self.num_blocks))
        self._check_free(self._free_slots, range(self.num_blocks, self.num_blocks + self.num_slots))
        self._check_index()

    def _take(self, block_ids: list[int]) -> list[int]:
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        self.forget(block_ids)
        return block_ids

    def _list_of(self, block_id: int) -> "_FreeList":
        return self._free if block_id < self.num_blocks else self._free_slots

    def _move_to_front(self, block_id: int) -> None:
        free = self._list_of(block_id)
        free.remove(block_id)
        free.push(block_id, first=True)

    def _forget_free_slots(self, keys: Iterable[bytes]) -> None:
        slots = [self._block_of[-1].get(key) for key in keys]
        self.forget([slot for slot in slots if slot is not None and not self._ref_counts[slot]])

    def _check_free(self, free_list: "_FreeList", ids: range) -> None:
        free = list(free_list)
        if len(free) != len(set(free)) or len(free) != len(free_list):
            raise AssertionError("the free list repeats a block")
        held = {block_id for block_id in ids if self._ref_counts[block_id] > 0}
        if held | set(free) != set(ids) or held & set(free):
            raise AssertionError("a block is neither held nor free, or both")
        is_cached = [self._key_of[block_id] is not None for block_id in free]
        if is_cached != sorted(is_cached):
            raise AssertionError("the free list has a cached block before one that is not cached")

    def _check_index(self) -> None:
        indexed = {
            block_id: (layer_group, key)
            for layer_group, block_of in enumerate(self._block_of)
            for key, block_id in block_of.items()
        }
        keyed = {
            block_id: (self._layer_group_of[block_id], key)
            for block_id, key in enumerate(self._key_of)
            if key is not None
        }
        if indexed != keyed or len(indexed) != sum(map(len, self._block_of)):
            raise AssertionError("the hash index and the blocks' keys differ")
        state_group = len(self._block_of) - 1 if self.num_slots else None
        if any(self.is_slot(b) != (group == state_group) for b, (group, _) in indexed.items()):
            raise AssertionError("a slot is indexed as a block, or a block as a slot")


class _FreeList:
    """A doubly linked list over block ids, in two arrays: O(1) removal anywhere."""

    def __init__(self, ids: range) -> None:
        # The list is a ring closed by a sentinel at index ids.stop.
        ring = [*ids, ids.stop]
        self._next = [ids.stop] * (ids.stop + 1)
        self._previous = [ids.stop] * (ids.stop + 1)
        for before, after in zip(ring, ring[1:] + ring[:1], strict=True):
            self._next[before], self._previous[after] = after, before
        self._sentinel = ids.stop
        self._length = len(ids)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[self._sentinel]
        while block_id != self._sentinel:
            yield block_id
            block_id = self._next[block_id]

    def pop_first(self, num_blocks: int) -> list[int]:
        assert num_blocks <= self._length, "the caller has checked can_allocate"
        block_ids = []
        block_id = self._next[self._sentinel]
        for _ in range(num_blocks):
            block_ids.append(block_id)
            block_id = self._next[block_id]
        self._next[self._sentinel], self._previous[block_id] = block_id, self._sentinel
        self._length -= num_blocks
        return block_ids

    def push(self, block_id: int, *, first: bool) -> None:
        if first:
            before, after = self._sentinel, self._next[self._sentinel]
        else:
            before, after = self._previous[self._sentinel], self._sentinel
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self._length += 1

    def remove(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self._length -= 1
