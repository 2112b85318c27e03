"""`StepPlan`: a batch in the making; `StepRecord`: who was in it. Pure."""

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

from engine.batch import ScheduledBatch, ScheduledChunk, TableUpdate
from engine.group import Sequence, SequenceGroup
from engine.kv_cache.block_table import TableChange

__all__ = ["StepPlan", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Whose work a batch is, until its output comes.

    Attributes:
        batch: the batch.
        chunks: the sequences of its chunks.
        decoding: the sequences of its decode rows.
        swapped: groups that it swaps out or in.
    """

    batch: ScheduledBatch
    chunks: tuple[Sequence, ...]
    decoding: Sequences[Sequence]
    swapped: tuple[SequenceGroup, ...]

    def groups(self) -> Iterable[SequenceGroup]:
        """Every group whose KV or tokens the batch touches, once each."""
        sequences = (*self.chunks, *self.decoding)
        return dict.fromkeys((*(s.group for s in sequences), *self.swapped))


@dataclass(slots=True)
class StepPlan:
    """What a step shall do, as far as it is decided.

    Attributes:
        step: the batch's number.
        budget: tokens that may still be added.
        has_preempted: somebody had to give way, so nobody new shall come.
        num_partial: prompts that this step leaves computed in part.
        entering: sequences that decode on after this step.
        swapped: groups swapped out or in.
    """

    step: int
    budget: int
    has_preempted: bool = False
    num_partial: int = 0
    entering: list[Sequence] = field(default_factory=list)
    swapped: list[SequenceGroup] = field(default_factory=list)
    _chunks: list[tuple[Sequence, ScheduledChunk]] = field(default_factory=list)
    _updates: list[TableUpdate] = field(default_factory=list)

    def update_tables(self, sequence: Sequence, changes: Iterable[TableChange]) -> None:
        """Tells the runner what changed in a sequence's tables; all of it, if the row is new."""
        table, row = sequence.table, sequence.row
        assert table is not None
        if sequence.is_row_new:
            sequence.is_row_new = False
            changes = [
                TableChange(layers, first, tuple(blocks[first:]))
                for layers, (blocks, first) in enumerate(
                    zip(table.blocks, table.first_live, strict=True)
                )
            ]
        self._updates += [
            TableUpdate(row, c.layer_group, c.first_index, c.block_ids) for c in changes
        ]

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence runs its next known tokens; what they lead to is drawn at their end."""
        group, start = sequence.group, sequence.num_scheduled
        end = start + num_tokens
        ends = end == len(sequence.token_ids)
        chunk = ScheduledChunk(
            row=sequence.row,
            token_ids=tuple(sequence.token_ids[start:end]),
            start_position=start,
            draws=group.draws_of(sequence) if ends else (),
            num_top=group.num_top_of(sequence) if ends else 0,
            wants_logprobs=group.request.spec.params.is_ranked,
        )
        sequence.num_scheduled = end
        self.budget -= num_tokens
        self.num_partial += not ends
        self._chunks.append((sequence, chunk))
        goes_on = sequence is not group.root and len(chunk.draws) == 1
        if goes_on and end + 1 < sequence.limit:
            self.entering.append(sequence)

    def drop(self, group: SequenceGroup) -> None:
        """The group has given way after all."""
        self._chunks = [entry for entry in self._chunks if entry[0].group is not group]
        self.entering = [sequence for sequence in self.entering if sequence.group is not group]

    def record(
        self,
        decoding: tuple[Sequences[Sequence], tuple[int, ...]],
        swaps: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]],
        copies: tuple[tuple[int, int], ...],
    ) -> StepRecord | None:
        """The finished plan; None if there is nothing to do.

        Args:
            decoding: sequences that decode, and their rows.
            swaps: swapped in and out.
            copies: blocks copied on write.
        """
        sequences, rows = decoding
        if not (self._chunks or rows or any(swaps)):
            return None
        batch = ScheduledBatch(
            step=self.step,
            chunks=tuple([chunk for _, chunk in self._chunks]),
            decode_rows=rows,
            table_updates=tuple(self._updates),
            swap_ins=swaps[0],
            swap_outs=swaps[1],
            block_copies=copies,
        )
        owners = tuple([sequence for sequence, _ in self._chunks])
        return StepRecord(batch, owners, sequences, tuple(self.swapped))
