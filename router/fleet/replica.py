"""`Replica`: one connected worker, from its GetInfo to its loss.

Both tiers' replicas have a load, a liveness check, a breaker and this router's reservations;
they differ in the calls that they take (`tier_replicas`).
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from baton.common.errors import BatonError, InternalError, UnavailableError
from baton.common.request.request_spec import RequestSpec
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2
from router.fleet.capacity import Capacity
from router.fleet.decode_connection import ReplicaLostError
from router.fleet.kv_events import KvEventStream
from router.fleet.replica_health import ReplicaBreaker, Silence
from router.fleet.replica_load import ReplicaLoads
from router.fleet.roles import serves_in, tier_name
from router.fleet.worker_calls import WorkerCalls
from router.observe.request_record import Attempt, RequestRecord
from router.routing.cache_index import CacheIndex
from router.routing.candidate import Candidate
from rpc.errors import from_rpc_error

__all__ = ["Replica", "ReplicaT", "without_ejected"]

_LOGGER = logging.getLogger("baton.router")
_POLL_INTERVAL_S = 0.2
_POLL_TIMEOUT_S = 5.0
_FAULTS = (InternalError.code, UnavailableError.code)
"""Errors of calls that may be the replica's fault."""

ReplicaT = TypeVar("ReplicaT", bound="Replica")


def without_ejected(replicas: Sequence[ReplicaT]) -> Sequence[ReplicaT]:
    """Returns the replicas that are not ejected; all of them if all are."""
    return [replica for replica in replicas if not replica.is_ejected] or replicas


class Replica:
    """A connected worker and its load.

    Args:
        address: its `host:port`.
        info: its description of what it serves.
        channel: a channel to it.
        security: what this router shows to it.
        index: learns what its prefix cache holds.
        loads: the loads of all workers; None if no other replica may be the same worker.
        on_space: called when it may start a further request.

    Attributes:
        tier: the role of workers that are used as such a replica.
        address: its `host:port`.
        replica_id: the worker's id, which it draws at each start.
        info: its description of what it serves.
        capacity: the largest request that it can run.
        worker: calls of its WorkerService.
        kv_events: the events of its prefix cache.
        takes_requests: whether new requests may be sent to it. Each request asks for it many times,
            of all replicas, so it is noted (`_note_state`).
        lost: set once the connection is lost. A worker that comes back is a new replica.
    """

    tier: "worker_pb2.WorkerRole.ValueType"

    def __init__(
        self,
        address: str,
        info: worker_pb2.GetInfoResponse,
        channel: grpc.aio.Channel,
        security: ClusterSecurity,
        index: CacheIndex,
        loads: ReplicaLoads | None = None,
        on_space: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.replica_id = info.worker_id
        self.info = info
        self.capacity = self._capacity()
        self.lost = asyncio.Event()
        self._dropped: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
        self.worker = WorkerCalls(channel, security)
        self._security = security
        self._load = (loads or ReplicaLoads()).join(info, address)
        self._is_ready = self.takes_requests = False
        self._on_change: Callable[[], None] = lambda: None
        self._on_space = on_space
        # What `_note_change` compares, at the last `_on_change`.
        self._shown: tuple[object, ...] = (False, False, False, False, ())
        self._first_role = self._noted_role = info.role
        self._role_changed = asyncio.Event()
        clock = asyncio.get_running_loop().time
        self._silence = Silence(clock())
        self._breaker = ReplicaBreaker(f"{self.tier_name} replica {address}", clock)
        self.kv_events = KvEventStream(
            address,
            info,
            self.worker.watch_kv_events,
            index,
            lambda: self.load,
            lambda: self.is_leaving,
        )

    @property
    def tier_name(self) -> str:
        """Prefill or decode."""
        return tier_name(self.tier)

    @property
    def has_reported(self) -> bool:
        """Whether it has reported its load since it was connected."""
        return self._silence.has_reported

    @property
    def is_leaving(self) -> bool:
        """Whether it refuses new requests on purpose: it drains, or has left the tier. The replica
        of the other tier may have heard so first, if its worker has both roles.
        """
        return self._load.is_draining or not self.has_role

    @property
    def role(self) -> "worker_pb2.WorkerRole.ValueType":
        """Its role at present."""
        return self._load.role or self._first_role

    @property
    def has_role(self) -> bool:
        """Whether its worker serves in the tier at present."""
        return serves_in(self.role, self.tier)

    @property
    def has_room(self) -> bool:
        """Whether it can queue one more request, as far as this router knows."""
        return self._load.has_room

    @property
    def load(self) -> worker_pb2.WorkerLoad:
        """Its last report."""
        return self._load.report

    def _capacity(self) -> Capacity:
        info = self.info
        return Capacity(min(info.max_model_len, info.max_pool_tokens), info.max_num_seqs)

    @property
    def is_ejected(self) -> bool:
        """Whether its calls have failed, so that requests should go to other replicas."""
        return self._breaker.is_open

    def has_room_for(self, spec: RequestSpec) -> bool:
        """Whether it can queue this request, as far as this router knows."""
        return self._load.has_room_for(spec)

    @property
    def has_space(self) -> bool:
        """Whether it may start a further request, however small, as far as this router knows."""
        return self.may_start(0)

    def may_start(self, num_blocks: int) -> bool:
        """Whether a new request would soon run here, and not only wait.

        Args:
            num_blocks: blocks, of the size that block keys stand for, that it will fill.
        """
        return self._load.may_start(num_blocks)

    def note_full(self, spec: RequestSpec) -> None:
        """Notes that it has refused a request for lack of room, until its next report."""
        self._load.note_full(spec)
        self._note_change()

    def note_leaving(self) -> None:
        """Notes that it takes no new requests, until its next report, which says its role."""
        self._load.note_leaving()
        self._note_change()

    def candidate(self) -> Candidate:
        """What the routing policy compares of the replica now."""
        return self._load.candidate(self._breaker.weight)

    @property
    def backlog_s(self) -> float:
        """Seconds of prompt work that it has still to do."""
        return self._load.backlog_s

    @property
    def num_requests(self) -> int:
        """Requests that run, wait or are on their way there, of all routers."""
        return self._load.num_requests

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that it has found in its prefix cache lately."""
        return self._load.hit_rate

    def log_start(self, spec: RequestSpec) -> None:
        """Logs that a request is started on this replica, and its id there."""
        _LOGGER.debug(
            "started request_id=%s worker_request_id=%s replica=%s",
            ascii(spec.client_id),
            ascii(spec.request_id),
            self.address,
        )

    @contextmanager
    def attempt(self, record: RequestRecord) -> Iterator[Attempt]:
        """Adds a call of this replica to a request's record; counts its end for the breaker."""
        call, attempt = self._breaker.begin(), None
        try:
            with record.attempt(self.tier_name, self.address) as attempt:
                yield attempt
        finally:
            if attempt is not None:  # it has its error only now
                self._count_end(attempt, call)

    def _count_end(self, attempt: Attempt, call: int) -> None:
        if attempt.error in _FAULTS and not self.is_leaving:
            self._breaker.fail(call)
        elif attempt.first_output_at is not None:  # also if the client has left with all it needs
            self._breaker.succeed(call)
        self._note_request()

    @contextmanager
    def reserve(
        self,
        *,
        num_tokens: int = 0,
        num_blocks: int = 0,
        is_sent: bool = True,
        deadline: float | None = None,
        is_own: bool = True,
    ) -> Iterator[Callable[[], None]]:
        """Counts a request as this replica's while the context is open.

        Yields a function to call when a request is sent that was not sent at once.

        Args:
            num_tokens: prompt tokens that the replica will compute.
            num_blocks: blocks, of the size that block keys stand for, that it will fill.
            is_sent: whether it is sent to the replica now, not later.
            deadline: `time.monotonic()` at which the request has ended in any case.
            is_own: whether this router calls the replica, and so learns whether it fails.
        """
        ends_at = math.inf if deadline is None else deadline
        reserved = self._load.reserve(num_tokens, num_blocks, is_sent=is_sent, deadline=ends_at)
        if is_own:
            self._breaker.begin()  # a probe is taken when it is reserved, before its call begins
        try:
            with reserved as note_sent:
                self._note_request()
                yield note_sent
        finally:
            self._note_request()
            self._note_space()

    @property
    def num_blocks(self) -> int:
        """Blocks in its pool, of the size that block keys stand for."""
        return self._load.num_blocks

    def check_silence(self, late_s: float) -> None:
        """Drops the worker if it is silent: a frozen or unreachable one keeps its connections.

        Args:
            late_s: how late the event loop was since the last call; reports may have waited unread.
        """
        now = asyncio.get_running_loop().time()
        self._silence.excuse(late_s, now)
        if self._silence.is_too_long(now):
            limit_s = self._silence.limit_s
            self.drop(ReplicaLostError(f"it has sent no report for {limit_s:.1f} s"))

    async def wait_for_role_change(self) -> None:
        """Waits until the worker has another role, or is lost."""
        await self._role_changed.wait()

    def drop(self, reason: BatonError) -> None:
        """Makes the replica take no more requests, and `run` raise this error. Idempotent."""
        if not self._dropped.done():
            self._dropped.set_result(reason)
        self._set_lost()

    def _set_lost(self) -> None:
        self.lost.set()
        self._note_state()
        self._role_changed.set()

    async def run(self, on_change: Callable[[], None]) -> None:
        """Follows the worker until it is lost.

        Args:
            on_change: called when the replica starts or stops taking requests, having room, or
                being ejected, and when its KV stores are others.

        Raises:
            ReplicaLostError: the worker was lost.
            BatonError: `drop` was called with this error.
        """
        self._on_change = on_change
        tasks = [asyncio.create_task(coroutine) for coroutine in self._activities()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = done.pop()
            if not ended.cancelled():  # gRPC may cancel a call, which does not cancel this task
                ended.result()
        except grpc.aio.AioRpcError as error:
            raise ReplicaLostError(from_rpc_error(error).message) from error
        finally:
            self._set_lost()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            on_change()
        raise ReplicaLostError("one of its streams was cancelled")

    def note_role(self, role: "worker_pb2.WorkerRole.ValueType") -> None:
        """Notes the worker's new role before its next report."""
        self._load.role = role
        self._note_change()

    def _activities(self) -> Sequence[Coroutine[Any, Any, None]]:
        """The coroutines that run while the replica lives. When one ends, the replica is lost."""
        return [self._watch_load(), self._until_dropped(), self.kv_events.run()]

    def _note_state(self) -> None:
        """Notes whether it takes requests, after each change of what that depends on."""
        self.takes_requests = self._can_take() and not self.is_leaving

    def _can_take(self) -> bool:
        """Whether the worker is connected, and has reported its load."""
        return self._is_ready and not self.lost.is_set()

    def _note_change(self) -> None:
        """Reports that the replica starts or stops taking requests, having room for them, or being
        ejected, and that its KV stores are others.
        """
        self._note_state()
        if self.role != self._noted_role:
            self._noted_role = self.role
            self._role_changed.set()  # which wakes all that wait
            self._role_changed = asyncio.Event()
        refuses, stores = self._load.refuses_grammars, self._load.store_ids
        now = self.takes_requests, self.has_room, refuses, self.is_ejected, stores
        if now != self._shown:
            self._shown = now
            self._on_change()
        else:
            self._note_space()

    def _note_request(self) -> None:
        """Reports what the begin or the end of a request of this router may have changed: having
        room for further ones, or being ejected.
        """
        _, has_room, _, is_ejected, _ = self._shown
        if self._load.has_room != has_room or self._breaker.is_open != is_ejected:
            self._note_change()

    def _note_space(self) -> None:
        if self.has_space:
            self._on_space()

    async def _watch_load(self) -> None:
        async for message in self.worker.watch_load():
            self._load.take(message.load)
            self.kv_events.report(message.load.newest_kv_event)
            if message.load.stalled:
                raise ReplicaLostError("one of its steps has not ended in time")
            self._is_ready = True
            self._silence.report(asyncio.get_running_loop().time())
            self._note_change()
        # A worker that has drained ends this stream before it has sent its last outputs.
        self._is_ready = False
        self._note_change()
        await self._poll_load()

    async def _poll_load(self) -> None:
        """Asks for the load of a worker that reports it no more, until the worker has ended."""
        while True:
            await self.worker.get_load(_POLL_TIMEOUT_S)
            self._silence.report(asyncio.get_running_loop().time())
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _until_dropped(self) -> None:
        raise await self._dropped
