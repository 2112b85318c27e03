"""`DecodeSet`: the sequences that decode on, one token each step. Pure.

A sequence that decodes needs the scheduler only when its last block is full,
or when it will draw no more. So it is entered in a calendar under the step of
that moment, and a step looks at those that are due: its work grows with what
changes, not with what runs.
"""

from collections.abc import Sequence as Sequences

from engine.group import Sequence

__all__ = ["DecodeSet"]


class DecodeSet:
    """Who decodes in each step until told otherwise.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._members: dict[Sequence, None] = {}
        self._due: dict[int, list[Sequence]] = {}
        self._sequences: tuple[Sequence, ...] | None = ()
        self._rows: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def enter(self, sequence: Sequence, step: int) -> None:
        """The sequence decodes from `step` on, at which it is due."""
        self._members[sequence] = None
        sequence.offset = sequence.num_scheduled - step
        self._note(sequence, step)
        self._sequences = None

    def leave(self, sequence: Sequence) -> bool:
        """The sequence decodes no more; returns whether it did."""
        if sequence not in self._members:
            return False
        del self._members[sequence]
        self._sequences = None
        return True

    def position(self, sequence: Sequence, step: int) -> int:
        """Position of the token that the sequence runs in `step`."""
        return sequence.offset + step

    def take_due(self, step: int) -> list[Sequence]:
        """The sequences to look at before `step`; each must then be renewed or leave."""
        due = self._due.pop(step, [])
        return [s for s in due if s.due == step and s in self._members]

    def renew(self, sequence: Sequence, step: int) -> None:
        """The sequence has a block for its token of `step`: it is due again when that is
        full, or when it has drawn its last token.
        """
        position = self.position(sequence, step)
        to_boundary = self._block_size - position % self._block_size
        to_end = sequence.limit - 1 - position
        self._note(sequence, step + min(to_boundary, to_end))

    def members(self) -> tuple[Sequences[Sequence], tuple[int, ...]]:
        """The sequences and their rows; the same objects as before if nothing changed."""
        if self._sequences is None:
            self._sequences = tuple(self._members)
            rows = tuple([sequence.row for sequence in self._sequences])
            if rows != self._rows:  # one may have entered and left since
                self._rows = rows
        return self._sequences, self._rows

    def _note(self, sequence: Sequence, step: int) -> None:
        sequence.due = step
        self._due.setdefault(step, []).append(sequence)
