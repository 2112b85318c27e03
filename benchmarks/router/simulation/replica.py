"""`SimulatedReplica`: one worker in virtual time, with a real block pool. Pure of waiting.

A prefill replica computes one prompt after the other. A decode replica loads prompts' KV, and each
of its sequences gets a token per step, whose time grows with their number. Both admit, evict and
register blocks by `KvCacheManager`, and send the events of its log and load reports to routers.
"""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from baton.v1 import worker_pb2
from benchmarks.router.simulation.requests import BLOCK_TOKENS, SimulatedRequest
from benchmarks.router.simulation.virtual_time import VirtualTime
from engine.kv_cache.block_pool import Allocation
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.manager import KvCacheManager
from engine.kv_cache.spec import KvCacheSpec
from engine.wire import kv_event_responses

__all__ = ["SimulatedDecode", "SimulatedPrefill", "SimulatedReplica", "Speeds"]

_REPORT_INTERVAL_S = 0.05
"""As workers report their load to routers."""

Done = Callable[[], None]
OnEvents = Callable[["SimulatedReplica", Sequence[worker_pb2.KvEvent]], None]
OnReport = Callable[["SimulatedReplica", worker_pb2.WorkerLoad], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a simulated engine takes, in seconds and bytes. The defaults are about those of a model
    of 32 billion parameters on two H100: 16,000 prompt tokens per second, 256 KiB per token.

    Attributes:
        prompt_token_s: a token of a prompt.
        prompt_s: a prompt, besides its tokens.
        step_s: a step of decode with one sequence.
        sequence_s: what each further sequence adds to it.
        num_seats: sequences that decode at once.
        kv_bytes_per_token: of K and V.
        load_bytes_per_s: bandwidth between the tiers.
        num_blocks: blocks of the pool.
    """

    prompt_token_s: float = 1 / 16_000
    prompt_s: float = 0.01
    step_s: float = 0.012
    sequence_s: float = 0.0002
    num_seats: int = 64
    kv_bytes_per_token: int = 256 * 1024
    load_bytes_per_s: float = 25e9
    num_blocks: int = 600

    @property
    def decode_step_s(self) -> float:
        """A step while all seats are taken."""
        return self.step_s + self.num_seats * self.sequence_s


class SimulatedReplica(ABC):
    """A worker: its pool, its queue and what it tells routers.

    Args:
        worker_id: names it.
        role: its tier.
        speeds: how fast it is.
        time: the clock.
        on_events: gets the events of the prefix cache.
        on_report: gets the load, at intervals while it changes.

    Attributes:
        info: its description.
        kv: its blocks.
        busy_s: seconds of work so far.
        num_requests: requests that were sent to it.
    """

    def __init__(
        self,
        worker_id: str,
        role: "worker_pb2.WorkerRole.ValueType",
        speeds: Speeds,
        time: VirtualTime,
        on_events: OnEvents,
        on_report: OnReport,
    ) -> None:
        self.speeds = speeds
        self.info = worker_pb2.GetInfoResponse(
            worker_id=worker_id,
            role=role,
            block_size=BLOCK_TOKENS,
            pool_block_size=BLOCK_TOKENS,
            num_blocks=speeds.num_blocks,
            max_num_seqs=speeds.num_seats,
            kv_bytes_per_token=speeds.kv_bytes_per_token,
        )
        spec = KvCacheSpec(block_size=BLOCK_TOKENS, windows=(None,), max_chunk=BLOCK_TOKENS)
        self.kv = KvCacheManager(speeds.num_blocks, spec, enable_prefix_caching=True)
        self.busy_s = 0.0
        self.num_requests = 0
        self._time = time
        self._on_events, self._on_report = on_events, on_report
        self._is_reporting = False

    def start(self) -> None:
        """Sends the beginning of the events, and the first load."""
        _, snapshot = self.kv.events.start_recording()
        for response in kv_event_responses(snapshot):
            self._on_events(self, response.events)
        self._on_report(self, self.load())

    @property
    def worker_id(self) -> str:
        """Its name."""
        return self.info.worker_id

    @abstractmethod
    def load(self) -> worker_pb2.WorkerLoad:
        """Returns the load now."""

    def cached_tokens(self, request: SimulatedRequest) -> int:
        """Leading tokens of a prompt that its pool holds now."""
        match = self.kv.match_prefix(request.keys, request.num_tokens)
        return match.num_blocks * BLOCK_TOKENS

    def coming_blocks(self, request: SimulatedRequest) -> int:
        """Leading blocks of a prompt that its pool holds now or once its queue is computed."""
        return self.cached_tokens(request) // BLOCK_TOKENS

    def _admit(
        self, request: SimulatedRequest, num_tokens: int, *, alone: bool
    ) -> tuple[BlockTable, int] | None:
        """Takes the blocks of a request; returns its table and its cached tokens, or None if it has
        to wait for blocks.
        """
        match = self.kv.match_prefix(request.keys, request.num_tokens)
        answer = self.kv.can_admit(num_tokens, match, alone=alone)
        assert answer is not Allocation.NEVER, "requests that no pool holds are left out"
        if answer is not Allocation.OK:
            return None
        return self.kv.admit(num_tokens, match), match.num_blocks * BLOCK_TOKENS

    def _tell(self) -> None:
        """Sends the events so far, and the load unless that was done a moment ago."""
        events = self.kv.events.take_events()
        for response in kv_event_responses(events):
            self._on_events(self, response.events)
        if not self._is_reporting:
            self._is_reporting = True
            self._on_report(self, self.load())
            self._time.call_later(_REPORT_INTERVAL_S, self._report_again)

    def _report_again(self) -> None:
        self._is_reporting = self._is_changing
        self._on_report(self, self.load())
        if self._is_reporting:
            self._time.call_later(_REPORT_INTERVAL_S, self._report_again)

    @property
    def _is_changing(self) -> bool:
        """Whether its load changes without an event."""
        return False

    def _base_load(self) -> worker_pb2.WorkerLoad:
        speeds = self.speeds
        return worker_pb2.WorkerLoad(
            num_free_blocks=self.kv.pool.num_free,
            num_blocks=speeds.num_blocks,
            prefix_cache_queries=self.kv.num_queries,
            prefix_cache_hits=self.kv.num_hits,
            role=self.info.role,
            prompt_token_s=speeds.prompt_token_s,
            decode_step_s=speeds.decode_step_s,
            load_bytes_per_s=speeds.load_bytes_per_s,
        )


class SimulatedPrefill(SimulatedReplica):
    """Computes prompts in the order in which they come.

    Attributes:
        queued: the prompts that wait or are computed.
    """

    def __init__(
        self,
        worker_id: str,
        speeds: Speeds,
        time: VirtualTime,
        on_events: OnEvents,
        on_report: OnReport,
    ) -> None:
        role = worker_pb2.WORKER_ROLE_PREFILL
        super().__init__(worker_id, role, speeds, time, on_events, on_report)
        self.queued: deque[tuple[SimulatedRequest, Done]] = deque()
        self._ends_at = 0.0  # of the prompt that is computed

    def submit(self, request: SimulatedRequest, on_done: Done) -> None:
        """Takes a prompt; calls `on_done` when its first token is drawn."""
        self.num_requests += 1
        self.queued.append((request, on_done))
        if len(self.queued) == 1:
            self._begin()
        self._tell()

    @override
    def load(self) -> worker_pb2.WorkerLoad:
        load = self._base_load()
        load.num_running = min(len(self.queued), 1)
        load.num_waiting = max(len(self.queued) - 1, 0)
        # As engines do, it counts waiting prompts whole: it looks for hits when it begins them.
        load.queued_prompt_s = self._queue_s(lambda request: 0)
        load.num_queued_tokens = round(load.queued_prompt_s / self.speeds.prompt_token_s)
        return load

    @property
    @override
    def _is_changing(self) -> bool:
        return bool(self.queued)

    @property
    def queue_s(self) -> float:
        """Seconds until all of its prompts are computed, by what its pool holds now."""
        return self._queue_s(self.cached_tokens)

    def _queue_s(self, num_cached: Callable[[SimulatedRequest], int]) -> float:
        if not self.queued:
            return 0.0
        waiting = itertools.islice(self.queued, 1, None)
        return max(self._ends_at - self._time.now, 0.0) + sum(
            self._seconds(request.num_tokens - num_cached(request)) for request, _ in waiting
        )

    @override
    def coming_blocks(self, request: SimulatedRequest) -> int:
        num_shared = (_num_equal(request.keys, other.keys) for other, _ in self.queued)
        coming = max(super().coming_blocks(request), *num_shared, 0)
        return min(coming, request.max_cached_blocks)

    def _seconds(self, num_uncached: int) -> float:
        return self.speeds.prompt_s + num_uncached * self.speeds.prompt_token_s

    def _begin(self) -> None:
        request, on_done = self.queued[0]
        admitted = self._admit(request, request.num_tokens, alone=True)
        assert admitted is not None, "one prompt at a time fits into the pool"
        table, request.cached_tokens = admitted
        seconds = self._seconds(request.num_tokens - request.cached_tokens)
        self.busy_s += seconds
        self._ends_at = self._time.now + seconds
        self._time.call_at(self._ends_at, lambda: self._end(request, table, on_done))

    def _end(self, request: SimulatedRequest, table: BlockTable, on_done: Done) -> None:
        self.kv.register(table, request.keys, request.num_tokens)
        self.kv.free(table)
        self.queued.popleft()
        if self.queued:
            self._begin()
        self._tell()
        on_done()


def _num_equal(keys: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Returns how many keys two prompts begin with alike."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(keys, others, strict=False))
    return sum(1 for _ in pairs)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on decode: the tokens that it has still to generate."""

    request: SimulatedRequest
    table: BlockTable
    num_left: float
    on_begin: Done
    on_done: Done


class SimulatedDecode(SimulatedReplica):
    """Generates the tokens of its requests side by side."""

    def __init__(
        self,
        worker_id: str,
        speeds: Speeds,
        time: VirtualTime,
        on_events: OnEvents,
        on_report: OnReport,
    ) -> None:
        role = worker_pb2.WORKER_ROLE_DECODE
        super().__init__(worker_id, role, speeds, time, on_events, on_report)
        self._waiting: deque[tuple[SimulatedRequest, bool, Done, Done]] = deque()
        self._loading = 0
        self._running: list[_Sequence] = []
        self._version = 0
        self._updated_at = 0.0

    @property
    def num_open(self) -> int:
        """Requests that it has."""
        return len(self._waiting) + self._loading + len(self._running)

    def submit(
        self, request: SimulatedRequest, *, is_local: bool, on_begin: Done, on_done: Done
    ) -> None:
        """Takes a request.

        Args:
            request: the request.
            is_local: whether its prompt is computed here, while others pause. Otherwise its KV is
                loaded.
            on_begin: called when it begins to decode.
            on_done: called after its last token.
        """
        self.num_requests += 1
        self._waiting.append((request, is_local, on_begin, on_done))
        self._admit_waiting()
        self._tell()

    @override
    def load(self) -> worker_pb2.WorkerLoad:
        load = self._base_load()
        load.num_running = len(self._running)
        load.num_waiting = len(self._waiting) + self._loading
        return load

    def _admit_waiting(self) -> None:
        while self._waiting and self._loading + len(self._running) < self.speeds.num_seats:
            request, is_local, on_begin, on_done = self._waiting[0]
            num_tokens = request.num_tokens + request.num_output_tokens
            is_alone = not (self._loading or self._running)
            admitted = self._admit(request, num_tokens, alone=is_alone)
            if admitted is None:
                return
            self._waiting.popleft()
            table, cached_tokens = admitted
            num_tokens = request.num_output_tokens
            sequence = _Sequence(request, table, num_tokens, on_begin, on_done)
            self._loading += 1
            delay_s = self._prepare(request, cached_tokens, is_local=is_local)
            self._time.call_later(delay_s, partial(self._join, sequence))

    def _prepare(self, request: SimulatedRequest, cached_tokens: int, *, is_local: bool) -> float:
        """Returns in how many seconds the KV of a prompt is there."""
        num_missing = request.num_tokens - cached_tokens
        if not is_local:
            return num_missing * self.speeds.kv_bytes_per_token / self.speeds.load_bytes_per_s
        request.cached_tokens = cached_tokens
        compute_s = self.speeds.prompt_s + num_missing * self.speeds.prompt_token_s
        self._pause(compute_s)
        return compute_s

    def _join(self, sequence: _Sequence) -> None:
        self._loading -= 1
        request = sequence.request
        self.kv.register(sequence.table, request.keys, request.num_tokens)
        self._advance()
        self._running.append(sequence)
        self._schedule()
        self._tell()
        sequence.on_begin()

    def _pause(self, seconds: float) -> None:
        """Delays the running sequences."""
        if seconds:
            self._advance()
            self._updated_at += seconds
            self._schedule()

    def _advance(self) -> None:
        """Gives the running sequences the tokens of the time that has passed."""
        elapsed_s = self._time.now - self._updated_at
        if elapsed_s > 0 or not self._running:
            num_tokens = max(elapsed_s, 0.0) / self._step_s if self._running else 0.0
            self.busy_s += max(elapsed_s, 0.0) if self._running else 0.0
            for sequence in self._running:
                sequence.num_left -= num_tokens
            self._updated_at = max(self._time.now, self._updated_at)

    @property
    def _step_s(self) -> float:
        return self.speeds.step_s + (len(self._running) - 1) * self.speeds.sequence_s

    def _schedule(self) -> None:
        """Plans the end of the next sequence to end; earlier plans have no effect."""
        self._version += 1
        if self._running:
            version = self._version
            num_left = max(min(sequence.num_left for sequence in self._running), 0.0)
            ends_at = self._updated_at + num_left * self._step_s
            self._time.call_at(ends_at, lambda: self._end_some(version))

    def _end_some(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = [sequence for sequence in self._running if sequence.num_left < 1e-6]
        self._running = [sequence for sequence in self._running if sequence.num_left >= 1e-6]
        for sequence in ended:
            self.kv.free(sequence.table)
        self._admit_waiting()
        self._schedule()
        self._tell()
        for sequence in ended:
            sequence.on_done()
