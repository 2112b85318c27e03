"""`Scheduler`: decides what each step computes. Pure: no torch, no I/O, no clock of its own.

Continuous batching (Orca, Yu et al. 2022) over paged KV (Kwon et al. 2023),
with chunked prefill (Sarathi, Agrawal et al. 2023). There are no prefill and
decode modes: each step gives a sequence up to `num_uncomputed` tokens within
one token budget, running sequences first. A sequence that lacks a block
preempts the least important running one, which will recompute.

A sequence is admitted only when all its tokens so far get blocks. So a prompt
that started always gets to its end, and running alone every admitted request
fits: the most important sequence always makes progress.
"""

import heapq
import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable

from baton.errors import AbortedError, BatonError, DeadlineExceededError, InternalError
from engine.batch import ScheduledBatch, ScheduledSequence, StepOutput
from engine.block_pool import Allocation
from engine.config import EngineConfig
from engine.kv_cache_manager import KvCacheManager
from engine.request import EngineLoad, EngineRequest, FinishReason, RequestOutput
from engine.runner import ModelInfo
from engine.sequence import Sequence, SequenceState
from engine.transfers import FinishedLoad, Transfers
from kvstore.block_key import BlockKeyChain
from kvstore.connector import ConnectorWork, KvConnectorScheduler, TransferResults
from kvstore.handoff import KvHandoff

__all__ = ["Scheduler"]

# Deadlines of ended requests stay in the heap until they outnumber the live ones by this.
_MAX_STALE_DEADLINES = 64

_logger = logging.getLogger("baton.engine")


class Scheduler:
    """Queues, admission, preemption and bookkeeping of one engine.

    Call order per step: `apply`, `expire`, `schedule`, (the runner), `commit`
    or `fail`, `build_work`. Between steps: `add`, `abort`, `release_handoff`.

    Args:
        config: limits and role.
        info: the model's facts.
        num_blocks: KV blocks in the pool.
        namespace: digest that block keys are rooted in.
        connector: scheduler half of the KV connector, if there is one.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        *,
        num_blocks: int,
        namespace: bytes,
        connector: KvConnectorScheduler | None,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._max_model_len = info.max_model_len
        self._namespace = namespace
        self._clock = clock
        self._kv = KvCacheManager(
            num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self._transfers = Transfers(
            connector,
            self._kv.pool,
            block_size=config.block_size,
            namespace=namespace,
            saves=config.role in ("prefill", "both"),
        )
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # sorted by Sequence.order
        self._running: list[Sequence] = []  # sorted by Sequence.order
        self._num_loading = 0
        self._deadlines: list[tuple[float, int, str]] = []
        self._num_arrivals = 0
        self._num_steps = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that have not had their last output."""
        return len(self._sequences)

    @property
    def num_transfers(self) -> int:
        """Loads and saves under way, those of finished requests included."""
        return self._transfers.in_flight

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is next due."""
        return self._deadlines[0][0] if self._deadlines else None

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        live = (*self._running, *self._waiting)
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + self._num_loading,
            num_queued_tokens=sum(sequence.num_queued_prompt for sequence in live),
            num_free_blocks=self._kv.pool.num_free,
            num_blocks=self._kv.pool.num_blocks,
        )

    def add(self, request: EngineRequest) -> None:
        """Queues a request, which the caller has validated (`engine.validation`)."""
        keys = BlockKeyChain(
            self._namespace, self._config.block_size, cache_salt=request.cache_salt
        )
        sequence = Sequence(request, self._num_arrivals, keys, self._clock())
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        insort(self._waiting, sequence, key=_order)
        if request.deadline is not None:
            self._add_deadline(request.deadline, sequence)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests and frees what they hold; unknown ids are passed over."""
        known = [self._sequences[i] for i in request_ids if i in self._sequences]
        return [self._end(sequence, FinishReason.ABORTED) for sequence in known]

    def expire(self) -> list[RequestOutput]:
        """Ends requests whose deadline has passed."""
        outputs, now = [], self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:
                error = DeadlineExceededError("the request's deadline passed on the worker")
                outputs.append(self._end(sequence, FinishReason.ERROR, error=error))
        return outputs

    def release_handoff(self, handoff_id: str) -> None:
        """Drops what was kept for one handoff alone."""
        self._transfers.release_handoff(handoff_id)

    def apply(self, results: TransferResults) -> list[RequestOutput]:
        """Takes in what the connector's worker half reported."""
        loads, saved = self._transfers.apply(results)
        outputs = [output for load in loads if (output := self._finish_load(load))]
        handed_over = (s for s in saved if s.state is SequenceState.SAVING)
        return outputs + [self._end(s, FinishReason.HANDOFF) for s in handed_over]

    def build_work(self) -> ConnectorWork:
        """What the connector's worker half must start now."""
        return self._transfers.build_work()

    def schedule(self) -> ScheduledBatch | None:
        """Chooses this step's work; None if nothing can run now."""
        shares: list[ScheduledSequence] = []
        budget, preempted = self._schedule_running(shares)
        if not preempted:
            self._admit_waiting(shares, budget)
        if not shares:
            return None
        self._num_steps += 1
        return ScheduledBatch(step=self._num_steps, sequences=tuple(shares))

    def commit(self, batch: ScheduledBatch, output: StepOutput) -> list[RequestOutput]:
        """Takes in a step's tokens; returns what the requests shall hear of it."""
        outputs = []
        for share, token_id in zip(batch.sequences, output.token_ids, strict=True):
            sequence = self._sequences[share.request_id]
            if share.draw is not None and token_id is None:
                outputs.append(self._end_poisoned(sequence))
                continue
            sequence.num_computed += share.num_tokens
            self._kv.register_computed(sequence)
            self._transfers.save_computed(sequence)
            if token_id is not None:
                outputs += self._append_token(sequence, token_id)
        return outputs

    def fail(self, batch: ScheduledBatch, error: BatonError) -> list[RequestOutput]:
        """Ends every request of a step that could not be executed."""
        sequences = [self._sequences[share.request_id] for share in batch.sequences]
        return [self._end(s, FinishReason.ERROR, error=error) for s in sequences]

    def check(self) -> None:
        """Verifies that every block reference belongs to a sequence or a job.

        Raises:
            AssertionError: a block leaked or is held twice; a bug.
        """
        self._kv.pool.check()
        owned = [block for s in self._sequences.values() for block in s.block_ids]
        owned += self._transfers.held_blocks()
        if Counter(owned) != self._kv.pool.references():
            raise AssertionError("reference counts differ from owners")

    def _add_deadline(self, deadline: float, sequence: Sequence) -> None:
        heapq.heappush(self._deadlines, (deadline, sequence.arrival, sequence.request_id))
        if len(self._deadlines) > 2 * len(self._sequences) + _MAX_STALE_DEADLINES:
            live = {sequence.arrival for sequence in self._sequences.values()}
            self._deadlines = [entry for entry in self._deadlines if entry[1] in live]
            heapq.heapify(self._deadlines)

    # Running sequences.

    def _schedule_running(self, shares: list[ScheduledSequence]) -> tuple[int, bool]:
        """Gives running sequences their shares; returns the budget left and whether
        anybody was preempted.
        """
        budget, preempted, index = self._config.max_num_batched_tokens, False, 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            if not self._kv.can_grow(sequence):
                preempted = True
                if not self._preempt_after(index):
                    break
                continue
            self._kv.grow(sequence)
            budget -= self._take_share(sequence, budget, shares)
            index += 1
        return budget, preempted

    def _take_share(self, sequence: Sequence, budget: int, shares: list[ScheduledSequence]) -> int:
        num_tokens = min(sequence.num_uncomputed, budget)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = self._clock()
        shares.append(sequence.share_of_step(num_tokens))
        return num_tokens

    def _preempt_after(self, index: int) -> bool:
        """Preempts the least important running sequence, if it comes after `index`.

        Where it is the one at `index` itself, that one waits: for blocks of
        transfers if it runs alone, else by going back to the queue.
        """
        if index == len(self._running) - 1 == 0:
            return False
        victim = self._running.pop()
        self._kv.free(victim)
        self._transfers.forget(victim)
        victim.state = SequenceState.WAITING
        insort(self._waiting, victim, key=_order)
        _logger.debug("preempted %s", victim.request_id)
        return index < len(self._running)

    # Waiting sequences.

    def _admit_waiting(self, shares: list[ScheduledSequence], budget: int) -> None:
        """Admits waiting sequences in order, passing over those whose look-up is open."""
        for sequence in self._waiting[: self._config.max_num_seqs]:
            num_active = len(self._running) + self._num_loading
            if budget == 0 or num_active >= self._config.max_num_seqs:
                break
            num_loadable = self._transfers.num_loadable(sequence)
            if num_loadable is None:
                continue
            matched = self._kv.match_prefix(sequence)
            if self._kv.can_admit(sequence, matched, alone=num_active == 0) is not Allocation.OK:
                break
            self._waiting.remove(sequence)
            self._kv.admit(sequence, matched)
            if self._transfers.start_load(sequence, num_loadable):
                sequence.state = SequenceState.LOADING
                self._num_loading += 1
            else:
                self._start_running(sequence)
                budget -= self._take_share(sequence, budget, shares)

    def _start_running(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        if sequence.num_cached is None:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        insort(self._running, sequence, key=_order)

    def _finish_load(self, load: FinishedLoad) -> RequestOutput | None:
        """A load has ended: run, or by policy recompute what did not come, or fail."""
        sequence = load.sequence
        self._num_loading -= 1
        sequence.num_computed = load.num_tokens
        sequence.loaded_at = self._clock()
        self._kv.register_computed(sequence)
        if not load.error:
            self._start_running(sequence)
            return None
        if self._config.kv_load_failure_policy == "fail":
            sequence.state = SequenceState.FINISHED
            error = AbortedError(f"the prompt's KV could not be loaded: {load.error}")
            return self._end(sequence, FinishReason.ERROR, error=error)
        _logger.warning("%s: KV load failed (%s), computing", sequence.request_id, load.error)
        self._kv.free(sequence)
        sequence.may_load = False
        sequence.num_saved = 0
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=_order)
        return None

    # The ends of sequences.

    def _append_token(self, sequence: Sequence, token_id: int) -> list[RequestOutput]:
        sequence.token_ids.append(token_id)
        if sequence.first_token_at is None:
            sequence.first_token_at = self._clock()
        hands_over = self._config.role == "prefill"
        reason = sequence.finish_reason(self._max_model_len, hands_over=hands_over)
        if reason is None:
            return [self._output(sequence, (token_id,))]
        if reason is FinishReason.HANDOFF:
            return self._hand_over(sequence)
        return [self._end(sequence, reason, token_ids=(token_id,))]

    def _hand_over(self, sequence: Sequence) -> list[RequestOutput]:
        """Frees the sequence's blocks; its end is told when its saves have ended."""
        self._transfers.save_for_handoff(sequence)
        self._running.remove(sequence)
        self._kv.free(sequence)
        sequence.state = SequenceState.SAVING
        return [] if sequence.pending_saves else [self._end(sequence, FinishReason.HANDOFF)]

    def _end_poisoned(self, sequence: Sequence) -> RequestOutput:
        """Ends a sequence whose logits are not finite. Its KV may be the cause, from
        whatever step on: nobody else may find it, here or in the store.
        """
        self._kv.discard(sequence)
        self._transfers.discard_saved(sequence)
        error = InternalError("the model's output was not finite")
        return self._end(sequence, FinishReason.ERROR, error=error)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        error: BatonError | None = None,
    ) -> RequestOutput:
        """Takes the sequence out of every queue and frees what it holds."""
        handoff = None
        if reason is FinishReason.HANDOFF:
            token_ids = (sequence.token_ids[-1],)
            handoff = self._transfers.commit_handoff(sequence)
        output = self._output(sequence, token_ids, reason, error=error, handoff=handoff)
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is SequenceState.LOADING:
            self._num_loading -= 1
        self._transfers.forget(sequence)
        self._kv.free(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.request_id]
        return output

    def _output(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        reason: FinishReason | None = None,
        *,
        error: BatonError | None = None,
        handoff: KvHandoff | None = None,
    ) -> RequestOutput:
        tells_timings = reason is not None or not sequence.reported
        sequence.reported = True
        return RequestOutput(
            request_id=sequence.request_id,
            token_ids=token_ids,
            finish_reason=reason,
            error=error,
            cached_tokens=sequence.num_cached or 0,
            timings=sequence.timings(self._clock()) if tells_timings else None,
            handoff=handoff,
        )


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
