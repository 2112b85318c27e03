"""`Handovers`: saves the KV of requests that continue on another engine, and ends them. Pure."""

from engine.batch import ChunkOutput
from engine.groups.group import GroupState, SequenceGroup
from engine.kv_transfer.saves import Saves
from engine.request import EngineOutput, FinishReason
from engine.schedule.branches import Branches
from engine.schedule.ends import Ends
from engine.schedule.output_maker import OutputMaker
from engine.schedule.queues import GroupQueues

__all__ = ["Handovers"]

Outputs = list[EngineOutput]


class Handovers:
    """Hands requests over when their prompts are computed, and moves those that run.

    Args:
        maker: makes outputs.
        ends: ends groups.
        queues: waiting and running groups.
        branches: rows of sequences.
        saves: saves their KV and makes handoffs.
    """

    def __init__(
        self,
        maker: OutputMaker,
        ends: Ends,
        queues: GroupQueues,
        branches: Branches,
        saves: Saves,
    ) -> None:
        self._maker = maker
        self._ends = ends
        self._queues = queues
        self._branches = branches
        self._saves = saves

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
