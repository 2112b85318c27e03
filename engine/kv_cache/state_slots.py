"""`StateSlots`: the slots that hold a sequence's states. Pure.

The state of a recurrent layer sums up all tokens before a position, and a token that was
applied to it cannot be taken back. So a sequence keeps the states at some ends of blocks:
others may begin there, and the sequence itself may go back there.

Kernels need no more than the block table. For the tokens `start` to `end - 1` of a step, they
read the state in the slot of the token before `start`. They store the state after the last
token of each block to the slot of that block, if the table has one there, and the state after
token `end - 1` to the current slot. So an end inside of a step is kept without a cut.

A slot that others own, or that is in the prefix cache, is never written to: the sequence copies
it first, or goes on in a new one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.block_table import NO_BLOCK, BlockTable, TableChange
from engine.kv_cache.fences import FencedPool
from engine.kv_cache.prefix_cache import PrefixMatch
from engine.kv_cache.spec import KvCacheSpec

__all__ = ["StateCounts", "StateSlots"]


@dataclass(slots=True)
class StateCounts:
    """Numbers of states since the start.

    Attributes:
        num_kept: states that sequences have kept at ends of blocks.
        num_skipped: those that they could not keep, as no slot was free.
        num_hits: sequences that began at a state of the prefix cache.
        num_lost_tokens: tokens of new sequences whose K and V were in the prefix cache, but that
            are computed again, as no state was at their end.
    """

    num_kept: int = 0
    num_skipped: int = 0
    num_hits: int = 0
    num_lost_tokens: int = 0


class StateSlots:
    """Extends, trims and rewinds the slots of block tables, over one pool.

    Args:
        spec: says at which ends states are kept. It has a layer group of states.
        blocks: the pool.

    Attributes:
        num_reserved: slots that stay free when a sequence keeps one more: as many as sequences
            may run at once. So each of them can get a current slot of its own.
        counts: of what was kept and found.
    """

    def __init__(self, spec: KvCacheSpec, blocks: FencedPool) -> None:
        assert spec.states is not None, "the model has recurrent layers"
        assert spec.state_group is not None
        self.num_reserved = 0
        self.counts = StateCounts()
        self._spec = spec
        self._interval = spec.states.interval // spec.block_size  # in blocks
        self._layer_group: int = spec.state_group
        self._blocks = blocks
        self._pool = blocks.pool

    def can_admit(self, match: PrefixMatch, num_loaded: int, *, alone: bool) -> bool:
        """Whether a new sequence gets a current slot; for the arguments see `admit`.

        A free slot that it has matched is enough if nothing else runs (`alone`): if it gets no
        other one, it goes on in that.
        """
        matched = () if num_loaded else match.blocks[self._layer_group]
        num_revived = len(matched) - self._pool.num_held(matched)
        is_enough = alone and num_revived == 1
        return num_revived + (not is_enough) <= self._pool.num_free_slots

    def admit(self, table: BlockTable, match: PrefixMatch, num_loaded: int) -> None:
        """Adds the layer group of states to the table of a new sequence.

        Its one entry is the slot of the matched prefix; without one, a new slot.

        Args:
            table: has the sequence's blocks.
            match: the matched prefix.
            num_loaded: number of tokens after which states are loaded, into a new slot; 0 if none
                are.
        """
        num_applied = num_loaded or match.num_blocks * self._spec.block_size
        first = max(0, num_applied - 1) // self._spec.block_size
        slots = () if num_loaded else match.blocks[self._layer_group]
        self._pool.acquire(slots)
        self.counts.num_hits += len(slots)
        self.counts.num_lost_tokens += match.num_lost_blocks * self._spec.block_size
        table.blocks.append([NO_BLOCK] * first + list(slots or self._pool.allocate_slots(1)))
        table.first_live.append(first)
        table.num_applied = num_applied

    def num_missing(self, table: BlockTable) -> int:
        """Returns the number of slots, 0 or 1, without which the table cannot be extended."""
        return int(self._blocks.num_owners(table.blocks[self._layer_group][-1]) > 1)

    def extend(self, table: BlockTable, start: int, end: int) -> list[TableChange]:
        """Makes the slots writable for a step that applies the tokens `start` to `end - 1`.

        The current slot moves on to the block of the last token. If the state at its place is
        kept, it stays there, and a new slot becomes the current one.

        Raises:
            AssertionError: the state is not that of the token before `start`. Going on would
                apply a token twice, or leave one out.
        """
        if start != table.num_applied:
            raise AssertionError(
                f"the state has {table.num_applied} tokens; a step wants to apply that at {start}"
            )
        table.num_applied = end
        blocks, size = table.blocks[self._layer_group], self._spec.block_size
        index, last = len(blocks) - 1, (end - 1) // size
        slot, is_full = blocks[index], len(blocks) * size <= start
        is_shared = self._blocks.num_owners(slot) > 1
        kept = self._kept(table, range(index, last), is_full, int(is_shared))
        stays = index in kept
        entries: list[int] = []
        if is_shared and not (stays and is_full):
            slot = self._replace(slot, copies=index * size < start)
            blocks[index] = slot
            entries.append(slot)
        elif not stays and self._pool.is_cached(slot):
            self._pool.forget([slot])
        if last > index:
            blocks += [
                self._pool.allocate_slots(1)[0] if i in kept else NO_BLOCK
                for i in range(index + 1, last)
            ]
            if not stays:
                # The runner's table still has it at `index`: it is what the step reads.
                blocks[index] = NO_BLOCK
            blocks.append(self._pool.allocate_slots(1)[0] if stays else slot)
            entries += blocks[index + 1 :]
        if not entries:
            return []
        first = len(blocks) - len(entries)
        return [TableChange(self._layer_group, first, self.numbers(entries))]

    def release(self, table: BlockTable, indices: range) -> None:
        """Releases the entries at the indices. Those that are of use to other sequences stay in the
        prefix cache.
        """
        blocks = table.blocks[self._layer_group]
        for index in indices:
            slot = blocks[index]
            if slot == NO_BLOCK:
                continue
            is_useful = self._spec.caches_state(index, table.num_known)
            if not is_useful and self._blocks.num_owners(slot) == 1:
                self._pool.forget([slot])
            blocks[index] = NO_BLOCK
            self._blocks.release([slot])

    def kept_end(self, table: BlockTable, position: int) -> int:
        """Returns the last position, up to `position`, to which the table can go back: the end of
        a block with a state, whose windows are still held. 0 if it must begin again.

        Args:
            table: the sequence's table.
            position: up to which steps that are committed have computed the sequence.
        """
        size, blocks = self._spec.block_size, table.blocks[self._layer_group]
        for index in range(min(position // size, len(blocks)) - 1, -1, -1):
            if blocks[index] != NO_BLOCK:
                end = (index + 1) * size
                is_held = all(
                    table.first_live[group] <= self._spec.first_live(group, end)
                    for group in range(len(self._spec.windows))
                )
                return end if is_held else 0
        return 0

    def slot_after(self, table: BlockTable, num_tokens: int) -> int:
        """Returns the slot with the state after the first `num_tokens` tokens.

        Args:
            table: a sequence's table.
            num_tokens: result of `kept_end`, or that of all tokens that steps have applied.
        """
        slot = table.blocks[self._layer_group][(num_tokens - 1) // self._spec.block_size]
        is_kept = num_tokens % self._spec.block_size == 0
        assert slot != NO_BLOCK
        assert is_kept or num_tokens == table.num_applied, "a step may store to it"
        return slot

    def slot_to_save(
        self, table: BlockTable, index: int, key: bytes, num_chosen: int
    ) -> int | None:
        """Returns the slot with the state at the end of a block, if it can be saved: no step stores
        to it as long as others own it.

        A slot that has left the table may still be cached. The current slot is saved only if
        another one is free, in which the sequence goes on meanwhile. Slots that running sequences
        may need stay free.

        Args:
            table: a sequence's table.
            index: of a block that steps which are committed have filled.
            key: the block's key.
            num_chosen: slots that the same job saves, and does not own yet.
        """
        blocks = table.blocks[self._layer_group]
        has_spare = self._pool.num_free_slots - num_chosen > self.num_reserved
        if index < len(blocks) and blocks[index] != NO_BLOCK:
            is_current = index == len(blocks) - 1
            return blocks[index] if has_spare or not is_current else None
        return self._pool.lookup(key, self._layer_group) if has_spare else None

    def rewind(self, table: BlockTable, end: int) -> None:
        """Takes a table back to `end`, so that its tokens from there on are computed again.

        The state there becomes the current one. All others, and the blocks of all tokens from
        `end` on, are released.

        Args:
            table: the sequence's table, whose full blocks were offered to the prefix cache.
            end: result of `kept_end`, above 0.
        """
        num_blocks = end // self._spec.block_size
        for layer_group, blocks in enumerate(table.blocks):
            if layer_group == self._layer_group:
                self.release(table, range(num_blocks - 1))
                self.release(table, range(num_blocks, len(blocks)))
                table.first_live[layer_group] = num_blocks - 1
            else:
                self._blocks.release(blocks[num_blocks:])
            del blocks[num_blocks:]
        table.num_registered = min(table.num_registered, num_blocks)
        table.num_named = min(table.num_named, num_blocks)
        table.num_applied = end

    def note_decoded(self, table: BlockTable, position: int) -> None:
        """Notes that steps were started for all tokens before `position` since the last `extend`,
        which made room for them.
        """
        assert position >= table.num_applied, "tokens would be applied to a state again"
        table.num_applied = position

    def numbers(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Returns the numbers of slots, from 0 on; those of holes are `NO_BLOCK`."""
        first = self._pool.num_blocks
        return tuple([NO_BLOCK if slot == NO_BLOCK else slot - first for slot in slots])

    def _kept(
        self, table: BlockTable, indices: range, is_full: bool, num_needed: int
    ) -> frozenset[int]:
        """Returns at which ends of blocks a step leaves a state, as far as slots are free.

        Each takes one slot. These are the newest end to which the sequence can go back, which is
        also the one before the step until that is committed, and the ends that are of use to
        other sequences.

        Args:
            table: the sequence's table.
            indices: of the blocks from that of the current slot on, up to that in which the
                step ends.
            is_full: whether the current slot already has the state at the end of its block.
            num_needed: slots that the step needs in any case.
        """
        if not indices:
            return frozenset()
        newest = indices.stop // self._interval * self._interval - 1
        wanted = [
            index
            for index in reversed(indices)
            if index == newest
            or self._spec.caches_state(index, table.num_known)
            or (is_full and index == indices.start and self._is_worth_keeping(table, index))
        ]
        num_free = self._pool.num_free_slots - self.num_reserved - num_needed
        kept = wanted[: max(0, num_free)]
        self.counts.num_kept += len(kept)
        self.counts.num_skipped += len(wanted) - len(kept)
        return frozenset(kept)

    def _is_worth_keeping(self, table: BlockTable, index: int) -> bool:
        is_cached = self._pool.is_cached(table.blocks[self._layer_group][index])
        return is_cached or self._spec.keeps_state(index, table.num_known)

    def _replace(self, slot: int, *, copies: bool) -> int:
        """Returns a new slot in place of one that others own, with its content."""
        (target,) = self._pool.allocate_slots(1)
        if copies:
            self._blocks.copy(slot, target)
        self._blocks.release([slot])
        return target
