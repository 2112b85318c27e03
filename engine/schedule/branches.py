"""`Branches`: forks, advances and ends the sequences of groups. Pure.

Forked block tables after Kwon et al. 2023 (PagedAttention), section 4.4: a
fork shares every block, and whoever writes to a shared one copies it first.
"""

from collections.abc import Sequence as Sequences

from engine.beam_search import BeamStep
from engine.group import NO_ROW, Sequence, SequenceGroup
from engine.kv_cache.manager import KvCacheManager
from engine.schedule.decode_set import DecodeSet

__all__ = ["Branches"]


class Branches:
    """Gives sequences rows and tables, and takes them back.

    Args:
        kv: the block tables.
        decoding: who decodes; what ends here decodes no more.
        num_rows: the runner's rows.
    """

    def __init__(self, kv: KvCacheManager, decoding: DecodeSet, num_rows: int) -> None:
        self._kv = kv
        self._decoding = decoding
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def seat(self, sequence: Sequence) -> None:
        """Gives a sequence with blocks a row. Seats are counted at admission: one is free."""
        sequence.row = self._free_rows.pop()
        sequence.is_row_new = True

    def unseat(self, sequence: Sequence) -> None:
        """Takes the row; what a step in flight brings for it is dropped."""
        if self._decoding.leave(sequence):
            sequence.settle()
        if sequence.row != NO_ROW:
            self._free_rows.append(sequence.row)
            sequence.row = NO_ROW

    def drop(self, sequence: Sequence) -> None:
        """Takes row and blocks; full computed ones stay cached."""
        self.unseat(sequence)
        if sequence.table is not None:
            self.register(sequence)
            if sequence.group.request.spec.params.num_candidates > 1:
                sequence.group.left_keys.update(sequence.keys.pool_keys)
            self._kv.free(sequence.table)
            sequence.table = None

    def register(self, sequence: Sequence) -> None:
        """Offers the sequence's full computed blocks to the prefix cache."""
        if sequence.table is not None and not sequence.group.is_poisoned:
            keys = sequence.keys.extend_pool(sequence.token_ids)
            self._kv.register(sequence.table, keys, sequence.num_computed)

    def release_behind(self, sequence: Sequence) -> None:
        """Releases blocks that no layer sees from the sequence's next token on."""
        if sequence.table is not None:
            self._kv.release_behind(sequence.table, sequence.num_computed)

    def discard(self, group: SequenceGroup) -> None:
        """Takes the group's blocks out of the prefix cache: nobody new shall share them."""
        self._kv.discard(tuple(group.left_keys))
        for sequence in group.running:
            self._kv.discard(sequence.keys.extend_pool(sequence.token_ids))

    def leave_root(self, group: SequenceGroup) -> None:
        """The root is computed: the group's branches, which have no blocks yet, share it."""
        root, group.root = group.root, None
        assert root is not None
        for branch in group.branches[1:]:
            self._share(root, branch)
        first = group.branches[0]
        first.table, first.row, first.is_row_new = root.table, root.row, root.is_row_new
        first.num_computed = first.num_scheduled = root.num_computed
        root.table, root.row = None, NO_ROW

    def advance_beams(
        self, group: SequenceGroup, parents: Sequences[Sequence], steps: Sequences[BeamStep]
    ) -> None:
        """Makes the beams that `steps` name out of their parents, which end or become one."""
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
