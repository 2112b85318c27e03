"""`DecodeSet`: the sequences that decode, one token in each step. Pure.

A sequence that decodes needs the scheduler only when its last block is full, or when it draws its
last token. It is entered in a calendar under the step of that moment. Each step looks at the
sequences that are due, so its cost grows with what changes, not with what runs.
"""

from collections import abc

from engine.group import Sequence

__all__ = ["DecodeSet"]


class DecodeSet:
    """The sequences that decode in each step until they leave.

    Args:
        block_size: tokens per block.

    Attributes:
        committed_at: clock time at which the newest step was committed; all members have a token
            of that step.
        num_ruled: members whose tokens are drawn by logit rules.
    """

    def __init__(self, block_size: int) -> None:
        self.committed_at = 0.0
        self.num_ruled = 0
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
        """Makes a sequence decode from `step` on, when it is also due."""
        self._members[sequence] = None
        self.num_ruled += sequence.has_rules
        sequence.offset = sequence.num_scheduled - step
        self._set_due(sequence, step)
        self._sequences = None

    def leave(self, sequence: Sequence) -> bool:
        """Stops a sequence from decoding; returns whether it decoded."""
        if sequence not in self._members:
            return False
        del self._members[sequence]
        self.num_ruled -= sequence.has_rules
        sequence.token_at = self.committed_at
        self._sequences = None
        return True

    def position(self, sequence: Sequence, step: int) -> int:
        """Returns the position of the token that `step` computes for the sequence."""
        return sequence.offset + step

    def take_due(self, step: int) -> list[Sequence]:
        """Returns the sequences that are due at `step`. The caller renews each, or it leaves."""
        due = self._due.pop(step, [])
        return [s for s in due if s.due == step and s in self._members]

    def renew(self, sequence: Sequence, step: int) -> None:
        """Sets when a sequence with a block for its token of `step` is due again.

        That is when the block is full, or when the sequence has drawn its last token.
        """
        position = self.position(sequence, step)
        to_boundary = self._block_size - position % self._block_size
        to_end = sequence.limit - 1 - position
        self._set_due(sequence, step + min(to_boundary, to_end))

    def members(self) -> tuple[abc.Sequence[Sequence], tuple[int, ...]]:
        """Returns the sequences and their rows: the same objects as before if nothing changed."""
        if self._sequences is None:
            self._sequences = tuple(self._members)
            rows = tuple([sequence.row for sequence in self._sequences])
            if rows != self._rows:  # else sequences have entered and left again
                self._rows = rows
        return self._sequences, self._rows

    def _set_due(self, sequence: Sequence, step: int) -> None:
        sequence.due = step
        self._due.setdefault(step, []).append(sequence)
