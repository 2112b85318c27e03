"""`OutputProcessor`: turns tokens and ends of loads into outputs. Pure."""

import math
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from baton.common.errors import AbortedError, BatonError
from engine.batch import ChunkOutput, ScheduledChunk, TokenLogprobs
from engine.constraints.matcher import Constraint
from engine.groups.beam_search import BeamStep
from engine.groups.group import FinishedCandidate, GroupState, Sequence, SequenceGroup
from engine.kv_transfer.loads import FinishedLoad
from engine.kv_transfer.saves import Saves
from engine.metrics.counts import EngineMetrics
from engine.request import EngineOutput, FinishReason
from engine.schedule.branches import Branches
from engine.schedule.ends import Ends, Handovers
from engine.schedule.guides import Guides
from engine.schedule.output_maker import OutputMaker
from engine.schedule.queues import GroupQueues
from engine.speculation.drafts import Drafts

__all__ = ["OutputProcessor"]

Outputs = list[EngineOutput]


class OutputProcessor:
    """Processes tokens and loads; returns the requests' outputs.

    Args:
        maker: makes the outputs.
        ends: ends requests and candidates.
        handovers: hands over requests whose prompts are computed.
        queues: waiting and running groups.
        branches: forks sequences.
        saves: saves computed blocks.
        guides: what may follow sequences.
        drafts: draft tokens; None without speculation.
        load_failure_policy: `EngineConfig.kv_load_failure_policy`.
        has_states: whether the model has recurrent layers.
        metrics: counts requests and the time between tokens.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        maker: OutputMaker,
        ends: Ends,
        handovers: Handovers,
        queues: GroupQueues,
        branches: Branches,
        saves: Saves,
        guides: Guides,
        drafts: Drafts | None,
        load_failure_policy: str,
        has_states: bool,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._maker = maker
        self._ends = ends
        self._handovers = handovers
        self._queues = queues
        self._branches = branches
        self._saves = saves
        self._guides = guides
        self._drafts = drafts
        self._load_failure_policy = load_failure_policy
        self._has_states = has_states
        self._metrics = metrics
        self._clock = clock

    # Input.

    def take_progress(
        self,
        group: SequenceGroup,
        appended: abc.Mapping[Sequence, tuple[int, ...]] = MappingProxyType({}),
    ) -> Outputs:
        """Ends candidates of a new group that the tokens it came with end.

        Args:
            group: a group that waits.
            appended: by candidate, tokens that ended it and that no output has had.
        """
        if not group.request.progress:
            return []
        outputs = [
            output
            for branch in list(group.branches)
            for output in self._ends.end_if_over(branch, appended.get(branch, ()))
        ]
        if group.branches:
            group.make_root()
        return outputs

    def start_guided(self, group: SequenceGroup, constraint: Constraint | None) -> Outputs:
        """Gives a group its guides, and makes it wait for admission if it waited for its grammar.

        Ends the candidates whose texts are complete.
        """
        try:
            appended = self._guides.attach(group, constraint)
        except BatonError as error:
            return [self._ends.end(group, FinishReason.ERROR, error)]
        outputs = self.take_progress(group, appended)
        if group.state is GroupState.COMPILING:
            self._queues.wait_for_admission(group)
        return outputs

    def take_load(self, load: FinishedLoad) -> Outputs:
        """Ends a load: the group runs, or it recomputes or fails by policy if the load failed."""
        group, lead = load.group, load.group.lead
        lead.num_computed = lead.num_scheduled = load.num_tokens
        group.times.loaded_at = self._clock()
        self._branches.register(lead)
        if load.error and self._load_failure_policy == "fail" and not group.is_pulled:
            error = AbortedError(f"the prompt's KV could not be loaded: {load.error}")
            return [self._ends.end(group, FinishReason.ERROR, error)]
        self._queues.end_load(group, failure=load.error)
        is_whole = lead.num_computed == len(lead.token_ids)
        return self._leave_root(group) if is_whole and not load.error else []

    def take_prompt_logprobs(
        self,
        sequences: abc.Sequence[Sequence],
        chunks: abc.Sequence[ScheduledChunk],
        details: abc.Sequence[tuple[TokenLogprobs, ...]],
    ) -> Outputs:
        """Keeps log-probabilities of prompts' tokens for the groups' first outputs; ends groups
        whose logits are not finite.

        Args:
            sequences: the sequence of each chunk.
            chunks: the step's.
            details: `StepOutput.prompt_details`.
        """
        outputs: Outputs = []
        for sequence, chunk, found in zip(sequences, chunks, details, strict=True):
            if not found or sequence.row != chunk.row:
                continue  # nothing to report, or ended or preempted while the step ran
            if any(math.isnan(token.logprob) for token in found):
                outputs.append(self._ends.end_poisoned(sequence.group))
            else:
                self._maker.keep_prompt_logprobs(sequence.group, chunk.start_position, found)
        return outputs

    def take_chunk(
        self, sequence: Sequence, chunk: ScheduledChunk, result: ChunkOutput | None, now: float
    ) -> Outputs:
        """Processes a computed chunk.

        Args:
            sequence: the chunk's.
            chunk: the chunk.
            result: the tokens drawn at the chunk's end; None if it draws none.
            now: clock time at which the step is committed.
        """
        group = sequence.group
        if result is not None and min(result.token_ids) < 0:
            return [self._ends.end_without_token(group, min(result.token_ids))]
        self._branches.register(sequence)
        if sequence is group.lead:
            self._saves.save_computed(group)
        if sequence.num_computed > group.num_prompt:
            self._saves.save_filled(sequence)
        self._branches.release_behind(sequence)
        if result is None:
            is_whole = sequence.num_computed == len(sequence.token_ids)
            return self._leave_root(group) if is_whole and sequence is group.root else []
        times = group.times
        if times.first_token_at is None:
            times.first_token_at = now
            scheduled_at = now if times.scheduled_at is None else times.scheduled_at
            self._metrics.first_token(times.arrived_at, times.loaded_at, scheduled_at, now)
        if group.beams is not None:
            return self._take_tops(sequence, result)
        try:
            if sequence is group.root:
                return self._take_first_tokens(sequence, result)
            if sequence.token_at is not None:
                self._metrics.drew(now - sequence.token_at, len(result.token_ids))
            sequence.token_at = now
            return self._take_tokens(sequence, result, chunk)
        except BatonError as error:  # of the sequence's guide
            return [self._ends.end(group, FinishReason.ERROR, error)]

    def take_decoded(
        self,
        sequences: abc.Sequence[Sequence],
        token_ids: abc.Sequence[int],
        logprobs: abc.Sequence[float],
        details: abc.Sequence[TokenLogprobs | None],
        outputs: Outputs,
    ) -> None:
        """Processes the tokens of sequences that decode, and extends `outputs`.

        This is the hot loop: it runs once per token, so the common case is inlined.

        Args:
            sequences: one per decode row.
            token_ids: one per sequence.
            logprobs: one per sequence; empty if no sequence is ranked.
            details: one per sequence; empty if no request asks for them.
            outputs: the step's outputs.
        """
        for sequence, logprob in zip(sequences, logprobs, strict=False):
            if sequence.row >= 0:
                sequence.logprob += logprob
        if details:
            outputs += self._take_reported(sequences, token_ids, details)
            plain = [index for index, found in enumerate(details) if found is None]
            sequences = [sequences[index] for index in plain]
            token_ids = [token_ids[index] for index in plain]
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            if sequence.row < 0:
                continue  # ended or preempted while the step ran
            tokens = sequence.token_ids
            tokens.append(token_id)
            if len(tokens) >= sequence.limit or token_id in sequence.stop_token_ids or token_id < 0:
                outputs += self._take_last(sequence, token_id)
            elif sequence.is_streamed:
                request_id = sequence.group.request.spec.request_id
                outputs.append(EngineOutput(request_id, sequence.index, (token_id,)))

    def _take_reported(
        self,
        sequences: abc.Sequence[Sequence],
        token_ids: abc.Sequence[int],
        details: abc.Sequence[TokenLogprobs | None],
    ) -> Outputs:
        """Does the work of `take_decoded` for the sequences that have details."""
        outputs: Outputs = []
        for sequence, token_id, found in zip(sequences, token_ids, details, strict=True):
            if found is None or sequence.row < 0:
                continue
            if token_id < 0:
                outputs.append(self._ends.end_without_token(sequence.group, token_id))
            else:
                outputs += self._take_tokens(sequence, ChunkOutput((token_id,), details=(found,)))
        return outputs

    # Tokens.

    def _take_tokens(
        self, sequence: Sequence, result: ChunkOutput, chunk: ScheduledChunk | None = None
    ) -> Outputs:
        """Processes the tokens that a candidate draws: one, or several if its chunk has drafts."""
        group = sequence.group
        sequence.logprob += sum(result.logprobs)
        num_known = len(sequence.token_ids)
        token_ids, num_accepted = self._append(sequence, result.token_ids)
        if chunk is not None and chunk.draft_work is not None and self._drafts is not None:
            num_known += len(result.token_ids)
            self._drafts.worked(sequence, chunk.draft_work, result.proposals, num_known)
        if group.hands_over and sequence.finish_reason is None:
            first = tuple(sequence.token_ids[-len(result.token_ids) :])
            return self._handovers.hand_over(group, replace(result, token_ids=first))
        details = result.details[: len(token_ids)]
        outputs = self._ends.end_if_over(sequence, token_ids, details) or self._go_on(
            sequence, token_ids, details
        )
        if chunk is not None and chunk.num_drafts and self._drafts is not None:
            num_drafts, num_right = chunk.num_drafts, len(result.token_ids) - 1
            self._drafts.checked(sequence, num_drafts, num_right)
            for output in outputs:
                # Those behind a token that ends the sequence were right, and are not in it.
                output.accepted_drafts = num_accepted
                output.rejected_drafts = num_drafts - num_right
        return outputs

    def _append(self, sequence: Sequence, drawn: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Appends drawn tokens, until one ends the sequence; all but the last one were drafts, so
        their KV is computed. States have not got them, so a model with states runs them again.

        Returns:
            The tokens to send, and the number of drafts among the appended ones.
        """
        newest: tuple[int, ...] = ()
        num_accepted = 0
        for index, token_id in enumerate(drawn):
            place = len(sequence.token_ids)
            sequence.token_ids.append(token_id)
            newest += self._guides.advance(sequence)
            num_accepted = index
            if index and not self._has_states:
                sequence.num_computed += 1
                sequence.num_scheduled += 1
            if sequence.finish_reason is not None or sequence.token_ids[place] != token_id:
                break  # it has ended, or another token took the place of the drawn one
        return newest, num_accepted

    def _take_last(self, sequence: Sequence, token_id: int) -> Outputs:
        if token_id < 0:
            sequence.token_ids.pop()
            return [self._ends.end_without_token(sequence.group, token_id)]
        return self._ends.end_if_over(sequence, (token_id,))

    def _take_first_tokens(self, root: Sequence, result: ChunkOutput) -> Outputs:
        """Forks the candidates from the computed prompt, each with its first token."""
        group = root.group
        branches = [group.fork_of(root, index) for index in range(len(result.token_ids))]
        for branch, token_id in zip(branches, result.token_ids, strict=True):
            branch.token_ids.append(token_id)
            branch.token_at = group.times.first_token_at
        for branch, logprob in zip(branches, result.logprobs, strict=False):
            branch.logprob = logprob
        newest = [self._guides.advance(branch) for branch in branches]
        are_over = [branch.finish_reason is not None for branch in branches]
        if group.hands_over and not all(are_over):
            first = tuple([branch.token_ids[group.num_prompt] for branch in branches])
            return self._handovers.hand_over(group, replace(result, token_ids=first))
        group.branches = list(branches)
        outputs: Outputs = []
        for index, branch in enumerate(branches):
            token_ids, details = newest[index], result.details[index : index + 1]
            outputs += self._ends.end_if_over(branch, token_ids, details) or self._go_on(
                branch, token_ids, details
            )
        return outputs + self._leave_root(group) if group.branches else outputs

    def _take_tops(self, sequence: Sequence, result: ChunkOutput) -> Outputs:
        """Processes the most likely tokens after a beam or after the prompt."""
        group, beams = sequence.group, sequence.group.beams
        assert beams is not None
        top = list(zip(result.token_ids, result.logprobs, strict=True))
        if sequence is group.root:
            if group.hands_over and group.max_len > group.num_prompt + 1:
                return self._handovers.hand_over(group, result)
            return self._advance(group, [sequence], beams.start(top))
        group.beam_tops[sequence] = top
        if len(group.beam_tops) < len(group.branches):
            return []
        tops = [group.beam_tops[beam] for beam in group.branches]
        group.beam_tops.clear()
        return self._advance(group, group.branches, beams.advance(tops))

    def _leave_root(self, group: SequenceGroup) -> Outputs:
        """Replaces the computed root by the group's candidates or first beams."""
        if group.root is None:
            return []
        if group.branches:
            self._branches.leave_root(group)
            return []
        assert group.beams is not None
        return self._advance(group, [group.root], group.beams.start(group.request.first_beams))

    def _advance(
        self, group: SequenceGroup, parents: abc.Sequence[Sequence], steps: abc.Sequence[BeamStep]
    ) -> Outputs:
        assert group.beams is not None
        if not group.beams.is_done:
            self._branches.advance_beams(group, parents, steps)
            return []
        finished = [
            FinishedCandidate(
                result.token_ids,
                result.score,
                FinishReason.STOP if result.is_stopped else FinishReason.LENGTH,
            )
            for result in group.beams.results()
        ]
        return self._ends.end_ranked(group, finished)

    # Outputs.

    def _go_on(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        details: tuple[TokenLogprobs, ...],
    ) -> Outputs:
        if not sequence.is_streamed:
            return []
        output = self._maker.make(
            sequence.group, sequence.index, token_ids=token_ids, logprobs=details
        )
        return [output]
