"""`SimulatedDecode`: a replica whose sequences get a token per step, side by side."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from baton.v1 import worker_pb2
from benchmarks.router.simulation.replica import Machine, OnEvents, OnReport, SimulatedReplica
from benchmarks.router.simulation.requests import SimulatedRequest
from engine.kv_cache.block_table import BlockTable

__all__ = ["SimulatedDecode"]

_NO_TOKENS = 1e-6
"""A sequence with fewer tokens left has ended; times are rounded."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on decode.

    Attributes:
        request: the request.
        is_local: whether its prompt is computed here.
        on_begin: called when it begins to decode.
        done: set after its last token.
        num_left: the tokens that it has still to generate.
        table: its blocks, once it has them.
    """

    request: SimulatedRequest
    is_local: bool
    on_begin: Callable[[], None]
    done: "asyncio.Future[None]"
    num_left: float
    table: BlockTable | None = None


class SimulatedDecode(SimulatedReplica):
    """Generates the tokens of its requests side by side."""

    def __init__(
        self, worker_id: str, machine: Machine, on_events: OnEvents, on_report: OnReport
    ) -> None:
        role = worker_pb2.WORKER_ROLE_DECODE
        super().__init__(worker_id, role, machine, on_events, on_report)
        self._waiting: deque[_Sequence] = deque()
        self._loading: dict[_Sequence, asyncio.TimerHandle] = {}
        self._running: list[_Sequence] = []
        self._updated_at = 0.0
        self._end_timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """Requests that it has."""
        return len(self._waiting) + len(self._loading) + len(self._running)

    async def generate(
        self, request: SimulatedRequest, on_begin: Callable[[], None], *, is_local: bool
    ) -> None:
        """Generates the tokens of a request. If the caller is cancelled, the request leaves.

        Args:
            request: the request.
            on_begin: called when it begins to decode.
            is_local: whether its prompt is computed here, while others pause. Otherwise its KV is
                loaded.
        """
        self.num_requests += 1
        num_tokens = request.num_output_tokens
        done = self._loop.create_future()
        sequence = _Sequence(request, is_local, on_begin, done, num_tokens)
        self._waiting.append(sequence)
        self._admit_waiting()
        self._tell()
        try:
            await done
        except asyncio.CancelledError:
            self._drop(sequence)
            raise
        finally:
            request.num_generated = num_tokens - round(sequence.num_left)

    @override
    def load(self) -> worker_pb2.WorkerLoad:
        load = self._base_load()
        load.num_running = len(self._running)
        load.num_waiting = len(self._waiting) + len(self._loading)
        return load

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._loading) + len(self._running) < self.machine.num_seats:
            sequence = self._waiting[0]
            request = sequence.request
            num_tokens = request.num_tokens + request.num_output_tokens
            is_alone = not (self._loading or self._running)
            admitted = self._admit(request, num_tokens, alone=is_alone)
            if admitted is None:
                return
            self._waiting.popleft()
            sequence.table, cached_tokens = admitted
            delay_s = self._prepare(sequence, cached_tokens)
            self._loading[sequence] = self._loop.call_later(delay_s, self._join, sequence)

    def _prepare(self, sequence: _Sequence, cached_tokens: int) -> float:
        """Returns in how many seconds the KV of a prompt is there."""
        request, machine = sequence.request, self.machine
        num_missing = request.num_tokens - cached_tokens
        if not sequence.is_local:
            return num_missing * machine.kv_bytes_per_token / machine.load_bytes_per_s
        request.cached_tokens = cached_tokens
        self._pause(machine.prompt_s + num_missing * machine.prompt_token_s)
        # Prompts that came before it are computed first.
        return self._updated_at - self._loop.time()

    def _join(self, sequence: _Sequence) -> None:
        del self._loading[sequence]
        request, table = sequence.request, sequence.table
        assert table is not None, "it was admitted"
        self.kv.register(table, request.keys, request.num_tokens)
        self._advance()
        self._running.append(sequence)
        self._schedule()
        self._tell()
        sequence.on_begin()

    def _pause(self, seconds: float) -> None:
        """Delays the running sequences."""
        self._advance()
        self._updated_at += seconds
        self._schedule()

    def _advance(self) -> None:
        """Gives the running sequences the tokens of the time that has passed."""
        elapsed_s = self._loop.time() - self._updated_at
        if elapsed_s <= 0:
            return
        if self._running:
            self.busy_s += elapsed_s
            num_tokens = elapsed_s / self._step_s
            for sequence in self._running:
                sequence.num_left -= num_tokens
        self._updated_at = self._loop.time()

    @property
    def _step_s(self) -> float:
        return self.machine.step_s + (len(self._running) - 1) * self.machine.sequence_s

    def _schedule(self) -> None:
        """Plans the end of the next sequence to end, in place of an earlier plan."""
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
        if self._running:
            num_left = max(min(sequence.num_left for sequence in self._running), 0.0)
            ends_at = self._updated_at + num_left * self._step_s
            self._end_timer = self._loop.call_at(ends_at, self._end_some)

    def _end_some(self) -> None:
        self._end_timer = None
        self._advance()
        ended = [sequence for sequence in self._running if sequence.num_left < _NO_TOKENS]
        for sequence in ended:
            self._running.remove(sequence)
            self._free(sequence)
        self._go_on()
        for sequence in ended:
            if not sequence.done.done():  # else it is cancelled in this moment
                sequence.done.set_result(None)

    def _drop(self, sequence: _Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._loading:
            self._loading.pop(sequence).cancel()
            self._free(sequence)
        elif sequence in self._running:
            self._advance()
            self._running.remove(sequence)
            self._free(sequence)
        self._go_on()

    def _free(self, sequence: _Sequence) -> None:
        assert sequence.table is not None, "it was admitted"
        self.kv.free(sequence.table)

    def _go_on(self) -> None:
        """Continues after requests have left."""
        self._admit_waiting()
        self._schedule()
        self._tell()
