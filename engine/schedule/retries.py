"""`Retries`: tries the requests of a failed step alone, one after the other. Pure.

One request can make a step raise that computes many. So these start over, each in steps of its
own, until it is past the point where the step failed. The one whose own step fails ends, and the
others go on together with the same tokens. While requests wait for that, no other is admitted.
"""

from engine.groups.group import GroupState, SequenceGroup, order_of
from engine.metrics.counts import EngineMetrics
from engine.schedule.admission import Admission
from engine.schedule.queues import GroupQueues
from engine.schedule.step_plan import StepPlan, StepRecord

__all__ = ["Retries"]

_OVER = GroupState.SAVING, GroupState.FINISHED


class Retries:
    """The requests of one scheduler that are to be tried alone.

    Args:
        queues: waiting and running groups.
        admission: admits them.
        metrics: counts them.
    """

    def __init__(self, queues: GroupQueues, admission: Admission, metrics: EngineMetrics) -> None:
        self._queues = queues
        self._admission = admission
        self._metrics = metrics
        # By group: how many tokens of a sequence to compute until it is past the failed step.
        self._targets: dict[SequenceGroup, int] = {}
        # The group that the step in flight computes alone, and whether that passes its target.
        self._tried: SequenceGroup | None = None
        self._is_passing = False

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._targets

    @property
    def are_due(self) -> bool:
        """Whether a group is tried or waits to be tried, so that steps must not overlap."""
        for group in [group for group in self._targets if group.state in _OVER]:
            del self._targets[group]
        return bool(self._targets) or self._tried is not None

    def plan(self, plan: StepPlan) -> bool:
        """Plans a step of the most important group alone; no step may be in flight.

        Returns:
            False if that group must wait for blocks, so that others may run.
        """
        group = min(self._targets, key=order_of)
        self._admission.run_alone(group, plan)
        if not plan.has_chunks:
            return False
        self._tried, self._is_passing = group, self._passes(group)
        return True

    def step_committed(self) -> None:
        """Notes that the oldest step in flight was computed."""
        tried, self._tried = self._tried, None
        if tried is not None and tried in self._targets and self._is_passing:
            del self._targets[tried]
            self._metrics.request_retried("passed")

    def step_failed(self, record: StepRecord) -> SequenceGroup | None:
        """Makes the groups of a failed step start over, and be tried alone.

        Returns:
            The group that the step computed alone, which the caller ends; None if there is none.
        """
        tried, self._tried = self._tried, None
        ends = record.ends()
        if tried is not None:
            self._targets.pop(tried, None)
            self._metrics.request_retried("failed")
        else:
            # Others started over when the step before this one failed.
            new = {group: end for group, end in ends.items() if group not in self._targets}
            if len(ends) == 1:
                tried = next(iter(new), None)
            else:
                self._targets |= new
        for group in record.groups():
            if group is not tried:
                self._queues.start_over(group)
        return tried if tried is not None and tried.state not in _OVER else None

    def _passes(self, group: SequenceGroup) -> bool:
        """Whether the planned step computes all that the failed one would have computed."""
        target = self._targets[group]
        if group.root is not None:
            return group.root.num_scheduled >= target
        return all(s.num_scheduled >= min(len(s.token_ids), target) for s in group.branches)
