"""`SimulatedPrefill`: a replica that computes one prompt after the other."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from typing_extensions import override

from baton.v1 import worker_pb2
from benchmarks.router.simulation.replica import (
    Done,
    OnEvents,
    OnReport,
    SimulatedReplica,
    Speeds,
)
from benchmarks.router.simulation.requests import SimulatedRequest
from benchmarks.router.simulation.virtual_time import VirtualTime
from engine.kv_cache.block_table import BlockTable

__all__ = ["SimulatedPrefill"]


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
