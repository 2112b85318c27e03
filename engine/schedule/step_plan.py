"""`StepPlan`: collects a step's work; `StepRecord`: the sequences of a scheduled batch. Pure."""

from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from engine.batch import (
    NO_LOGPROBS,
    DraftWork,
    ProcessedText,
    ScheduledBatch,
    ScheduledChunk,
    TableUpdate,
)
from engine.groups.group import Sequence, SequenceGroup
from engine.kv_cache.block_table import TableChange
from engine.schedule.guides import masks_after
from engine.schedule.step_times import NO_BOUND

__all__ = ["StepPlan", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The sequences of a batch, kept until its output is in.

    Attributes:
        batch: the scheduled batch.
        chunks: the sequence of each chunk.
        decoding: the sequence of each decode row.
        swapped: groups whose KV it copies to or from the host.
        began_at: as in `StepPlan`.
    """

    batch: ScheduledBatch
    chunks: tuple[Sequence, ...]
    decoding: abc.Sequence[Sequence]
    swapped: tuple[SequenceGroup, ...]
    began_at: float

    def groups(self) -> Iterable[SequenceGroup]:
        """Returns every group whose KV or tokens the batch touches, once each."""
        sequences = (*self.chunks, *self.decoding)
        return dict.fromkeys((*(s.group for s in sequences), *self.swapped))

    def ends(self) -> dict[SequenceGroup, int]:
        """Returns the groups that the step computes, with the end of their longest sequence."""
        ends: dict[SequenceGroup, int] = {}
        for sequence, chunk in zip(self.chunks, self.batch.chunks, strict=True):
            ends[sequence.group] = max(chunk.end, ends.get(sequence.group, 0))
        for sequence in self.decoding:
            # Known tokens only: while the step before is in flight, one more is drawn.
            ends[sequence.group] = max(len(sequence.token_ids), ends.get(sequence.group, 0))
        return ends


@dataclass(slots=True)
class StepPlan:
    """The work of a step, as far as it is decided.

    Attributes:
        step: the batch's number.
        budget: tokens that may still be added.
        began_at: when scheduling began, by the clock of `StepTimes`.
        prompt_budget: tokens of prompts that may still be added.
        max_drafts: the most draft tokens of a sequence in a step.
        draft_budget: known tokens that a draft model may still run.
        admits_none: whether a running group lacks blocks, or was preempted for one that did; then
            no group is admitted, which would take these blocks.
        num_reserved: tokens of the budget that other sequences need that will get a chunk.
        num_partial: prompts of which the step computes a part.
        entering: sequences that decode after this step.
        swapped: groups whose KV the step copies to or from the host.
    """

    step: int
    budget: int
    began_at: float = 0.0
    prompt_budget: int = NO_BOUND
    max_drafts: int = 0
    draft_budget: int = 0
    admits_none: bool = False
    num_reserved: int = 0
    num_partial: int = 0
    entering: list[Sequence] = field(default_factory=list)
    swapped: list[SequenceGroup] = field(default_factory=list)
    _chunks: list[tuple[Sequence, ScheduledChunk]] = field(default_factory=list)
    _updates: list[TableUpdate] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether no token of a prompt may be added."""
        return self.budget <= 0 or self.prompt_budget <= 0

    @property
    def has_chunks(self) -> bool:
        """Whether the step computes known tokens."""
        return bool(self._chunks)

    def room_for(self, num_unscheduled: int) -> int:
        """Returns how many of a sequence's known tokens there is room for.

        Args:
            num_unscheduled: their number.
        """
        if self._has_prompt(num_unscheduled):
            return min(self.budget, self.prompt_budget)
        return self.budget

    def _has_prompt(self, num_unscheduled: int) -> bool:
        """Whether a sequence does not only run its last token, and draft tokens again."""
        return num_unscheduled > 1 + self.max_drafts

    def update_tables(self, sequence: Sequence, changes: Iterable[TableChange]) -> None:
        """Adds changes of a sequence's tables."""
        self._updates += [
            TableUpdate(sequence.row, c.layer_group, c.first_index, c.block_ids) for c in changes
        ]

    def add_chunk(
        self,
        sequence: Sequence,
        num_tokens: int,
        drafts: tuple[int, ...] = (),
        *,
        may_decode: bool = True,
        draft_work: DraftWork | None = None,
    ) -> None:
        """Adds a chunk of a sequence's known tokens. Its last chunk also draws the next tokens.

        Args:
            sequence: the sequence.
            num_tokens: number of known tokens.
            drafts: draft tokens after the last chunk.
            may_decode: whether the sequence may decode after its last chunk.
            draft_work: what a draft model does after the step.
        """
        group, start = sequence.group, sequence.num_scheduled
        spec = group.request.spec
        if self._has_prompt(sequence.num_unscheduled):
            self.prompt_budget -= num_tokens
        end = start + num_tokens
        ends = end == len(sequence.token_ids)
        draws = group.draws_of(sequence) if ends else ()
        rules = draws[0].rules if draws else None
        guide = sequence.guide if draws else None
        draft_masks: tuple[bytes | None, ...] = ()
        if guide is not None and drafts:
            draft_masks = masks_after(sequence, guide, drafts)
            drafts = drafts[: len(draft_masks)]
        chunk = ScheduledChunk(
            row=sequence.row,
            token_ids=(*sequence.token_ids[start:end], *drafts),
            start_position=start,
            draws=draws,
            num_drafts=len(drafts),
            num_top=group.num_top_of(sequence) if ends else 0,
            wants_logprobs=spec.params.is_ranked,
            num_logprobs=NO_LOGPROBS if spec.params.logprobs is None else spec.params.logprobs,
            history=_tokens_before(sequence, start) if rules and rules.reads_history else (),
            processed=_processed_text(sequence) if draws and spec.params.extra_args else None,
            mask=None if guide is None else guide.mask,
            draft_masks=draft_masks,
            draft_work=draft_work,
        )
        if group.owes_prompt_logprobs:
            targets = spec.prompt_token_ids[start + 1 : end + 1]
            num_logprobs = spec.params.prompt_logprobs or 0
            chunk = replace(chunk, prompt_targets=targets, num_prompt_logprobs=num_logprobs)
        sequence.num_scheduled = end
        self.budget -= num_tokens + len(drafts)
        self.draft_budget -= chunk.num_drafted_tokens
        self.num_partial += not ends
        self._chunks.append((sequence, chunk))
        goes_on = sequence is not group.root and chunk.draws_for_row and guide is None
        if may_decode and goes_on and end + 1 < sequence.limit and chunk.processed is None:
            self.entering.append(sequence)

    def drop(self, group: SequenceGroup) -> None:
        """Removes what was planned for a group that is preempted."""
        self._chunks = [entry for entry in self._chunks if entry[0].group is not group]
        self.entering = [sequence for sequence in self.entering if sequence.group is not group]

    def record(
        self,
        decoding: tuple[abc.Sequence[Sequence], tuple[int, ...]],
        swaps: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]],
        copies: tuple[tuple[int, int], ...],
    ) -> StepRecord | None:
        """Returns the batch and its sequences; None if there is nothing to do.

        Args:
            decoding: the sequences that decode, and their rows.
            swaps: blocks to copy from the host, and to the host.
            copies: blocks to copy on write.
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
        return StepRecord(batch, owners, sequences, tuple(self.swapped), self.began_at)


def _tokens_before(sequence: Sequence, position: int) -> tuple[int, ...]:
    """Returns a sequence's first tokens; if they are the prompt, the request's own tuple."""
    prompt = sequence.group.request.spec.prompt_token_ids
    return prompt if position == len(prompt) else tuple(islice(sequence.token_ids, position))


def _processed_text(sequence: Sequence) -> ProcessedText:
    """Returns the sequence's text, for logits processors."""
    group, spec = sequence.group, sequence.group.request.spec
    return ProcessedText(
        sequence_id=(group.arrival, sequence.index),
        args=spec.params.extra_args or {},
        prompt_token_ids=spec.prompt_token_ids,
        output_token_ids=tuple(sequence.token_ids[group.num_prompt :]),
    )
