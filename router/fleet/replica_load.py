"""`ReplicaLoad`: what runs on a replica, by its reports and this router's own requests. Pure.

A report counts the requests of all routers, but not those that are still on their way. So the load
is that of the last report and of the own requests which it cannot include yet. A request is on its
way until a report is in that the worker made after the request had come.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from baton.common.request.request_spec import RequestSpec
from baton.v1 import worker_pb2
from router.fleet.fading import FadingShare, FadingSum
from router.routing.candidate import Candidate

__all__ = ["ReplicaLoad", "ReplicaLoads"]

_MIN_AHEAD = 2
_AHEAD_SHARE = 2
"""A replica without a free seat, or without free blocks, gets a part of the requests that it
runs in advance, so that it has the next ones when some end. The others wait in the router, where
tenants take turns.
"""
_MAX_QUEUED_TOKENS = 8192
"""As many prompt tokens keep a prefill replica busy until the router can send the next ones."""
_MIN_QUEUED_PROMPTS = 2
_TRANSIT_S = 0.1
"""A request reaches the engine within this time. One that takes longer is not counted for a moment;
one that is faster is counted twice for as long. A fifth of it changes nothing that a simulation
shows (docs/adr/0082-router-details.md)."""
_DEFAULT_LOAD_BYTES_PER_S = 1e9
"""Assumed until a worker has measured its loads: the speed of a common network."""
_HIT_MEMORY_S = 60.0
"""Look-ups count for about so long in the hit rate, and computed tokens in the recent work."""


@dataclass(slots=True)
class _Dispatch:
    """A request of this router.

    Attributes:
        num_tokens: prompt tokens that the replica computes for it.
        num_blocks: blocks that it fills.
        sent_at: when it was sent; infinite before that.
        deadline: it has ended by then, whatever else happens.
    """

    num_tokens: int
    num_blocks: int
    sent_at: float
    deadline: float


class _Sum:
    """The requests, tokens and blocks of dispatches."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.num_blocks = 0

    def add(self, dispatch: _Dispatch, sign: int = 1) -> None:
        self.num_requests += sign
        self.num_tokens += sign * dispatch.num_tokens
        self.num_blocks += sign * dispatch.num_blocks


class ReplicaLoad:
    """The load of one replica, as far as this router knows.

    Args:
        info: the worker's description of what it serves.
        address: the worker's.
        clock: monotonic seconds.

    Attributes:
        report: the worker's last report. What is asked for each request has an attribute: reading
            a message takes long, and there may be hundreds of replicas.
        is_draining: whether the worker drains.
        role: the worker's role; 0 if its reports do not say it.
        store_ids: identities of its KV stores.
        num_blocks: blocks in its pool, of the size that block keys stand for.
        refuses_grammars: whether it has refused a request with a grammar since then. It may have
            lacked room for grammars to compile, which other requests do not need.
        hit_rate: the share of prompt tokens that it has found in its prefix cache lately.
    """

    def __init__(
        self,
        info: worker_pb2.GetInfoResponse,
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.report = worker_pb2.WorkerLoad()
        self.is_draining = False
        self.role = worker_pb2.WORKER_ROLE_UNSPECIFIED
        self.store_ids: tuple[str, ...] = ()
        self.refuses_grammars = False
        self.hit_rate = 0.0
        self._info = info
        self._num_seats, self._max_num_requests = info.max_num_seqs, info.max_num_requests
        self.num_blocks = self._in_keyed_blocks(info.num_blocks)
        # Of the last report; its free blocks are of the size that block keys stand for.
        self._num_running = self._num_reported = self._num_queued_tokens = self._free_blocks = 0
        self._address = address
        self._clock = clock
        self._refuses_all = False
        self._numbers = itertools.count()
        self._live: dict[int, _Dispatch] = {}
        self._on_way: dict[int, _Dispatch] = {}
        self._live_sum, self._on_way_sum = _Sum(), _Sum()
        self._next_deadline = math.inf
        self._hits = FadingShare(_HIT_MEMORY_S)
        self._computed = FadingSum(_HIT_MEMORY_S)
        self._candidate: Candidate | None = None  # made again after each change

    def take(self, report: worker_pb2.WorkerLoad) -> None:
        """Takes the worker's next report, after which it may have room again."""
        now = self._clock()
        self._drop_expired(now)
        arrived_by = now - report.age_s - _TRANSIT_S
        for number, dispatch in list(self._on_way.items()):
            if dispatch.sent_at <= arrived_by:
                self._on_way_sum.add(self._on_way.pop(number), -1)
        self.hit_rate = self._hits.add(report.prefix_cache_hits, report.prefix_cache_queries, now)
        self._computed.add(report.prefix_cache_queries - report.prefix_cache_hits, now)
        self.report = report
        self.is_draining, self.role = report.draining, report.role
        self.store_ids = tuple(report.kv_store_ids)
        self._num_running = report.num_running
        self._num_reported = report.num_running + report.num_waiting
        self._num_queued_tokens = report.num_queued_tokens
        self._free_blocks = self._in_keyed_blocks(report.num_free_blocks)
        self._refuses_all = self.refuses_grammars = False
        self._candidate = None

    @property
    def has_room(self) -> bool:
        """Whether the replica can queue one more request."""
        most = self._max_num_requests
        return not self._refuses_all and (not most or self.num_requests < most)

    @property
    def num_requests(self) -> int:
        """Requests that it has, of all routers. The own ones are known in any case."""
        with_on_way = self._num_reported + self._on_way_sum.num_requests
        return max(with_on_way, self._live_sum.num_requests)

    @property
    def backlog_s(self) -> float:
        """Seconds of prompt work that it has still to do."""
        on_way_s = self._on_way_sum.num_tokens * self.report.prompt_token_s
        return self.report.queued_prompt_s + on_way_s

    def has_room_for(self, spec: RequestSpec) -> bool:
        """Whether the replica can queue this request."""
        return self.has_room and not (self.refuses_grammars and _has_grammar(spec))

    def may_start(self, num_blocks: int) -> bool:
        """Whether a new request would soon run here, and not only wait.

        Args:
            num_blocks: blocks, of the size that block keys stand for, that it will fill.
        """
        self._drop_expired(self._clock())
        running, live = self._num_running, self._live_sum
        # Without those on their way, some of which are counted twice: seats would be left empty.
        number = max(self._num_reported, live.num_requests)
        free_blocks = min(self._free_blocks, self.num_blocks - live.num_blocks)
        if number < self._num_seats and num_blocks <= free_blocks:
            return True
        return number - running < max(running // _AHEAD_SHARE, _MIN_AHEAD)

    @property
    def may_queue_prompt(self) -> bool:
        """Whether the replica has so few prompts to compute that it might soon lack some."""
        self._drop_expired(self._clock())
        num_tokens = self._num_queued_tokens + self._on_way_sum.num_tokens
        return num_tokens < _MAX_QUEUED_TOKENS or self.num_requests < _MIN_QUEUED_PROMPTS

    def note_full(self, spec: RequestSpec) -> None:
        """Notes that the replica has refused a request for lack of room, until its next report."""
        if _has_grammar(spec):
            self.refuses_grammars = True
        else:
            self._refuses_all = True

    def note_leaving(self) -> None:
        """Notes that the replica has refused a request of any kind, until its next report."""
        self._refuses_all = True

    @contextmanager
    def reserve(
        self, num_tokens: int, num_blocks: int, *, is_sent: bool = True, deadline: float = math.inf
    ) -> Iterator[Callable[[], None]]:
        """Counts a request while the context is open.

        Yields a function to call when a request is sent that was not sent at once.

        Args:
            num_tokens: prompt tokens that the replica will compute.
            num_blocks: blocks, of the size that block keys stand for, that it will fill.
            is_sent: whether the request is sent now. If not, it is on its way while the context
                is open: no report includes it.
            deadline: `clock()` at which the request has ended in any case.
        """
        sent_at = self._clock() if is_sent else math.inf
        number, dispatch = next(self._numbers), _Dispatch(num_tokens, num_blocks, sent_at, deadline)
        self._live[number] = self._on_way[number] = dispatch
        self._live_sum.add(dispatch)
        self._on_way_sum.add(dispatch)
        self._next_deadline = min(self._next_deadline, deadline)
        self._candidate = None

        def note_sent() -> None:
            dispatch.sent_at = self._clock()

        try:
            yield note_sent
        finally:
            self._drop(number)

    def candidate(self, weight: float) -> Candidate:
        """Returns what the routing policy compares.

        Args:
            weight: the share of the load that the replica should get.
        """
        if self._clock() >= self._next_deadline:
            self._drop_expired(self._clock())
        if self._candidate is None or self._candidate.weight != weight:
            self._candidate = self._make_candidate(weight)
        return self._candidate

    def _make_candidate(self, weight: float) -> Candidate:
        report, info = self.report, self._info
        bytes_per_s = report.load_bytes_per_s or _DEFAULT_LOAD_BYTES_PER_S
        num_blocks, on_way = self.num_blocks, self._on_way_sum
        return Candidate(
            replica_id=info.worker_id,
            address=self._address,
            num_requests=self.num_requests,
            num_seats=max(self._num_seats, 1),
            num_queued_tokens=self._num_queued_tokens + on_way.num_tokens,
            queue_s=self.backlog_s,
            num_free_blocks=self._num_free_blocks,
            num_blocks=num_blocks,
            cached_share=report.num_cached_blocks / max(report.num_blocks, 1),
            recent_work=self._computed.order,
            prompt_token_s=report.prompt_token_s,
            decode_step_s=report.decode_step_s,
            load_token_s=info.kv_bytes_per_token / bytes_per_s,
            store_ids=self.store_ids,
            weight=weight,
        )

    @property
    def _num_free_blocks(self) -> int:
        """Blocks, of the size that block keys stand for, that no request holds or will fill."""
        on_way = self._on_way_sum.num_blocks
        reported = self._free_blocks - on_way
        # Requests that wait in the worker hold no blocks yet, but will.
        return max(min(reported, self.num_blocks - self._live_sum.num_blocks), 0)

    def _drop(self, number: int) -> None:
        """Ends a request, unless its deadline has done so."""
        if (dispatch := self._live.pop(number, None)) is not None:
            self._live_sum.add(dispatch, -1)
            self._candidate = None
        if (dispatch := self._on_way.pop(number, None)) is not None:
            self._on_way_sum.add(dispatch, -1)

    def _drop_expired(self, now: float) -> None:
        if now < self._next_deadline:
            return
        for number, dispatch in list(self._live.items()):
            if dispatch.deadline <= now:
                self._drop(number)
        deadlines = (dispatch.deadline for dispatch in self._live.values())
        self._next_deadline = min(deadlines, default=math.inf)

    def _in_keyed_blocks(self, num_pool_blocks: int) -> int:
        """Converts blocks of the worker's pool to blocks of the size that block keys stand for."""
        return num_pool_blocks * self._info.pool_block_size // self._info.block_size


class ReplicaLoads:
    """The loads of workers. A worker of both roles, or one that changes its role, is a replica of
    each tier, and both replicas count their requests in one load.
    """

    def __init__(self) -> None:
        self._loads: WeakValueDictionary[str, ReplicaLoad] = WeakValueDictionary()

    def join(self, info: worker_pb2.GetInfoResponse, address: str) -> ReplicaLoad:
        """Returns the load of a worker, which lasts as long as a replica has it.

        Args:
            info: the worker's description of what it serves.
            address: the worker's.
        """
        load = self._loads.get(info.worker_id)
        if load is None:
            load = self._loads[info.worker_id] = ReplicaLoad(info, address)
        return load


def _has_grammar(spec: RequestSpec) -> bool:
    return spec.params.structured_outputs is not None
