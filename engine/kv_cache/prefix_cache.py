"""`PrefixCache`: finds cached prefixes and offers computed blocks to others. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_table import NO_BLOCK, BlockTable, runs_of
from engine.kv_cache.fences import StepFence
from engine.kv_cache.spec import KvCacheSpec

__all__ = ["PrefixCache", "PrefixMatch"]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached blocks of a sequence's prefix.

    Attributes:
        num_blocks: length of the prefix, in blocks.
        blocks: per layer group, ids of the blocks from `first_live` up to
            `num_blocks`; earlier ones lie behind the layer group's window. Of the
            states, only the last one.
        first_live: per layer group, index of the first block in `blocks`.
        num_lost_blocks: by how many blocks the prefix would be longer without states.
    """

    num_blocks: int
    blocks: tuple[tuple[int, ...], ...]
    first_live: tuple[int, ...]
    num_lost_blocks: int = 0


class PrefixCache:
    """Matches and registers prefixes in the pool's hash index, over all layer groups.

    Args:
        pool: the blocks.
        spec: layer groups and their windows.
        fence: the steps in flight; blocks that one of them swaps in are not registered yet.
    """

    def __init__(self, pool: BlockPool, spec: KvCacheSpec, fence: StepFence) -> None:
        self._pool = pool
        self._spec = spec
        self._fence = fence

    def match(self, keys: Sequence[bytes], limit: int, *, needs_states: bool = True) -> PrefixMatch:
        """Returns the longest prefix, of at most `limit` blocks, that all layer groups have.

        A layer group without a window needs every block of it; a layer group with a
        window needs those that the first token after the prefix sees, and the layer
        group of states the last one. O(limit) per layer group.

        Args:
            keys: keys of a sequence's full blocks.
            limit: the most blocks.
            needs_states: whether the layer group of states counts.
        """
        length = limit
        found: dict[int, list[int]] = {}  # by layer group without a window
        windowed = []
        for layer_group, window in enumerate(self._spec.windows):
            if window is None:
                found[layer_group] = self._pool.match(islice(keys, length), layer_group)
                length = len(found[layer_group])
            else:
                windowed.append(layer_group)
        if windowed:
            length = self._windowed_length(keys, length, windowed)
        num_with_kv = length
        if self._spec.state_group is not None and needs_states:
            windowed.append(self._spec.state_group)
            length = self._windowed_length(keys, length, windowed)
        first_live = tuple(
            self._spec.first_needed(layer_group, length)
            for layer_group in range(self._spec.num_layer_groups)
        )
        blocks = tuple(
            tuple(
                found[layer_group][:length]
                if layer_group in found
                else self._pool.match(islice(keys, first, length), layer_group)
            )
            for layer_group, first in enumerate(first_live)
        )
        return PrefixMatch(length, blocks, first_live, num_with_kv - length)

    def register(self, table: BlockTable, keys: Sequence[bytes], end: int) -> None:
        """Adds the table's blocks up to block index `end` to the cache, each once."""
        if end <= table.num_registered or self._fence.is_pending(table.filled_by):
            return
        indices = range(table.num_registered, end)
        table.num_registered = end
        for layer_group in range(len(table.blocks)):
            new = [i for i in indices if self._register_at(table, keys, i, layer_group)]
            for run in runs_of(new):
                parent = _parent(keys, run.start)
                self._pool.events.record_stored(keys[run.start : run.stop], parent, layer_group)

    def adopt(
        self, keys: Sequence[bytes], parents: Sequence[bytes | None], block_ids: Sequence[int]
    ) -> None:
        """Adds full blocks of no sequence to layer group 0's cache, each once.

        Args:
            keys: keys of the blocks, in the order of a prompt.
            parents: per block, the key of the block before it; None for a prompt's first.
            block_ids: the blocks.
        """
        run: list[bytes] = []
        parent_of_run: bytes | None = None
        for key, parent, block_id in zip(keys, parents, block_ids, strict=True):
            if not self._pool.register(block_id, key, parent=parent):
                continue
            if not run or parent != run[-1]:
                self._pool.events.record_stored(run, parent_of_run)
                run, parent_of_run = [], parent
            run.append(key)
        self._pool.events.record_stored(run, parent_of_run)

    def _windowed_length(self, keys: Sequence[bytes], length: int, layer_groups: list[int]) -> int:
        """Returns the longest prefix, up to `length`, whose windows `layer_groups` have cached.

        If block i is missing and a prefix of n > i blocks reads it, every shorter prefix
        longer than i reads it too, so the search continues at length i. No block is
        looked up twice.
        """
        cached_from = dict.fromkeys(
            layer_groups, length
        )  # blocks from here up to `length` are cached
        pending = list(layer_groups)
        while pending:
            layer_group = pending[-1]
            index = min(cached_from[layer_group], length)
            first = self._spec.first_needed(layer_group, length)
            while index > first and self._pool.lookup(keys[index - 1], layer_group) is not None:
                index -= 1
            cached_from[layer_group] = index
            if index > first:
                length, pending = index - 1, list(layer_groups)
            else:
                pending.pop()
        return length

    def _register_at(
        self, table: BlockTable, keys: Sequence[bytes], index: int, layer_group: int
    ) -> bool:
        """Registers the table's block of a layer group at `index`; returns whether its key is new.

        The current slot is registered only if the state there is to be kept. It will move on
        otherwise.
        """
        blocks = table.blocks[layer_group]
        if blocks[index] == NO_BLOCK or (
            layer_group == self._spec.state_group
            and index == len(blocks) - 1
            and not self._spec.keeps_state(index, table.num_known)
        ):
            return False
        return self._pool.register(blocks[index], keys[index], layer_group, _parent(keys, index))


def _parent(keys: Sequence[bytes], index: int) -> bytes | None:
    """The key before that at `index`; None at the start."""
    return keys[index - 1] if index else None
