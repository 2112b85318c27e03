"""`BlockPool`: who holds which KV block, and which cached block goes first.

Blocks are plain ids. Each has a reference count; a block that nobody holds
stands in the free list, in the order in which it will be taken: blocks
without a key first, then cached ones, the least recently released first. A
cached block in the free list is still indexed: a hit revives it. Paged memory
after Kwon et al. 2023 (PagedAttention), section 4; eviction order as in
vLLM's automatic prefix caching.

Pure: no torch. All operations are O(1) per block.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

__all__ = ["Allocation", "BlockPool"]


class Allocation(Enum):
    """Whether a number of blocks can be had."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockPool:
    """Reference counts, hash index and free list of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = _FreeList(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    def can_allocate(self, num_blocks: int, num_reserved: int = 0) -> Allocation:
        """Whether `num_blocks` can be had while `num_reserved` others stay free."""
        if num_blocks > self.num_blocks:
            return Allocation.NEVER
        return Allocation.OK if num_blocks + num_reserved <= self.num_free else Allocation.LATER

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks off the free list, evicting what is cached in them.

        The caller has asked `can_allocate`.
        """
        block_ids = [self._free.pop_first() for _ in range(num_blocks)]
        self.forget(block_ids)
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `keys`. Changes nothing."""
        block_ids = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_held(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks somebody holds: acquiring these costs no free block."""
        return sum(self._ref_counts[block_id] > 0 for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds an owner to each block; revives those in the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._free.remove(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes an owner from each block of a sequence, in sequence order.

        Blocks nobody holds any longer become free; of one sequence, the tail
        is evicted before the head, since prefixes are shared from the head.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._put_free(block_id)

    def register(self, block_id: int, key: bytes) -> None:
        """Indexes a full, computed block. A key that is indexed already stays where it is."""
        if self._key_of[block_id] is None and key not in self._block_of:
            self._key_of[block_id] = key
            self._block_of[key] = block_id

    def forget(self, block_ids: Iterable[int]) -> None:
        """Takes blocks out of the index: nobody new shall share them."""
        for block_id in block_ids:
            self._forget_key(block_id)

    def references(self) -> dict[int, int]:
        """Reference counts of the blocks that somebody holds."""
        return {block_id: count for block_id, count in enumerate(self._ref_counts) if count}

    def check(self) -> None:
        """Verifies the invariants, for tests and idle moments.

        Raises:
            AssertionError: the pool is corrupt; a bug.
        """
        free = list(self._free)
        if len(free) != len(set(free)) or len(free) != self.num_free:
            raise AssertionError("the free list repeats a block")
        held = {block_id for block_id, count in enumerate(self._ref_counts) if count > 0}
        if held | set(free) != set(range(self.num_blocks)) or held & set(free):
            raise AssertionError("a block is neither held nor free, or both")
        if any(self._key_of[block_id] != key for key, block_id in self._block_of.items()):
            raise AssertionError("the hash index and the blocks' keys differ")

    def _put_free(self, block_id: int) -> None:
        if self._key_of[block_id] is None:
            self._free.push_first(block_id)
        else:
            self._free.push_last(block_id)

    def _forget_key(self, block_id: int) -> None:
        key = self._key_of[block_id]
        if key is not None:
            self._key_of[block_id] = None
            del self._block_of[key]


class _FreeList:
    """A doubly linked list over block ids, in two arrays: O(1) removal anywhere."""

    def __init__(self, num_blocks: int) -> None:
        # The sentinel's index is num_blocks; it closes the ring.
        size = num_blocks + 1
        self._next = [(index + 1) % size for index in range(size)]
        self._previous = [(index - 1) % size for index in range(size)]
        self._sentinel = num_blocks
        self._length = num_blocks

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[self._sentinel]
        while block_id != self._sentinel:
            yield block_id
            block_id = self._next[block_id]

    def pop_first(self) -> int:
        block_id = self._next[self._sentinel]
        self.remove(block_id)
        return block_id

    def push_first(self, block_id: int) -> None:
        self._insert_between(self._sentinel, block_id, self._next[self._sentinel])

    def push_last(self, block_id: int) -> None:
        self._insert_between(self._previous[self._sentinel], block_id, self._sentinel)

    def remove(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self._length -= 1

    def _insert_between(self, before: int, block_id: int, after: int) -> None:
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self._length += 1
