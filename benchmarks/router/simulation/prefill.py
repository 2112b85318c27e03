"""`SimulatedPrefill`: a replica that computes one prompt after the other."""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from baton.v1 import worker_pb2
from benchmarks.router.simulation.replica import Machine, OnEvents, OnReport, SimulatedReplica
from benchmarks.router.simulation.requests import SimulatedRequest
from engine.kv_cache.block_table import BlockTable

__all__ = ["SimulatedPrefill"]


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that waits or is computed."""

    request: SimulatedRequest
    done: "asyncio.Future[None]"


class SimulatedPrefill(SimulatedReplica):
    """Computes prompts in the order in which they come."""

    def __init__(
        self, worker_id: str, machine: Machine, on_events: OnEvents, on_report: OnReport
    ) -> None:
        role = worker_pb2.WORKER_ROLE_PREFILL
        super().__init__(worker_id, role, machine, on_events, on_report)
        self._prompts: deque[_Prompt] = deque()  # the first one is computed
        self._num_waiting_tokens = 0  # of the others
        self._table: BlockTable
        self._ends_at = 0.0
        self._end_timer: asyncio.TimerHandle

    async def compute(self, request: SimulatedRequest) -> None:
        """Computes a prompt, and returns when its first token is drawn. If the caller is cancelled,
        the prompt leaves.
        """
        self.num_requests += 1
        prompt = _Prompt(request, self._loop.create_future())
        self._prompts.append(prompt)
        self._num_waiting_tokens += request.num_tokens
        if len(self._prompts) == 1:
            self._begin()
        self._tell()
        try:
            await prompt.done
        except asyncio.CancelledError:
            self._drop(prompt)
            raise

    @override
    def load(self) -> worker_pb2.WorkerLoad:
        load = self._base_load()
        load.num_running = min(len(self._prompts), 1)
        load.num_waiting = max(len(self._prompts) - 1, 0)
        # As engines do, it counts waiting prompts whole: it looks for hits when it begins them.
        load.queued_prompt_s = self._left_s + self._seconds(
            self._num_waiting_tokens, load.num_waiting
        )
        load.num_queued_tokens = round(load.queued_prompt_s / self.machine.prompt_token_s)
        return load

    @property
    @override
    def _is_changing(self) -> bool:
        return bool(self._prompts)

    @property
    def queue_s(self) -> float:
        """Seconds until all of its prompts are computed, by what its pool holds now."""
        waiting = [prompt.request for prompt in itertools.islice(self._prompts, 1, None)]
        num_tokens = sum(request.num_tokens - self.cached_tokens(request) for request in waiting)
        return self._left_s + self._seconds(num_tokens, len(waiting))

    @override
    def coming_blocks(self, request: SimulatedRequest) -> int:
        num_shared = (_num_equal(request.keys, prompt.request.keys) for prompt in self._prompts)
        coming = max(super().coming_blocks(request), *num_shared, 0)
        return min(coming, request.max_cached_blocks)

    @property
    def _left_s(self) -> float:
        """Seconds until the prompt that is computed has its first token."""
        return max(self._ends_at - self._loop.time(), 0.0) if self._prompts else 0.0

    def _seconds(self, num_tokens: int, num_prompts: int = 1) -> float:
        return num_prompts * self.machine.prompt_s + num_tokens * self.machine.prompt_token_s

    def _begin(self) -> None:
        request = self._prompts[0].request
        self._num_waiting_tokens -= request.num_tokens
        admitted = self._admit(request, request.num_tokens, alone=True)
        assert admitted is not None, "one prompt at a time fits into the pool"
        self._table, request.cached_tokens = admitted
        seconds = self._seconds(request.num_tokens - request.cached_tokens)
        self.busy_s += seconds
        self._ends_at = self._loop.time() + seconds
        self._end_timer = self._loop.call_at(self._ends_at, self._end)

    def _end(self) -> None:
        prompt = self._prompts[0]
        self.kv.register(self._table, prompt.request.keys, prompt.request.num_tokens)
        self._leave_first()
        if not prompt.done.done():  # else it is cancelled in this moment
            prompt.done.set_result(None)

    def _drop(self, prompt: _Prompt) -> None:
        if prompt not in self._prompts:
            return  # it ended in the same moment
        if prompt is self._prompts[0]:
            self._end_timer.cancel()
            self.busy_s -= self._left_s
            self._leave_first()
        else:
            self._prompts.remove(prompt)
            self._num_waiting_tokens -= prompt.request.num_tokens
            self._tell()

    def _leave_first(self) -> None:
        """Goes on with the next prompt."""
        self.kv.free(self._table)
        self._prompts.popleft()
        if self._prompts:
            self._begin()
        self._tell()


def _num_equal(keys: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Returns how many keys two prompts begin with alike."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(keys, others, strict=False))
    return sum(1 for _ in pairs)
