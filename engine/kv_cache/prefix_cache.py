"""`PrefixCache`: finds and offers blocks whose KV other sequences can use. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_table import NO_BLOCK, BlockTable
from engine.kv_cache.fences import StepFence
from engine.kv_cache.spec import KvCacheSpec

__all__ = ["PrefixCache", "PrefixMatch", "runs_of"]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that a sequence can begin with.

    Attributes:
        num_blocks: length of the prefix.
        blocks: per layer group, ids of the blocks from `first_live` up to
            `num_blocks`; those before lie behind the group's window.
        first_live: per layer group.
    """

    num_blocks: int
    blocks: tuple[tuple[int, ...], ...]
    first_live: tuple[int, ...]


class PrefixCache:
    """The pool's hash index, as sequences of layer groups use it.

    Args:
        pool: the blocks.
        spec: layer groups and their windows.
        fence: tells whether what is swapped in is there yet.
    """

    def __init__(self, pool: BlockPool, spec: KvCacheSpec, fence: StepFence) -> None:
        self._pool = pool
        self._spec = spec
        self._fence = fence

    def match(self, keys: Sequence[bytes], limit: int) -> PrefixMatch:
        """The longest prefix of at most `limit` blocks that all groups have what they read of.

        A group that sees everything needs every block; a group with a window
        those that the first token after the prefix sees. O(limit) per group.
        """
        length = limit
        found: dict[int, list[int]] = {}  # by group that sees everything
        windowed = []
        for group, window in enumerate(self._spec.windows):
            if window is None:
                found[group] = self._pool.match(islice(keys, length), group)
                length = len(found[group])
            else:
                windowed.append(group)
        if windowed:
            length = self._windowed_length(keys, length, windowed)
        first_live = tuple(
            self._spec.first_live(group, length * self._spec.block_size)
            for group in range(self._spec.num_groups)
        )
        blocks = tuple(
            tuple(
                found[group][:length]
                if group in found
                else self._pool.match(islice(keys, first, length), group)
            )
            for group, first in enumerate(first_live)
        )
        return PrefixMatch(length, blocks, first_live)

    def register(self, table: BlockTable, keys: Sequence[bytes], end: int) -> None:
        """Offers the table's blocks up to block index `end`, each once."""
        if end <= table.num_registered or self._fence.is_standing(table.filled_by):
            return
        new = [i for i in range(table.num_registered, end) if self._register_at(table, keys[i], i)]
        table.num_registered = end
        for run in runs_of(new):
            parent = keys[run.start - 1] if run.start > 0 else None
            self._pool.events.record_stored(keys[run.start : run.stop], parent)

    def _windowed_length(self, keys: Sequence[bytes], length: int, groups: list[int]) -> int:
        """The longest prefix, `length` at most, whose windows are cached in `groups`.

        Where block i is missing and a prefix of n > i blocks reads it, so does
        every shorter one beyond i: on to i. No block is looked up twice.
        """
        cached_from = dict.fromkeys(groups, length)  # blocks from here up to `length` are cached
        pending = list(groups)
        while pending:
            group = pending[-1]
            index = min(cached_from[group], length)
            first = self._spec.first_live(group, length * self._spec.block_size)
            while index > first and self._pool.lookup(keys[index - 1], group) is not None:
                index -= 1
            cached_from[group] = index
            if index > first:
                length, pending = index - 1, list(groups)
            else:
                pending.pop()
        return length

    def _register_at(self, table: BlockTable, key: bytes, index: int) -> bool:
        """Offers what the table holds at `index`; whether it is new in group 0."""
        is_new = False
        for group, blocks in enumerate(table.blocks):
            if blocks[index] != NO_BLOCK and self._pool.register(blocks[index], key, group):
                is_new |= group == 0
        return is_new


def runs_of(indices: Sequence[int]) -> list[range]:
    """Ascending indices as ranges."""
    runs: list[range] = []
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            runs.append(range(indices[start], indices[end - 1] + 1))
            start = end
    return runs
