"""`KvCacheManager`: gives sequences their blocks and shares equal prefixes. Pure.

The only place that changes a sequence's block table. Partial blocks are never
shared, so a sequence only ever writes to blocks that it alone holds.
"""

from engine.block_pool import Allocation, BlockPool
from engine.sequence import Sequence

__all__ = ["KvCacheManager"]


class KvCacheManager:
    """Block tables over one pool.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        enable_prefix_caching: whether full blocks are indexed and matched.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        # Blocks kept free at admission, so that running sequences can grow a
        # little before somebody must be preempted.
        self._watermark = max(1, num_blocks // 100)

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's prefix; at least one token is left to compute."""
        if not self._enable_prefix_caching:
            return []
        num_matchable = (len(sequence.token_ids) - 1) // self.block_size
        return self.pool.match(sequence.keys.keys[:num_matchable])

    def can_admit(self, sequence: Sequence, matched: list[int], *, alone: bool) -> Allocation:
        """Whether all of the sequence's tokens get blocks, `matched` ones shared.

        Args:
            sequence: one without blocks.
            matched: from `match_prefix`.
            alone: nothing else runs, so no headroom need be kept.
        """
        num_new = self._num_blocks(sequence) - len(matched)
        num_revived = len(matched) - self.pool.num_held(matched)
        reserved = num_revived + (0 if alone else self._watermark)
        return self.pool.can_allocate(num_new, reserved)

    def admit(self, sequence: Sequence, matched: list[int]) -> None:
        """Gives the sequence blocks for all its tokens. The caller has asked `can_admit`."""
        self.pool.acquire(matched)
        sequence.block_ids = matched + self.pool.allocate(self._num_blocks(sequence) - len(matched))
        sequence.num_computed = len(matched) * self.block_size
        sequence.num_registered = len(matched)

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether the sequence has, or can get, blocks for all its tokens."""
        missing = self._num_blocks(sequence) - len(sequence.block_ids)
        return self.pool.can_allocate(missing) is Allocation.OK

    def grow(self, sequence: Sequence) -> None:
        """Adds the blocks that the sequence's tokens lack. The caller has asked `can_grow`."""
        missing = self._num_blocks(sequence) - len(sequence.block_ids)
        if missing > 0:
            sequence.block_ids += self.pool.allocate(missing)

    def register_computed(self, sequence: Sequence) -> None:
        """Offers the sequence's full, computed blocks to the prefix cache."""
        if not self._enable_prefix_caching:
            return
        keys = sequence.keys.extend(sequence.token_ids)
        for index in range(sequence.num_registered, sequence.num_computed // self.block_size):
            self.pool.register(sequence.block_ids[index], keys[index])
            sequence.num_registered = index + 1

    def discard(self, sequence: Sequence) -> None:
        """Takes the sequence's blocks out of the prefix cache: nobody new shall share them."""
        self.pool.forget(sequence.block_ids)

    def free(self, sequence: Sequence) -> None:
        """Takes all blocks from the sequence; cached ones stay until evicted."""
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = sequence.num_registered = 0

    def _num_blocks(self, sequence: Sequence) -> int:
        """Blocks that the sequence's tokens take."""
        return -(-len(sequence.token_ids) // self.block_size)
