"""`SimulatedReplica`: one worker in virtual time, with a real block pool.

It admits, evicts and registers blocks by `KvCacheManager`, and sends the events of its log, and
load reports, to routers.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.v1 import worker_pb2
from benchmarks.router.simulation.requests import BLOCK_TOKENS, SimulatedRequest
from engine.kv_cache.block_pool import Allocation
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.manager import KvCacheManager
from engine.kv_cache.spec import KvCacheSpec
from engine.wire import kv_event_responses

__all__ = ["Machine", "OnEvents", "OnReport", "SimulatedReplica"]

_REPORT_INTERVAL_S = 0.05
"""As workers report their load to routers."""

OnEvents = Callable[["SimulatedReplica", Sequence[worker_pb2.KvEvent]], None]
OnReport = Callable[["SimulatedReplica", worker_pb2.WorkerLoad], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a simulated engine takes and holds, in seconds and bytes. The defaults are about those
    of a large model with latent attention on eight H100: 16,000 prompt tokens per second, 70 KiB
    per token, a pool of 1.5 million tokens. Conversations of the trace pause for longer than much
    smaller pools keep their blocks.

    Attributes:
        prompt_token_s: a token of a prompt.
        prompt_s: a prompt, besides its tokens.
        step_s: a step of decode with one sequence.
        sequence_s: what each further sequence adds to it.
        num_seats: sequences that decode at once.
        max_num_requests: requests that decode or wait.
        kv_bytes_per_token: of K and V.
        load_bytes_per_s: bandwidth between the tiers.
        num_blocks: blocks of the pool.
        block_size: tokens per block.
    """

    prompt_token_s: float = 1 / 16_000
    prompt_s: float = 0.01
    step_s: float = 0.012
    sequence_s: float = 0.0002
    num_seats: int = 64
    max_num_requests: int = 4096
    kv_bytes_per_token: int = 70 * 1024
    load_bytes_per_s: float = 25e9
    num_blocks: int = 3000
    block_size: int = BLOCK_TOKENS

    @property
    def full_step_s(self) -> float:
        """A step while all seats are taken."""
        return self.step_s + (self.num_seats - 1) * self.sequence_s


class SimulatedReplica(ABC):
    """A worker: its pool, its queue and what it reports to routers. Made within a running loop,
    whose clock it follows.

    Args:
        worker_id: names it.
        role: its tier.
        machine: how fast it is, and what it holds.
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
        machine: Machine,
        on_events: OnEvents,
        on_report: OnReport,
    ) -> None:
        self.machine = machine
        self.info = worker_pb2.GetInfoResponse(
            worker_id=worker_id,
            role=role,
            block_size=machine.block_size,
            pool_block_size=machine.block_size,
            num_blocks=machine.num_blocks,
            max_num_seqs=machine.num_seats,
            max_num_requests=machine.max_num_requests,
            kv_bytes_per_token=machine.kv_bytes_per_token,
        )
        size = machine.block_size
        spec = KvCacheSpec(block_size=size, windows=(None,), max_chunk=size)
        self.kv = KvCacheManager(machine.num_blocks, spec, enable_prefix_caching=True)
        self.busy_s = 0.0
        self.num_requests = 0
        self._loop = asyncio.get_running_loop()
        self._on_events, self._on_report = on_events, on_report
        self._is_reporting = False
        self._fixed_load = worker_pb2.WorkerLoad(
            num_blocks=machine.num_blocks,
            role=role,
            prompt_token_s=machine.prompt_token_s,
            decode_step_s=machine.full_step_s,
            load_bytes_per_s=machine.load_bytes_per_s,
        )

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
        return match.num_blocks * self.machine.block_size

    def coming_blocks(self, request: SimulatedRequest) -> int:
        """Leading blocks of a prompt that its pool holds now or once its queue is computed."""
        return self.cached_tokens(request) // self.machine.block_size

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
        return self.kv.admit(num_tokens, match), match.num_blocks * self.machine.block_size

    def _tell(self) -> None:
        """Sends the events so far, and the load unless that was done a moment ago."""
        if events := self.kv.events.take_events():
            for response in kv_event_responses(events):
                self._on_events(self, response.events)
        if not self._is_reporting:
            self._is_reporting = True
            self._on_report(self, self.load())
            self._loop.call_later(_REPORT_INTERVAL_S, self._report_again)

    def _report_again(self) -> None:
        self._is_reporting = self._is_changing
        self._on_report(self, self.load())
        if self._is_reporting:
            self._loop.call_later(_REPORT_INTERVAL_S, self._report_again)

    @property
    def _is_changing(self) -> bool:
        """Whether its load changes without an event."""
        return False

    def _base_load(self) -> worker_pb2.WorkerLoad:
        load = worker_pb2.WorkerLoad()
        load.CopyFrom(self._fixed_load)
        load.num_free_blocks = self.kv.pool.num_free
        load.num_cached_blocks = self.kv.pool.num_cached
        load.prefix_cache_queries = self.kv.num_queries
        load.prefix_cache_hits = self.kv.num_hits
        return load
