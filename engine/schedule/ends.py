"""`Ends`: ends requests and candidates, and `Handovers` those that continue elsewhere. Pure."""

from collections import abc
from collections.abc import Callable

from baton.common.errors import BatonError, InternalError, InvalidArgumentError
from engine.batch import NO_TOKEN, PROCESSOR_FAILED, ChunkOutput, TokenLogprobs
from engine.groups.group import FinishedCandidate, GroupState, Sequence, SequenceGroup
from engine.kv_transfer.saves import Saves
from engine.metrics.counts import EngineMetrics
from engine.request import EngineOutput, FinishReason
from engine.runner import EngineTurns
from engine.schedule.branches import Branches
from engine.schedule.guides import Guides
from engine.schedule.output_maker import OutputMaker
from engine.schedule.queues import GroupQueues
from engine.speculation.drafts import Drafts

__all__ = ["Ends", "Handovers"]

Outputs = list[EngineOutput]


class Ends:
    """Ends requests and candidates; returns their last outputs.

    Args:
        maker: makes the outputs.
        queues: waiting and running groups.
        branches: rows and blocks of sequences.
        saves: saves what ended sequences have generated.
        guides: forgets the grammars of ended requests.
        drafts: learns from ended sequences; None without speculation.
        metrics: counts requests.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        maker: OutputMaker,
        queues: GroupQueues,
        branches: Branches,
        saves: Saves,
        guides: Guides,
        drafts: Drafts | None,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._maker = maker
        self._queues = queues
        self._branches = branches
        self._saves = saves
        self._guides = guides
        self._drafts = drafts
        self._metrics = metrics
        self._clock = clock

    def end(
        self, group: SequenceGroup, reason: FinishReason, error: BatonError | None = None
    ) -> EngineOutput:
        """Ends a request, with all candidates that have not ended."""
        self._maker.drop_prompt_logprobs(group)  # no output carried them, so they are incomplete
        output = self._maker.make(group, finish_reason=reason, is_last=True, error=error)
        self.forget(group, reason)
        return output

    def end_candidate(self, group: SequenceGroup, index: int) -> Outputs:
        """Ends one candidate whose further tokens are not needed, without an output.

        If it was the last one, its request ends with an output, ABORTED. Ranked requests need
        all candidates to find the best, so theirs do not end.
        """
        if group.request.spec.params.is_ranked:
            return []
        live = [branch for branch in group.branches if not branch.is_given_up]
        branch = next((branch for branch in live if branch.index == index), None)
        if branch is None:
            return []
        self._save_ended(branch)
        if len(live) == 1:
            return [self.end(group, FinishReason.ABORTED)]
        if group.state is GroupState.SWAPPED:
            branch.is_given_up = True
        else:
            self._remove(branch)
        return []

    def end_if_over(
        self,
        sequence: Sequence,
        newest: tuple[int, ...],
        details: tuple[TokenLogprobs, ...] = (),
    ) -> Outputs:
        """Ends a candidate if its last token ends it; returns no output if it goes on.

        Args:
            sequence: the candidate.
            newest: its tokens since the last output.
            details: one per token, if the request asks for them.
        """
        group = sequence.group
        if not sequence.is_streamed:
            sequence.token_logprobs += details
        reason = sequence.finish_reason
        if reason is None:
            return []
        if sequence.is_streamed:
            self._save_ended(sequence)
        self._remove(sequence)
        if group.request.spec.params.is_ranked:
            token_ids = tuple(sequence.token_ids[group.num_prompt :])
            score = sequence.logprob / len(token_ids)
            details = tuple(sequence.token_logprobs)
            group.finished.append(FinishedCandidate(token_ids, score, reason, details))
            return [] if group.branches else self.end_ranked(group, group.finished)
        is_last = not group.branches
        output = self._maker.make(
            group,
            sequence.index,
            token_ids=newest,
            logprobs=details,
            finish_reason=reason,
            is_last=is_last,
        )
        if is_last:
            self.forget(group, reason)
        return [output]

    def end_ranked(
        self, group: SequenceGroup, finished: abc.Sequence[FinishedCandidate]
    ) -> Outputs:
        """Ends a group all of whose candidates have ended; returns the best ones, best first."""
        best = sorted(finished, key=lambda candidate: -candidate.score)
        best = best[: group.request.spec.params.n]
        outputs = [
            self._maker.make(
                group,
                index,
                token_ids=candidate.token_ids,
                logprobs=candidate.token_logprobs,
                finish_reason=candidate.reason,
                is_last=index == len(best) - 1,
                score=candidate.score,
            )
            for index, candidate in enumerate(best)
        ]
        self.forget(group, best[-1].reason)
        return outputs

    def end_without_token(self, group: SequenceGroup, token_id: int) -> EngineOutput:
        """Ends a group for which no token could be drawn.

        Args:
            group: the group.
            token_id: `INVALID_TOKEN`, `NO_TOKEN` or `PROCESSOR_FAILED`, which names the cause.
        """
        if token_id == NO_TOKEN:
            error = InvalidArgumentError(
                "structured_outputs, thinking_token_budget, logit_bias, allowed_token_ids, "
                "bad_words, min_tokens and the penalties of this request leave no token to draw "
                "next"
            )
            return self.end(group, FinishReason.ERROR, error)
        if token_id == PROCESSOR_FAILED:
            failure = InternalError("a logits processor failed on this request")
            return self.end(group, FinishReason.ERROR, failure)
        return self.end_poisoned(group)

    def end_poisoned(self, group: SequenceGroup) -> EngineOutput:
        """Ends a group whose logits are not finite.

        Its KV may be the cause, since an unknown step. So no other request may use it, from the
        prefix cache or from the store.
        """
        self._branches.discard(group)
        self._saves.discard(group)
        error = InternalError("the model's output was not finite")
        return self.end(group, FinishReason.ERROR, error)

    def forget(self, group: SequenceGroup, reason: FinishReason) -> None:
        """Removes a request that has its last output."""
        self._metrics.request_ended(reason, self._clock() - group.times.arrived_at)
        self._guides.forget(group)
        self._queues.forget(group)

    def _save_ended(self, sequence: Sequence) -> None:
        """Saves a sequence's blocks by policy, before it ends."""
        if self._drafts is not None:
            self._drafts.sequence_ended(sequence)
        self._branches.unseat(sequence)
        self._saves.save_ended(sequence)

    def _remove(self, sequence: Sequence) -> None:
        sequence.group.branches.remove(sequence)
        self._branches.drop(sequence)
        self._queues.leave_seat(sequence.group)


class Handovers:
    """Hands requests over when their prompts are computed, and moves those that run.

    Args:
        maker: makes outputs.
        ends: ends groups.
        queues: waiting and running groups.
        branches: rows of sequences.
        saves: saves their KV and makes handoffs.
        turns: the engine's turns, which are short while another engine decodes.
    """

    def __init__(
        self,
        maker: OutputMaker,
        ends: Ends,
        queues: GroupQueues,
        branches: Branches,
        saves: Saves,
        turns: EngineTurns,
    ) -> None:
        self._maker = maker
        self._ends = ends
        self._queues = queues
        self._branches = branches
        self._saves = saves
        self._turns = turns

    def hand_over(self, group: SequenceGroup, result: ChunkOutput) -> Outputs:
        """Returns the first tokens and frees the group's blocks.

        The group ends when its saves have ended.
        """
        first = self._maker.make(
            group,
            token_ids=result.token_ids,
            logprobs=result.details,
            first_logprobs=result.logprobs,
        )
        self._saves.save_for_handoff(group)
        self._turns.handed_over()
        self._queues.withdraw(group)
        group.state = GroupState.SAVING
        return [first, *self.report_saved(group)]

    def move(self, group: SequenceGroup) -> Outputs:
        """Ends a request that continues on another engine; a running one when its KV is saved."""
        if group.state is GroupState.SAVING:
            return []
        self._maker.drop_prompt_logprobs(group)  # the other engine computes them
        if group.state is not GroupState.RUNNING or group.root is not None:
            return [self._end_handed_over(group)]
        for branch in group.branches:
            self._branches.unseat(branch)
        self._saves.save_to_move(group)
        self._queues.withdraw(group)
        group.state = GroupState.SAVING
        return self.report_saved(group)

    def report_saved(self, group: SequenceGroup) -> Outputs:
        """Reports blocks that other engines can load now, as a save of the group has ended."""
        saved = self._saves.take_progress(group)
        outputs = [EngineOutput(group.request_id, saved=saved)] if saved else []
        if group.state is GroupState.SAVING and not group.transfer.pending_saves:
            outputs.append(self._end_handed_over(group))
        return outputs

    def _end_handed_over(self, group: SequenceGroup) -> EngineOutput:
        """Ends a group whose saves have ended, with its handoff if none failed."""
        output = self._maker.make(
            group,
            finish_reason=FinishReason.HANDOFF,
            is_last=True,
            handoff=self._saves.commit_handoff(group),
        )
        self._ends.forget(group, FinishReason.HANDOFF)
        return output
