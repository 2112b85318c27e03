"""`DecodeSet`: the sequences that decode, one token in each step of their lane. Pure.

A sequence that decodes needs the scheduler only when its last block is full, or when it draws its
last token. It is entered in a calendar under the step of that moment. Each step looks at the
sequences that are due, so its cost grows with what changes, not with what runs.

With pipeline stages the sequences form as many *lanes*, and steps serve these in turn: step s the
lane s modulo the number of lanes. So each stage has a step to compute, and no step waits for a
token that the one before it draws.
"""

from collections import abc

from engine.groups.group import Sequence

__all__ = ["DecodeSet"]


class _Lane:
    """The members that decode in the same steps.

    Attributes:
        number: of the lane, from 0.
        members: in the order in which they entered.
        has_changed: whether members have entered or left since `sequences` was made.
        sequences: the members as a tuple.
        rows: their rows.
        num_ruled: members whose tokens are drawn by logit rules.
        committed: its newest step that was committed, None before; and the clock time of that.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.members: dict[Sequence, None] = {}
        self.has_changed = False
        self.sequences: tuple[Sequence, ...] = ()
        self.rows: tuple[int, ...] = ()
        self.num_ruled = 0
        self.committed: tuple[int | None, float] = None, 0.0


class DecodeSet:
    """The sequences that decode in each step of their lane until they leave.

    Args:
        block_size: tokens per block.
        num_lanes: number of lanes.

    Attributes:
        num_lanes: number of lanes.
    """

    def __init__(self, block_size: int, num_lanes: int = 1) -> None:
        self.num_lanes = num_lanes
        self._block_size = block_size
        self._lanes = [_Lane(number) for number in range(num_lanes)]
        self._lane_of: dict[Sequence, _Lane] = {}
        self._due: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._lane_of

    def __iter__(self) -> abc.Iterator[Sequence]:
        return iter(self._lane_of)

    def num_in(self, step: int) -> int:
        """Returns how many sequences decode in a step."""
        return len(self._lane(step).members)

    def runs_in(self, sequence: Sequence, step: int) -> bool:
        """Whether a sequence decodes in a step."""
        return sequence in self._lane(step).members

    def enter(self, sequence: Sequence, step: int) -> None:
        """Makes a sequence decode after `step`, which draws a token for it.

        It is due in the first step that runs it, of a lane with the fewest members.
        """
        # The last of these lanes, as its step waits the least for the token.
        coming = range(step + self.num_lanes, step, -1)
        first = min(coming, key=self.num_in)
        lane = self._lane_of[sequence] = self._lane(first)
        lane.members[sequence] = None
        lane.has_changed = True
        lane.num_ruled += sequence.has_rules
        sequence.offset = sequence.num_scheduled - first // self.num_lanes
        self._set_due(sequence, first)

    def leave(self, sequence: Sequence) -> bool:
        """Stops a sequence from decoding; returns whether it decoded."""
        lane = self._lane_of.pop(sequence, None)
        if lane is None:
            return False
        del lane.members[sequence]
        lane.has_changed = True
        lane.num_ruled -= sequence.has_rules
        sequence.token_at = max(sequence.token_at or 0.0, lane.committed[1])
        return True

    def position(self, sequence: Sequence, step: int) -> int:
        """Returns the position of the token that `step` computes for the sequence, or the next
        step of its lane.
        """
        num_turns = -((self._lane_of[sequence].number - step) // self.num_lanes)
        return sequence.offset + num_turns

    def take_due(self, step: int) -> list[Sequence]:
        """Returns the sequences that are due at `step`. The caller renews each, or it leaves."""
        # One that has left and come back may have two entries for the same step.
        due = dict.fromkeys(self._due.pop(step, []))
        return [s for s in due if s.due == step and s in self._lane_of]

    def renew(self, sequence: Sequence, step: int) -> None:
        """Sets when a sequence with a block for its token of `step` is due again.

        That is when the block is full, or when the sequence has drawn its last token.
        """
        position = self.position(sequence, step)
        to_boundary = self._block_size - position % self._block_size
        to_end = sequence.limit - 1 - position
        self._set_due(sequence, step + self.num_lanes * min(to_boundary, to_end))

    def members(self, step: int) -> tuple[abc.Sequence[Sequence], tuple[int, ...]]:
        """Returns the sequences of a step and their rows: the same objects as in the last step of
        their lane, if nothing changed.
        """
        lane = self._lane(step)
        if lane.has_changed:
            lane.has_changed = False
            sequences = tuple(lane.members)
            rows = tuple([sequence.row for sequence in sequences])
            # Else sequences have entered and left again. Another one may have a row of before.
            if (sequences, rows) != (lane.sequences, lane.rows):
                lane.sequences, lane.rows = sequences, rows
        return lane.sequences, lane.rows

    def num_ruled(self, step: int) -> int:
        """Returns how many sequences of a step draw tokens by logit rules."""
        return self._lane(step).num_ruled

    def commit(self, step: int, now: float) -> float:
        """Notes when a step is committed; returns when its sequences got the token before."""
        lane = self._lane(step)
        last, before = lane.committed
        if last != step - self.num_lanes:  # it had no members; their tokens are of other steps
            before = max(other.committed[1] for other in self._lanes)
        lane.committed = step, now
        return before

    def _lane(self, step: int) -> _Lane:
        return self._lanes[step % self.num_lanes]

    def _set_due(self, sequence: Sequence, step: int) -> None:
        sequence.due = step
        self._due.setdefault(step, []).append(sequence)
