"""`SimulatedDecode`: a replica whose sequences get a token per step, side by side."""

from collections import deque
from dataclasses import dataclass
from functools import partial

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

__all__ = ["SimulatedDecode"]


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
