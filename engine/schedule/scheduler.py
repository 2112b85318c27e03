"""`Scheduler`: decides what each step computes. Pure: no torch, no I/O, no clock of its own.

Continuous batching (Orca, Yu et al. 2022) over paged KV (Kwon et al. 2023), with chunked prefill
(Sarathi, Agrawal et al. 2023). There are no separate prefill and decode steps: one step mixes
sequences that decode, one token each, with chunks of known tokens, within one token budget.

No deadlock can occur, as the most important group always makes progress
(`engine.schedule.admission`). `engine.schedule.outputs` processes the tokens of a step.

Steps may overlap: `schedule` may be called once more before `commit`, if steps are committed in
order. A sequence that decodes needs no known token for that. Blocks that a step in flight may
touch are not reused before its output is in (`KvCacheManager.step_started`).
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter

from baton.common.errors import BatonError, DeadlineExceededError, InternalError, Reason
from engine.batch import ScheduledBatch, StepOutput
from engine.groups.group import NO_ROW, GroupState, Sequence, SequenceGroup, order_of
from engine.kv_transfer.loads import FinishedLoad
from engine.request import EngineLoad, EngineOutput, EngineRequest, FinishReason, PrefixRequest
from engine.schedule.deadlines import Deadlines
from engine.schedule.parts import SchedulerParts
from engine.schedule.step_plan import StepPlan, StepRecord
from kvstore.handoff import KvHandoff
from kvstore.jobs import ConnectorWork, TransferResults

__all__ = ["Scheduler"]

_row_of = attrgetter("row")

_logger = logging.getLogger("baton.engine")


class Scheduler:
    """Queues, admission, preemption and bookkeeping of one engine.

    Call order per step: `apply`, `take_compiled`, `expire`, (`start_loads` and a wait,) `schedule`,
    (the runner), `commit` or `fail`, `build_work`. Between steps: `add`, `abort`,
    `finish_candidate`, `release_handoff`, `prefetch`, `lend_prefix`.

    Args:
        parts: what it is made of.

    Attributes:
        kv: the KV cache manager.
    """

    def __init__(self, parts: SchedulerParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._new_group = parts.new_group
        self._clock = parts.clock
        self._metrics = parts.metrics
        self.kv = parts.kv
        self._transfers = parts.transfers
        self._decoding = parts.decoding
        self._queues = parts.queues
        self._drafts = parts.drafts
        self._admission = parts.admission
        self._retries = parts.retries
        self._guides = parts.guides
        self._ends = parts.ends
        self._handovers = parts.handovers
        self._outputs = parts.outputs
        self._times = parts.times
        self._groups = parts.queues.groups
        self._deadlines = Deadlines(self._groups)
        self._in_flight: deque[StepRecord] = deque()
        self._num_steps = 0
        self._admits_none = False  # as in the last plan: a running group comes before any load

    @property
    def num_unfinished(self) -> int:
        """Requests that have not had their last output."""
        return len(self._groups)

    @property
    def num_transfers(self) -> int:
        """Connector jobs without a result, those of finished requests included."""
        return len(self._transfers.jobs.open)

    @property
    def has_open_saves(self) -> bool:
        """Whether KV is being saved, by jobs that were not given up."""
        return self._transfers.jobs.has_open_saves

    @property
    def lends_blocks(self) -> bool:
        """Whether other engines may read blocks of this one's pool."""
        return bool(self._transfers.jobs.lent)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is next due."""
        both = (self._deadlines.next, self._transfers.jobs.next_deadline)
        return min((deadline for deadline in both if deadline is not None), default=None)

    def load(self) -> EngineLoad:
        """Returns how busy the engine is."""
        return self._parts.load()

    # Requests.

    def add(self, request: EngineRequest) -> list[EngineOutput]:
        """Queues a request, which the caller has validated (`engine.validation`).

        Returns:
            The outputs of candidates that end at once because of the tokens they have.
        """
        group, params = self._new_group(request), request.spec.params
        self._queues.add(group)
        self._transfers.loads.accept(group)
        if request.spec.deadline is not None:
            self._deadlines.add(request.spec.deadline, group.arrival, group.request_id)
        if params.structured_outputs is not None:
            self._guides.start_compiling(group, params.structured_outputs)
            outputs = self.take_compiled()
        else:
            self._queues.wait_for_admission(group)
            guided = params.thinking_token_budget is not None
            outputs = (
                self._outputs.start_guided(group, None)
                if guided
                else self._outputs.take_progress(group)
            )
        self._metrics.outputs_made(outputs)
        return outputs

    def try_add(self, request: EngineRequest) -> list[EngineOutput]:
        """Like `add`, but a bug that this meets, at whatever point, ends the request alone."""
        request_id = request.spec.request_id
        try:
            return self.add(request)
        except Exception:
            _logger.exception("request %s could not be added", request_id)
        reason, error = FinishReason.ERROR, InternalError("the engine failed on this request")
        if (group := self._groups.get(request_id)) is not None:
            return [self._ends.end(group, reason, error)]
        self._metrics.request_ended(reason, 0.0)
        return [EngineOutput(request_id, finish_reason=reason, is_last=True, error=error)]

    def take_compiled(self) -> list[EngineOutput]:
        """Lets the requests run whose grammars are compiled, and ends those whose are refused.

        Returns:
            Outputs of requests and candidates that end.
        """
        outputs: list[EngineOutput] = []
        for group, result in self._guides.take_compiled():
            if isinstance(result, BatonError):
                outputs.append(self._ends.end(group, FinishReason.ERROR, result))
            else:
                outputs += self._outputs.start_guided(group, result)
        return outputs

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests and frees what they hold. Unknown ids are ignored."""
        known = [self._groups[i] for i in dict.fromkeys(request_ids) if i in self._groups]
        return [self._ends.end(group, FinishReason.ABORTED) for group in known]

    def move(self, request_id: str) -> list[EngineOutput]:
        """Ends a request that continues on another engine, at once or when its KV is saved.

        Its last output has the reason HANDOFF. Unknown ids are ignored.
        """
        group = self._groups.get(request_id)
        return self._handovers.move(group) if group is not None else []

    def finish_candidate(self, request_id: str, index: int) -> list[EngineOutput]:
        """Ends one candidate without an output. Unknown ids and indices are ignored.

        If it was the last one, its request ends with an output, ABORTED.
        """
        group = self._groups.get(request_id)
        return self._ends.end_candidate(group, index) if group is not None else []

    def expire(self) -> list[EngineOutput]:
        """Ends requests whose deadline has passed, and gives up overdue transfers."""
        now = self._clock()
        outputs = self._end_transfers(*self._transfers.expire(now))
        for request_id in self._deadlines.take_passed(now):
            error = DeadlineExceededError(
                "the request's deadline passed on the worker", reason=Reason.REQUEST_DEADLINE
            )
            outputs.append(self._ends.end(self._groups[request_id], FinishReason.ERROR, error))
        return outputs

    def release_handoff(self, handoff_id: str) -> None:
        """Ends a handoff's lease and deletes what was saved for it alone."""
        self._transfers.saves.release_handoff(handoff_id)

    def prefetch(self, handoff: KvHandoff) -> None:
        """Starts to load blocks of a prompt that another engine is still computing.

        They enter the prefix cache, as far as there is room. The handoff must be for this engine.
        """
        self._transfers.prefetches.start(handoff, self._queues.num_awaited_blocks)

    def lend_prefix(self, request: PrefixRequest) -> None:
        """Lends the longest cached prefix of a prompt to another engine."""
        self._transfers.lends.start(request, self._queues.num_awaited_blocks)

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache, and forgets the answers that draft tokens come from; returns
        how many blocks the cache held.

        A KV store keeps its blocks.
        """
        if self._drafts is not None:
            self._drafts.forget_answers()
        return self.kv.reset_prefix_cache()

    def apply(self, results: TransferResults) -> list[EngineOutput]:
        """Processes results of the connector's worker half."""
        return self._end_transfers(*self._transfers.apply(results))

    def build_work(self) -> ConnectorWork:
        """Returns what the connector's worker half must start now."""
        return self._transfers.build_work(self._clock())

    # A step.

    def start_loads(self) -> bool:
        """Starts loads that `schedule` would start, if that must wait and no step is in flight.

        Returns:
            Whether `schedule` may find work for the runner.
        """
        if not self._retries.are_due and not self._admits_none:
            self._admission.start_loads()
        return self._queues.may_run

    def schedule(self) -> ScheduledBatch | None:
        """Returns the next step's work; None if nothing can run now."""
        retries = self._retries.are_due
        if retries and self._in_flight:
            return None
        for _ in range(self._decoding.num_lanes):
            batch = self._schedule_step(retries=retries)
            if batch is not None or not self._decoding:
                return batch
            self._num_steps += 1  # the lane of that step is empty
        return None

    def _schedule_step(self, *, retries: bool) -> ScheduledBatch | None:
        if self._drafts is not None:
            self._drafts.scheduling_began()
        plan = self._new_plan(is_bounded=not retries)
        due: dict[SequenceGroup, list[Sequence]] = {}
        for sequence in self._decoding.take_due(plan.step):
            due.setdefault(sequence.group, []).append(sequence)
        if retries:
            if self._retries.plan(plan):
                return self._start_step(plan)
            plan = self._new_plan()
        if self._drafts is not None:
            plan.num_reserved = sum(1 for _ in self._chunking())
        # The most important first: only groups after the current one are preempted.
        for group in sorted((due | self._queues.chunking).keys(), key=order_of):
            if group.state is not GroupState.RUNNING or group in self._retries:
                continue  # preempted for a group before it, or to be tried alone
            if self._admission.renew_due(group, due.get(group, []), plan):
                self._admission.run_chunks(group, plan)
        if self._queues.waiting and not plan.admits_none and not retries:
            self._admission.admit_waiting(plan)
        self._admits_none = plan.admits_none
        return self._start_step(plan)

    def _new_plan(self, *, is_bounded: bool = True) -> StepPlan:
        """Returns the plan of a step that has nothing but the sequences that decode.

        Args:
            is_bounded: whether its prompts are bounded by time. A step that tries a group alone
                is not: no sequence decodes in it.
        """
        began_at, chunking = self._times.now(), list(self._chunking())
        num_decoding = len(self._decoding)
        num_present = num_decoding + len(chunking) + self._queues.num_waiting
        num_decoding += sum(s.num_scheduled >= s.group.num_prompt for s in chunking)
        prompt_budget = self._times.prompt_budget(
            num_decoding if is_bounded else 0, num_present, self._queues.num_leaving
        )
        self._metrics.step_limited(self._times.limit_s)
        budget = self._config.max_step_tokens
        return StepPlan(
            step=(step := self._num_steps + 1),
            budget=budget - self._decoding.num_in(step),
            began_at=began_at,
            prompt_budget=prompt_budget,
            max_drafts=self._config.max_drafts,
            draft_budget=min(budget, prompt_budget),
        )

    def _chunking(self) -> Iterator[Sequence]:
        """Yields the running sequences that do not decode."""
        sequences = chain.from_iterable(group.running for group in self._queues.chunking)
        return (sequence for sequence in sequences if sequence not in self._decoding)

    def commit(self, batch: ScheduledBatch, output: StepOutput) -> list[EngineOutput]:
        """Processes a step's tokens; returns the requests' outputs."""
        record, now = self._end_step(batch), self._clock()
        self._times.record_step(batch, record.began_at)
        self._retries.step_committed()
        self._count_decoded(record, now)
        outputs: list[EngineOutput] = []
        if output.prompt_details:
            outputs += self._outputs.take_prompt_logprobs(
                record.chunks, batch.chunks, output.prompt_details
            )
        for sequence, chunk, result in zip(record.chunks, batch.chunks, output.chunks, strict=True):
            if sequence.row != chunk.row:
                continue  # ended or preempted meanwhile
            sequence.num_computed = chunk.end
            outputs += self._outputs.take_chunk(sequence, chunk, result, now)
        decoded = output.decoded, output.decoded_logprobs, output.decoded_details
        self._outputs.take_decoded(record.decoding, *decoded, outputs)
        self._metrics.step_committed()
        self.kv.step_reported(batch.step)
        if self._drafts is not None:
            self._drafts.committed(batch)
        return outputs

    def fail(self, batch: ScheduledBatch, error: BatonError) -> list[EngineOutput]:
        """Ends the request of a step that failed. If it computed several, each is tried alone.

        Args:
            batch: the step.
            error: for the request's last output.
        """
        culprit = self._retries.step_failed(self._end_step(batch))
        outputs = [] if culprit is None else [self._ends.end(culprit, FinishReason.ERROR, error)]
        self.kv.step_reported(batch.step)
        return outputs

    def abandon_steps(self, error: BatonError) -> None:
        """Ends every request of the steps in flight, which were interrupted."""
        while self._in_flight:
            record = self._end_step(self._in_flight[0].batch)
            for group in record.groups():
                if self._groups.get(group.request_id) is group:
                    self._ends.end(group, FinishReason.ERROR, error)
            self._retries.step_failed(record)
            self.kv.step_reported(record.batch.step)

    @property
    def steps_in_flight(self) -> list[int]:
        """Numbers of the steps that were scheduled and have not ended."""
        return [record.batch.step for record in self._in_flight]

    def check(self) -> None:
        """Raises an AssertionError if a block leaked or is held twice; see `SchedulerParts`."""
        self._parts.check()

    def _start_step(self, plan: StepPlan) -> ScheduledBatch | None:
        members = self._decoding.members(plan.step)
        record = plan.record(members, self.kv.take_swaps(), self.kv.take_copies())
        if record is None:
            return None
        self._num_steps = plan.step
        self._metrics.step_scheduled(record.batch, self._decoding.num_ruled(plan.step))
        for sequence in plan.entering:
            self._decoding.enter(sequence, plan.step)
        self._in_flight.append(record)
        if self._drafts is not None:
            self._drafts.scheduled(len(record.chunks) + len(record.decoding))
        for sequence in record.chunks:
            if sequence is sequence.group.lead:
                self._transfers.saves.save_ahead(sequence.group, plan.step)
        self.kv.step_started(plan.step)
        return record.batch

    def _count_decoded(self, record: StepRecord, now: float) -> None:
        """Counts the time since the step before for the rows that decoded."""
        rows = list(map(_row_of, record.decoding))
        num_live = len(rows) - rows.count(NO_ROW)  # others ended or were preempted meanwhile
        before = self._decoding.commit(record.batch.step, now)
        self._metrics.decoded(now - before, num_live)

    def _end_step(self, batch: ScheduledBatch) -> StepRecord:
        """Returns the record of a step that is over."""
        record = self._in_flight.popleft()
        assert record.batch is batch, "steps are committed in order"
        self._transfers.step_ended(batch.step)
        for group in record.swapped:
            group.is_returning = False
        return record

    def _end_transfers(
        self, loads: list[FinishedLoad], saved: list[SequenceGroup]
    ) -> list[EngineOutput]:
        outputs = [output for load in loads for output in self._outputs.take_load(load)]
        for group in saved:
            if self._groups.get(group.request_id) is group:
                outputs += self._handovers.report_saved(group)
        return outputs
