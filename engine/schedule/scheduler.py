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

import heapq
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter
from typing import Protocol

from baton.common.errors import BatonError, DeadlineExceededError, InternalError
from baton.common.reasons import Reason
from engine.batch import ScheduledBatch, StepOutput
from engine.config import EngineConfig
from engine.groups.group import NO_ROW, GroupState, Sequence, SequenceGroup, order_of
from engine.kv_cache.manager import KvCacheManager
from engine.kv_cache.spec import spec_of
from engine.kv_transfer.costs import LoadCosts
from engine.kv_transfer.loads import FinishedLoad
from engine.kv_transfer.save_policy import SavePolicy
from engine.kv_transfer.transfers import Transfers
from engine.metrics.counts import EngineMetrics
from engine.request import EngineLoad, EngineOutput, EngineRequest, FinishReason
from engine.runner import ModelInfo, StepCosts
from engine.schedule.admission import Admission
from engine.schedule.branches import Branches
from engine.schedule.decode_set import DecodeSet
from engine.schedule.guides import GrammarSource, Guides
from engine.schedule.outputs import OutputProcessor
from engine.schedule.queues import GroupQueues
from engine.schedule.retries import Retries
from engine.schedule.step_plan import StepPlan, StepRecord
from engine.speculation.drafts import Drafts
from kvstore.block_key import BlockKeyChain
from kvstore.connector import KvConnectorScheduler
from kvstore.guard.metrics import TransferMetrics
from kvstore.handoff import KvHandoff
from kvstore.jobs import ConnectorWork, TransferResults

__all__ = ["Deadlines", "Scheduler"]

_row_of = attrgetter("row")

_logger = logging.getLogger("baton.engine")

# Deadlines of ended requests are removed when they outnumber the live requests by this.
_MAX_STALE = 64


class _Arrived(Protocol):
    @property
    def arrival(self) -> int: ...


class Deadlines:
    """A heap of the live requests' deadlines.

    Args:
        live: the live requests by id. A new request may reuse an id with another arrival number.
    """

    def __init__(self, live: Mapping[str, _Arrived]) -> None:
        self._live = live
        self._heap: list[tuple[float, int, str]] = []

    @property
    def next(self) -> float | None:
        """The earliest deadline; it may be of a request that has ended."""
        return self._heap[0][0] if self._heap else None

    def add(self, deadline: float, arrival: int, request_id: str) -> None:
        """Adds a live request's deadline."""
        heapq.heappush(self._heap, (deadline, arrival, request_id))
        if len(self._heap) > 2 * len(self._live) + _MAX_STALE:
            arrivals = {request.arrival for request in self._live.values()}
            self._heap = [entry for entry in self._heap if entry[1] in arrivals]
            heapq.heapify(self._heap)

    def take_passed(self, now: float) -> list[str]:
        """Returns the ids of live requests whose deadline has passed; each only once."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._heap)
            request = self._live.get(request_id)
            if request is not None and request.arrival == arrival:
                passed.append(request_id)
        return passed


class Scheduler:
    """Queues, admission, preemption and bookkeeping of one engine.

    Call order per step: `apply`, `take_compiled`, `expire`, `schedule`, (the runner), `commit`
    or `fail`, `build_work`. Between steps: `add`, `abort`, `finish_candidate`,
    `release_handoff`, `prefetch`.

    Args:
        config: limits.
        info: the model's facts.
        num_blocks: KV blocks in the pool.
        num_host_blocks: KV blocks in the host pool.
        costs: measured costs of computing and swapping, for preemption and loads.
        namespace: digest that block keys are rooted in.
        connector: scheduler half of the KV connector; a null connector if there is none.
        grammars: compiles constraints.
        metrics: counts transfers; None discards them.
        engine_metrics: counts requests and steps; None discards them.
        clock: monotonic seconds.

    Attributes:
        kv: the KV cache manager.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        *,
        num_blocks: int,
        num_host_blocks: int,
        costs: StepCosts,
        namespace: bytes,
        connector: KvConnectorScheduler,
        grammars: GrammarSource,
        metrics: TransferMetrics | None = None,
        engine_metrics: EngineMetrics | None = None,
        clock: Callable[[], float],
    ) -> None:
        spec = spec_of(config, info.windows)
        self._config = config
        self._info = info
        self._namespace = namespace
        self._clock = clock
        self._metrics = engine_metrics or EngineMetrics()
        self.kv = KvCacheManager(
            num_blocks,
            spec,
            enable_prefix_caching=config.enable_prefix_caching,
            num_host_blocks=num_host_blocks,
        )
        self._transfers = Transfers(
            connector,
            self.kv,
            block_size=config.transfer_block_size,
            namespace=namespace,
            policy=SavePolicy.of(config, spec, connector),
            timeout_s=config.kv_transfer_timeout_s,
            costs=LoadCosts.of(config, costs),
            metrics=metrics or TransferMetrics(),
            clock=clock,
        )
        self._decoding = DecodeSet(config.block_size, config.num_lanes)
        self._branches = Branches(self.kv, self._decoding, config.max_running)
        self._queues = GroupQueues(self.kv, self._transfers, self._branches, self._metrics)
        self._drafts = _drafts_of(config, costs, self._metrics, clock)
        self._admission = Admission(
            config,
            self.kv,
            self._queues,
            self._transfers,
            self._branches,
            self._decoding,
            costs,
            self._drafts,
            clock,
        )
        self._retries = Retries(self._queues, self._admission, self._metrics)
        self._guides = Guides(grammars, info.vocab_size)
        self._outputs = OutputProcessor(
            self._queues,
            self._branches,
            self._transfers,
            self._guides,
            self._drafts,
            config.kv_load_failure_policy,
            self._metrics,
            clock,
        )
        self._groups = self._queues.groups
        self._deadlines = Deadlines(self._groups)
        self._in_flight: deque[StepRecord] = deque()
        self._num_arrivals = 0
        self._num_steps = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that have not had their last output."""
        return len(self._groups)

    @property
    def num_transfers(self) -> int:
        """Connector jobs without a result, those of finished requests included."""
        return self._transfers.in_flight

    @property
    def has_open_saves(self) -> bool:
        """Whether KV is being saved, by jobs that were not given up."""
        return self._transfers.has_open_saves

    @property
    def lends_blocks(self) -> bool:
        """Whether other engines may read blocks of this one's pool."""
        return self._transfers.lends_blocks

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is next due."""
        both = (self._deadlines.next, self._transfers.next_deadline)
        return min((deadline for deadline in both if deadline is not None), default=None)

    def load(self) -> EngineLoad:
        """Returns how busy the engine is."""
        return EngineLoad(
            num_running=self._queues.num_running,
            num_waiting=self._queues.num_waiting + self._guides.num_compiling,
            num_queued_tokens=self._queues.num_queued_tokens,
            num_free_blocks=self.kv.pool.num_free,
            num_blocks=self.kv.pool.num_blocks,
            prefix_cache_queries=self.kv.num_queries,
            prefix_cache_hits=self.kv.num_hits,
            num_preemptions=self._admission.num_preemptions,
            num_swapped_blocks=self.kv.num_host_used,
            num_swap_preemptions=self._admission.num_swap_preemptions,
            num_loading=self._queues.num_loading,
            num_compiling=self._guides.num_compiling,
            num_swapped=self._queues.num_swapped,
            num_cached_blocks=self.kv.pool.num_cached,
        )

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
            return [self._outputs.end(group, reason, error)]
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
                outputs.append(self._outputs.end(group, FinishReason.ERROR, result))
            else:
                outputs += self._outputs.start_guided(group, result)
        return outputs

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests and frees what they hold. Unknown ids are ignored."""
        known = [self._groups[i] for i in dict.fromkeys(request_ids) if i in self._groups]
        return [self._outputs.end(group, FinishReason.ABORTED) for group in known]

    def move(self, request_id: str) -> list[EngineOutput]:
        """Ends a request that continues on another engine, at once or when its KV is saved.

        Its last output has the reason HANDOFF. Unknown ids are ignored.
        """
        group = self._groups.get(request_id)
        return self._outputs.move(group) if group is not None else []

    def finish_candidate(self, request_id: str, index: int) -> list[EngineOutput]:
        """Ends one candidate without an output. Unknown ids and indices are ignored.

        If it was the last one, its request ends with an output, ABORTED.
        """
        group = self._groups.get(request_id)
        return self._outputs.end_candidate(group, index) if group is not None else []

    def expire(self) -> list[EngineOutput]:
        """Ends requests whose deadline has passed, and gives up overdue transfers."""
        now = self._clock()
        outputs = self._end_transfers(*self._transfers.expire(now))
        for request_id in self._deadlines.take_passed(now):
            error = DeadlineExceededError(
                "the request's deadline passed on the worker", reason=Reason.REQUEST_DEADLINE
            )
            outputs.append(self._outputs.end(self._groups[request_id], FinishReason.ERROR, error))
        return outputs

    def release_handoff(self, handoff_id: str) -> None:
        """Ends a handoff's lease and deletes what was saved for it alone."""
        self._transfers.saves.release_handoff(handoff_id)

    def prefetch(self, handoff: KvHandoff) -> None:
        """Starts to load blocks of a prompt that another engine is still computing.

        They enter the prefix cache, as far as there is room. The handoff must be for this engine.
        """
        self._transfers.prefetches.start(handoff, self._queues.num_awaited_blocks)

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache, and forgets the answers that guesses come from; returns how
        many blocks the cache held.

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
        budget = self._config.max_num_batched_tokens
        plan = StepPlan(self._num_steps + 1, budget, draft_budget=budget)
        plan.budget -= self._decoding.num_in(plan.step)
        due: dict[SequenceGroup, list[Sequence]] = {}
        for sequence in self._decoding.take_due(plan.step):
            due.setdefault(sequence.group, []).append(sequence)
        if retries and self._retries.plan(plan):
            return self._start_step(plan)
        if self._drafts is not None:
            plan.num_reserved = self._num_chunking()
        # The most important first: only groups after the current one are preempted.
        for group in sorted((due | self._queues.chunking).keys(), key=order_of):
            if group.state is not GroupState.RUNNING or group in self._retries:
                continue  # preempted for a group before it, or to be tried alone
            if self._admission.renew_due(group, due.get(group, []), plan):
                self._admission.run_chunks(group, plan)
        if self._queues.waiting and not plan.admits_none and not retries:
            self._admission.admit_waiting(plan)
        return self._start_step(plan)

    def _num_chunking(self) -> int:
        """Returns how many running sequences do not decode."""
        sequences = chain.from_iterable(group.running for group in self._queues.chunking)
        return sum(sequence not in self._decoding for sequence in sequences)

    def commit(self, batch: ScheduledBatch, output: StepOutput) -> list[EngineOutput]:
        """Processes a step's tokens; returns the requests' outputs."""
        record, now = self._end_step(batch), self._clock()
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
        self._outputs.take_decoded(
            record.decoding,
            output.decoded,
            output.decoded_logprobs,
            output.decoded_details,
            outputs,
        )
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
        outputs = [] if culprit is None else [self._outputs.end(culprit, FinishReason.ERROR, error)]
        self.kv.step_reported(batch.step)
        return outputs

    def abandon_steps(self, error: BatonError) -> None:
        """Ends every request of the steps in flight, which were interrupted."""
        while self._in_flight:
            record = self._end_step(self._in_flight[0].batch)
            for group in record.groups():
                if self._groups.get(group.request_id) is group:
                    self._outputs.end(group, FinishReason.ERROR, error)
            self._retries.step_failed(record)
            self.kv.step_reported(record.batch.step)

    @property
    def steps_in_flight(self) -> list[int]:
        """Numbers of the steps that were scheduled and have not ended."""
        return [record.batch.step for record in self._in_flight]

    def check(self) -> None:
        """Verifies that every block reference belongs to a sequence, a job or a fence.

        Raises:
            AssertionError: a block leaked or is held twice, which is a bug.
        """
        self.kv.check()
        owned = [block for group in self._groups.values() for block in group.held_blocks()]
        owned += self._transfers.held_blocks() + self.kv.held_blocks()
        if Counter(owned) != self.kv.pool.references():
            raise AssertionError("reference counts differ from owners")

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
                outputs += self._outputs.report_saved(group)
        return outputs

    def _new_group(self, request: EngineRequest) -> SequenceGroup:
        now, arrival = self._clock(), self._num_arrivals
        self._num_arrivals += 1
        # A level of priority counts as some seconds of waiting, so every request gets its turn.
        rank = now + request.spec.priority * self._config.priority_ageing_s
        return SequenceGroup(
            request=request,
            order=(rank, arrival),
            keys=BlockKeyChain(
                self._namespace,
                self._config.transfer_block_size,
                cache_salt=request.spec.cache_salt,
                blocks_per_pool_block=self._config.block_size // self._config.transfer_block_size,
            ),
            max_len=min(request.spec.max_total_tokens, self._info.max_model_len),
            arrived_at=now,
        )


def _drafts_of(
    config: EngineConfig, costs: StepCosts, metrics: EngineMetrics, clock: Callable[[], float]
) -> Drafts | None:
    """Returns the drafts of an engine; None without speculation, or without room for any."""
    if config.max_drafts < 1:
        return None
    return Drafts(config, costs, metrics, clock)
