"""`Scheduler`: decides what each step computes. Pure: no torch, no I/O, no clock of its own.

Continuous batching (Orca, Yu et al. 2022) over paged KV (Kwon et al. 2023),
with chunked prefill (Sarathi, Agrawal et al. 2023). There are no prefill and
decode modes: one step mixes sequences that decode, a token each, and chunks
of tokens that are known, within one token budget.

Nothing wedges, because the most important group always makes progress: see
`engine.schedule.admission`. What becomes of the tokens is told in `engine.schedule.outputs`.

Steps may overlap: `schedule` may be called once more before `commit`, as long
as steps are committed in order. A sequence that decodes needs no known token
for that. Blocks that a step in flight may touch are not given to others
before it has reported (`KvCacheManager.step_started`).

`Deadlines`: which request's time is up next. Pure.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from baton.errors import BatonError, DeadlineExceededError
from engine.batch import ScheduledBatch, StepOutput
from engine.config import EngineConfig
from engine.group import GroupState, Sequence, SequenceGroup, order_of
from engine.kv_cache.manager import KvCacheManager
from engine.kv_cache.spec import KvCacheSpec, spec_of
from engine.kv_transfer.costs import LoadCosts
from engine.kv_transfer.saves import SavePolicy
from engine.kv_transfer.transfers import FinishedLoad, Transfers
from engine.request import EngineLoad, EngineRequest, FinishReason, RequestOutput
from engine.runner import ModelInfo, StepCosts
from engine.schedule.admission import Admission
from engine.schedule.branches import Branches
from engine.schedule.decode_set import DecodeSet
from engine.schedule.outputs import Outcomes
from engine.schedule.queues import GroupQueues
from engine.schedule.step_plan import StepPlan, StepRecord
from kvstore.block_key import BlockKeyChain
from kvstore.connector import KvConnectorScheduler
from kvstore.handoff import KvHandoff
from kvstore.jobs import ConnectorWork, TransferResults
from kvstore.metrics import TransferMetrics

__all__ = ["Deadlines", "Scheduler"]

# Deadlines of ended requests stay in the heap until they outnumber the live ones by this.
_MAX_STALE = 64


class _Arrived(Protocol):
    arrival: int


class Deadlines:
    """A heap of deadlines over the live requests.

    Args:
        live: the live requests by id; an id may come again with another arrival number.
    """

    def __init__(self, live: Mapping[str, _Arrived]) -> None:
        self._live = live
        self._heap: list[tuple[float, int, str]] = []

    @property
    def next(self) -> float | None:
        """When `take_passed` next has something to tell."""
        return self._heap[0][0] if self._heap else None

    def add(self, deadline: float, arrival: int, request_id: str) -> None:
        """Notes a live request's deadline."""
        heapq.heappush(self._heap, (deadline, arrival, request_id))
        if len(self._heap) > 2 * len(self._live) + _MAX_STALE:
            arrivals = {request.arrival for request in self._live.values()}
            self._heap = [entry for entry in self._heap if entry[1] in arrivals]
            heapq.heapify(self._heap)

    def take_passed(self, now: float) -> list[str]:
        """Ids of the live requests whose deadline has passed, each told once."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._heap)
            request = self._live.get(request_id)
            if request is not None and request.arrival == arrival:
                passed.append(request_id)
        return passed


class Scheduler:
    """Queues, admission, preemption and bookkeeping of one engine.

    Call order per step: `apply`, `expire`, `schedule`, (the runner), `commit`
    or `fail`, `build_work`. Between steps: `add`, `abort`, `finish_candidate`,
    `release_handoff`, `prefetch`.

    Args:
        config: limits and role.
        info: the model's facts.
        num_blocks: KV blocks in the pool.
        num_host_blocks: KV blocks in the host pool.
        costs: what preemption weighs, and what loads are weighed against.
        namespace: digest that block keys are rooted in.
        connector: scheduler half of the KV connector, if there is one.
        metrics: where transfers are counted, if anywhere.
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
        connector: KvConnectorScheduler | None,
        metrics: TransferMetrics | None = None,
        clock: Callable[[], float],
    ) -> None:
        spec = spec_of(config, info.windows)
        self._config = config
        self._info = info
        self._namespace = namespace
        self._clock = clock
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
            policy=_save_policy(config, spec, connector),
            timeout_s=config.kv_transfer_timeout_s,
            costs=LoadCosts.of(config, costs),
            metrics=metrics or TransferMetrics(),
            clock=clock,
        )
        self._decoding = DecodeSet(config.block_size)
        self._branches = Branches(self.kv, self._decoding, config.max_running)
        self._queues = GroupQueues(self.kv, self._transfers, self._branches)
        self._admission = Admission(
            config,
            self.kv,
            self._queues,
            self._transfers,
            self._branches,
            self._decoding,
            costs,
            clock,
        )
        self._outcomes = Outcomes(
            self._queues, self._branches, self._transfers, config.kv_load_failure_policy, clock
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
        """Loads and saves under way, those of finished requests included."""
        return self._transfers.in_flight

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is next due."""
        both = (self._deadlines.next, self._transfers.next_deadline)
        return min((deadline for deadline in both if deadline is not None), default=None)

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return EngineLoad(
            num_running=self._queues.num_running,
            num_waiting=self._queues.num_waiting,
            num_queued_tokens=self._queues.num_queued_tokens,
            num_free_blocks=self.kv.pool.num_free,
            num_blocks=self.kv.pool.num_blocks,
            prefix_cache_queries=self.kv.num_queries,
            prefix_cache_hits=self.kv.num_hits,
            num_preemptions=self._admission.num_preemptions,
            num_swapped_blocks=self.kv.num_host_used,
        )

    # Requests.

    def add(self, request: EngineRequest) -> list[RequestOutput]:
        """Queues a request, which the caller has validated (`engine.validation`).

        Returns:
            The outputs of candidates that end at once because of the tokens they have.
        """
        group = self._new_group(request)
        self._queues.enqueue(group)
        self._transfers.accept(group)
        if request.spec.deadline is not None:
            self._deadlines.add(request.spec.deadline, group.arrival, group.request_id)
        return self._outcomes.take_progress(group)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests and frees what they hold; unknown ids are passed over."""
        known = [self._groups[i] for i in dict.fromkeys(request_ids) if i in self._groups]
        return [self._outcomes.end(group, FinishReason.ABORTED) for group in known]

    def finish_candidate(self, request_id: str, index: int) -> list[RequestOutput]:
        """Ends one candidate without an output, and with the last one its request, ABORTED.
        Unknown ones are passed over.
        """
        group = self._groups.get(request_id)
        return self._outcomes.end_candidate(group, index) if group is not None else []

    def expire(self) -> list[RequestOutput]:
        """Ends requests whose deadline has passed, and gives up overdue transfers."""
        now = self._clock()
        outputs = self._take_transfers(*self._transfers.expire(now))
        for request_id in self._deadlines.take_passed(now):
            error = DeadlineExceededError("the request's deadline passed on the worker")
            outputs.append(self._outcomes.end(self._groups[request_id], FinishReason.ERROR, error))
        return outputs

    def release_handoff(self, handoff_id: str) -> None:
        """Drops what was kept for one handoff alone."""
        self._transfers.release_handoff(handoff_id)

    def prefetch(self, handoff: KvHandoff) -> None:
        """Begins to load blocks of a prompt that another engine is still computing."""
        self._transfers.prefetch(handoff, self._queues.num_awaited_blocks)

    def apply(self, results: TransferResults) -> list[RequestOutput]:
        """Takes in what the connector's worker half reported."""
        return self._take_transfers(*self._transfers.apply(results))

    def build_work(self) -> ConnectorWork:
        """What the connector's worker half must start now."""
        return self._transfers.build_work(self._clock())

    # A step.

    def schedule(self) -> ScheduledBatch | None:
        """Chooses this step's work; None if nothing can run now."""
        plan = StepPlan(self._num_steps + 1, self._config.max_num_batched_tokens)
        plan.budget -= len(self._decoding)
        due: dict[SequenceGroup, list[Sequence]] = {}
        for sequence in self._decoding.take_due(plan.step):
            due.setdefault(sequence.group, []).append(sequence)
        # The most important first: whoever gives way has not been looked at yet.
        for group in sorted((due | self._queues.chunking).keys(), key=order_of):
            if group.state is not GroupState.RUNNING:
                continue  # gave way to one before it
            if self._admission.renew_due(group, due.get(group, []), plan):
                self._admission.run_chunks(group, plan)
        if not plan.has_preempted:
            self._admission.admit_waiting(plan)
        return self._start_step(plan)

    def commit(self, batch: ScheduledBatch, output: StepOutput) -> list[RequestOutput]:
        """Takes in a step's tokens; returns what the requests shall hear of it."""
        record = self._report(batch)
        outputs: list[RequestOutput] = []
        for sequence, chunk, result in zip(record.chunks, batch.chunks, output.chunks, strict=True):
            if sequence.row != chunk.row:
                continue  # ended or preempted meanwhile
            sequence.num_computed = chunk.start_position + chunk.num_tokens
            outputs += self._outcomes.take_chunk(sequence, result)
        self._outcomes.take_decoded(
            record.decoding, output.decoded, output.decoded_logprobs, outputs
        )
        self.kv.step_reported(batch.step)
        return outputs

    def fail(self, batch: ScheduledBatch, error: BatonError) -> list[RequestOutput]:
        """Ends every request of a step that could not be executed."""
        groups = list(self._report(batch).groups())
        live = [group for group in groups if self._groups.get(group.request_id) is group]
        outputs = [self._outcomes.end(group, FinishReason.ERROR, error) for group in live]
        self.kv.step_reported(batch.step)
        return outputs

    def check(self) -> None:
        """Verifies that every block reference belongs to a sequence, a job or a fence.

        Raises:
            AssertionError: a block leaked or is held twice; a bug.
        """
        self.kv.check()
        owned = [block for group in self._groups.values() for block in group.held_blocks()]
        owned += self._transfers.held_blocks() + self.kv.held_blocks()
        if Counter(owned) != self.kv.pool.references():
            raise AssertionError("reference counts differ from owners")

    def _start_step(self, plan: StepPlan) -> ScheduledBatch | None:
        members = self._decoding.members()
        record = plan.record(members, self.kv.take_swaps(), self.kv.take_copies())
        if record is None:
            return None
        self._num_steps = plan.step
        for sequence in plan.entering:
            self._decoding.enter(sequence, plan.step + 1)
        self._in_flight.append(record)
        for sequence in record.chunks:
            if sequence is sequence.group.lead:
                self._transfers.save_ahead(sequence.group, plan.step)
        self.kv.step_started(plan.step)
        return record.batch

    def _report(self, batch: ScheduledBatch) -> StepRecord:
        """The step is over: whose it was."""
        record = self._in_flight.popleft()
        assert record.batch is batch, "steps are committed in order"
        self._transfers.step_ended(batch.step)
        for group in record.swapped:
            group.is_returning = False
        return record

    def _take_transfers(
        self, loads: list[FinishedLoad], saved: list[SequenceGroup]
    ) -> list[RequestOutput]:
        outputs = [output for load in loads for output in self._outcomes.take_load(load)]
        for group in saved:
            if self._groups.get(group.request_id) is group:
                outputs += self._outcomes.tell_saved(group)
        return outputs

    def _new_group(self, request: EngineRequest) -> SequenceGroup:
        now, arrival = self._clock(), self._num_arrivals
        self._num_arrivals += 1
        # A level of priority counts as so many seconds of waiting: nobody waits forever.
        rank = now - request.spec.priority * self._config.priority_ageing_s
        return SequenceGroup(
            request=request,
            arrival=arrival,
            order=(rank, arrival),
            keys=BlockKeyChain(
                self._namespace,
                self._config.transfer_block_size,
                cache_salt=request.spec.cache_salt,
                blocks_per_pool_block=self._config.block_size // self._config.transfer_block_size,
            ),
            max_len=min(request.spec.max_total_tokens, self._info.max_model_len),
            hands_over=self._config.role == "prefill",
            arrived_at=now,
        )


def _save_policy(
    config: EngineConfig, spec: KvCacheSpec, connector: KvConnectorScheduler | None
) -> SavePolicy:
    """What the engine publishes: nothing that nobody could find."""
    # Blocks that go whole are whole when their step is over. In the overlapped loop a step may
    # begin before the one before it has failed, and compute on what that left undone.
    ahead = (
        connector is not None
        and connector.saves_ahead
        and config.kv_transfer_layer_slices > 1
        and not config.async_scheduling
    )
    if config.role == "prefill":
        return SavePolicy(prompts=True, ahead=ahead)
    if connector is None or not connector.finds_by_key:
        return SavePolicy()
    is_both = config.role == "both"
    prompts = SavePolicy(prompts=is_both, ahead=is_both and ahead)
    if config.kv_publish == "off":
        return prompts
    if any(spec.windows):  # at the end, or after a while, what lies behind a window is gone
        return SavePolicy(prompts=True, ahead=ahead, interval=1, at_end=True)
    interval = int(config.kv_publish) if config.kv_publish.isdecimal() else None
    return replace(prompts, interval=interval, at_end=True)
