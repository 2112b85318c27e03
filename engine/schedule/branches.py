"""`Branches`: rows and block tables of sequences: fork, advance, end. Pure.

Block tables are forked as in Kwon et al. 2023 (PagedAttention), section 4.4: a fork shares every
block, and the first to write to a shared block copies it.
"""

from collections import abc

from engine.groups.beam_search import BeamStep
from engine.groups.group import NO_ROW, Sequence, SequenceGroup
from engine.kv_cache.manager import KvCacheManager
from engine.schedule.decode_set import DecodeSet

__all__ = ["Branches"]


class Branches:
    """Assigns rows and block tables to sequences.

    Args:
        kv: the block tables.
        decoding: the sequences that decode.
        num_rows: rows of the runner.
    """

    def __init__(self, kv: KvCacheManager, decoding: DecodeSet, num_rows: int) -> None:
        self._kv = kv
        self._decoding = decoding
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def seat(self, sequence: Sequence) -> None:
        """Assigns a row to a sequence with blocks. Admission counts seats, so a row is free."""
        sequence.row = self._free_rows.pop()
        sequence.is_row_new = True

    def unseat(self, sequence: Sequence) -> None:
        """Frees the row. Tokens of a step in flight for it will be ignored."""
        if self._decoding.leave(sequence):
            sequence.settle()
        if sequence.row != NO_ROW:
            self._free_rows.append(sequence.row)
            sequence.row = NO_ROW
        if sequence.drafts is not None:
            sequence.drafts.num_drafted = 0

    def drop(self, sequence: Sequence) -> None:
        """Frees row and blocks. Full, computed blocks stay cached."""
        self.unseat(sequence)
        if sequence.table is not None:
            self.register(sequence)
            if sequence.group.request.spec.params.num_candidates > 1:
                sequence.group.left_keys.update(sequence.keys.pool_keys)
            self._kv.free(sequence.table)
            sequence.table = None

    def register(self, sequence: Sequence) -> None:
        """Registers the sequence's full, computed blocks in the prefix cache."""
        if sequence.table is not None and not sequence.group.transfer.is_poisoned:
            keys = sequence.keys.extend_pool(sequence.token_ids)
            self._kv.register(sequence.table, keys, sequence.num_computed)
            if (log := self._kv.pool.token_log) is not None:
                salt = sequence.group.request.spec.cache_salt
                log.record(sequence.table, keys, sequence.token_ids, salt)

    def release_behind(self, sequence: Sequence) -> None:
        """Frees blocks that no layer reads for the sequence's next token or any after it."""
        if sequence.table is not None:
            self._kv.release_behind(sequence.table, sequence.num_computed)

    def discard(self, group: SequenceGroup) -> None:
        """Removes the group's blocks from the prefix cache, so that no other request uses them."""
        self._kv.discard(tuple(group.left_keys))
        for sequence in group.running:
            self._kv.discard(sequence.keys.extend_pool(sequence.token_ids))

    def leave_root(self, group: SequenceGroup) -> None:
        """Shares the computed root's blocks with the group's branches, which have none yet."""
        root, group.root = group.root, None
        assert root is not None
        for branch in group.branches[1:]:
            self._share(root, branch)
        first = group.branches[0]
        first.table, first.row, first.is_row_new = root.table, root.row, root.is_row_new
        first.num_computed = first.num_scheduled = root.num_computed
        root.table, root.row = None, NO_ROW

    def advance_beams(
        self, group: SequenceGroup, parents: abc.Sequence[Sequence], steps: abc.Sequence[BeamStep]
    ) -> None:
        """Replaces a group's beams by those of the next round.

        Args:
            group: a group with beam search.
            parents: its beams, or its root.
            steps: the new beams. The first one of a parent continues its sequence, others are
                forked from it. Parents without a new beam end.
        """
        chosen = {step.parent for step in steps}
        for index, parent in enumerate(parents):
            if index not in chosen:
                self.drop(parent)
        beams: list[Sequence] = []
        for index, step in enumerate(steps):
            parent = parents[step.parent]
            if parent in beams:
                beams.append(group.fork_of(parent, index))
                self._share(parent, beams[-1])
            else:
                beams.append(parent)
        for index, (beam, step) in enumerate(zip(beams, steps, strict=True)):
            beam.index = index
            beam.token_ids.append(step.token_id)
        group.root = None
        group.branches = beams

    def _share(self, parent: Sequence, child: Sequence) -> None:
        assert parent.table is not None
        child.table = self._kv.fork(parent.table)
        child.num_computed = child.num_scheduled = parent.num_computed
        self.seat(child)
