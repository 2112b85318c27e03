"""`Replica`: one connected worker, from its GetInfo to its loss.

Both tiers' replicas have a load, a liveness check and this router's reservations;
they differ in the calls that they take.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from typing_extensions import override

from baton.errors import (
    BatonError,
    FailedPreconditionError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from baton.request_spec import RequestSpec
from baton.security.cluster import ClusterSecurity
from baton.spec_wire import spec_to_proto
from baton.v1 import (
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from router.decode_connection import DecodeConnection, ReplicaLostError
from router.policy import ReplicaState
from rpc.errors import from_rpc_error

__all__ = ["DecodeReplica", "PrefillReplica", "Replica"]

_LOGGER = logging.getLogger("baton.router")
_PROBE_INTERVAL_S = 2.0
_PROBE_TIMEOUT_S = 5.0
_RELEASE_TIMEOUT_S = 5.0
_MAX_PENDING_RELEASES = 256

_PrefillCall = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]


class Replica:
    """A connected worker and its load.

    Args:
        address: its `host:port`.
        info: its description of what it serves.
        channel: a channel to it.
        security: what this router shows to it.

    Attributes:
        address: its `host:port`.
        info: its description of what it serves.
        load: its last report.
        lost: set once the connection is lost. A worker that comes back is a new replica.
    """

    def __init__(
        self,
        address: str,
        info: worker_pb2.GetInfoResponse,
        channel: grpc.aio.Channel,
        security: ClusterSecurity,
    ) -> None:
        self.address = address
        self.info = info
        self.load = worker_pb2.WorkerLoad()
        self.lost = asyncio.Event()
        self._dropped: asyncio.Future[FailedPreconditionError]
        self._dropped = asyncio.get_running_loop().create_future()
        self._worker = worker_pb2_grpc.WorkerServiceStub(channel)
        self._security = security
        self._is_ready = False
        self._last_report_s = 0.0
        self._num_requests = 0
        self._num_tokens = 0
        self._num_blocks = 0

    @property
    def replica_id(self) -> str:
        """The worker's id, which it draws at each start."""
        return self.info.worker_id

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may be sent to it."""
        return self._is_ready and not self.load.draining and not self.lost.is_set()

    def state(self, overlap_blocks: int) -> ReplicaState:
        """The replica's state for the routing policy.

        The worker's report lags and includes other routers' requests; the reservations
        are exact and include only this router's. The larger number is used.
        """
        free_blocks = self._in_keyed_blocks(self.load.num_free_blocks)
        num_blocks = self._in_keyed_blocks(self.info.num_blocks)
        return ReplicaState(
            replica_id=self.replica_id,
            num_requests=max(self.load.num_running + self.load.num_waiting, self._num_requests),
            num_queued_tokens=max(self.load.num_queued_tokens, self._num_tokens),
            num_free_blocks=max(min(free_blocks, num_blocks - self._num_blocks), 0),
            num_blocks=num_blocks,
            overlap_blocks=overlap_blocks,
        )

    def log_start(self, spec: RequestSpec) -> None:
        """Logs that a request is started on this replica, and its id there."""
        _LOGGER.debug(
            "started request_id=%s worker_request_id=%s replica=%s",
            ascii(spec.client_id),
            ascii(spec.request_id),
            self.address,
        )

    @contextmanager
    def reserve(self, *, num_tokens: int = 0, num_blocks: int = 0) -> Iterator[None]:
        """Counts a request as this replica's while the context is open.

        Args:
            num_tokens: prompt tokens that the replica will compute.
            num_blocks: blocks, of the size that block keys stand for, that it will fill.
        """
        self._num_requests += 1
        self._num_tokens += num_tokens
        self._num_blocks += num_blocks
        try:
            yield
        finally:
            self._num_requests -= 1
            self._num_tokens -= num_tokens
            self._num_blocks -= num_blocks

    def _in_keyed_blocks(self, num_pool_blocks: int) -> int:
        """Converts blocks of the worker's pool to blocks of the size that block keys stand for."""
        return num_pool_blocks * self.info.pool_block_size // self.info.block_size

    def drop(self, reason: FailedPreconditionError) -> None:
        """Makes the replica take no more requests, and `run` raise this error. Idempotent."""
        if not self._dropped.done():
            self._dropped.set_result(reason)
        self.lost.set()

    async def run(self, on_change: Callable[[], None]) -> None:
        """Follows the worker until it is lost.

        Args:
            on_change: called when the replica starts or stops taking requests.

        Raises:
            ReplicaLostError: the worker was lost.
            FailedPreconditionError: `drop` was called with this error.
        """
        tasks = [asyncio.create_task(coroutine) for coroutine in self._activities(on_change)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = done.pop()
            if not ended.cancelled():  # gRPC may cancel a call, which does not cancel this task
                ended.result()
        except grpc.aio.AioRpcError as error:
            raise ReplicaLostError(from_rpc_error(error).message) from error
        finally:
            self.lost.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            on_change()
        raise ReplicaLostError("one of its streams was cancelled")

    async def get_load(self, timeout_s: float) -> worker_pb2.GetLoadResponse:
        """Asks the worker for its load now, and for what it has done.

        Raises:
            AioRpcError: it did not answer in time, or was lost.
        """
        return await self._worker.GetLoad(
            worker_pb2.GetLoadRequest(), timeout=timeout_s, metadata=self._security.call_metadata()
        )

    def _activities(self, on_change: Callable[[], None]) -> Sequence[Coroutine[Any, Any, None]]:
        """The coroutines that run while the replica lives. When one ends, the replica is lost."""
        return [self._watch_load(on_change), self._probe(), self._until_dropped()]

    async def _watch_load(self, on_change: Callable[[], None]) -> None:
        reports = self._worker.WatchLoad(
            worker_pb2.WatchLoadRequest(), metadata=self._security.call_metadata()
        )
        async for message in reports:
            took_requests = self.takes_requests
            self.load = message.load
            self._is_ready = True
            self._last_report_s = asyncio.get_running_loop().time()
            if self.takes_requests != took_requests:
                on_change()
        # A worker that has drained ends this stream before it has sent its last outputs.
        self._is_ready = False
        on_change()
        await self.lost.wait()

    async def _probe(self) -> None:
        """Requests the load of a silent worker: a frozen process keeps its connections open."""
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_S)
            if asyncio.get_running_loop().time() - self._last_report_s >= _PROBE_INTERVAL_S:
                await self.get_load(_PROBE_TIMEOUT_S)

    async def _until_dropped(self) -> None:
        raise await self._dropped


class PrefillReplica(Replica):
    """A worker of the prefill tier."""

    def __init__(
        self,
        address: str,
        info: worker_pb2.GetInfoResponse,
        channel: grpc.aio.Channel,
        security: ClusterSecurity,
    ) -> None:
        super().__init__(address, info, channel, security)
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._releases: set[asyncio.Task[None]] = set()

    async def prefill(
        self, spec: RequestSpec, namespace: bytes
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Computes a prompt on the replica and yields its progress. The caller closes the
        generator, which cancels the call.

        Raises:
            ReplicaLostError: the replica was lost.
            BatonError: the replica answered with this error.
        """
        message = prefill_pb2.PrefillRequest(spec=spec_to_proto(spec), namespace=namespace)
        call = self._stub.Prefill(
            message, timeout=spec.remaining_s(), metadata=self._security.call_metadata()
        )
        lost = asyncio.create_task(self.lost.wait())
        try:
            while (response := await self._next_of(call, lost)) is not grpc.aio.EOF:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()
            lost.cancel()

    def release_handoff(self, handoff_id: str) -> None:
        """Makes the replica drop a handoff's blocks. Best effort, in the background: blocks
        that are not dropped expire with their lease.
        """
        if self.lost.is_set() or len(self._releases) >= _MAX_PENDING_RELEASES:
            return
        task = asyncio.create_task(self._release(handoff_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _next_of(self, call: _PrefillCall, lost: "asyncio.Task[Any]") -> Any:
        """Returns the call's next message, or EOF."""
        reading = asyncio.create_task(call.read())
        try:
            await asyncio.wait((reading, lost), return_when=asyncio.FIRST_COMPLETED)
            # Closing a lost replica's channel cancels its calls, which does not cancel this task.
            if not reading.done() or reading.cancelled():
                raise ReplicaLostError(f"prefill replica {self.address} was lost")
            return reading.result()
        finally:
            reading.cancel()

    def _failure(self, error: grpc.aio.AioRpcError) -> BatonError:
        """The error of a call. That the replica refuses this router does not concern the client."""
        failure = from_rpc_error(error)
        if isinstance(failure, UnauthenticatedError | PermissionDeniedError):
            return ReplicaLostError(f"prefill replica {self.address}: {failure.message}")
        return failure

    async def _release(self, handoff_id: str) -> None:
        message = prefill_pb2.ReleaseHandoffRequest(handoff_id=handoff_id)
        try:
            await self._stub.ReleaseHandoff(
                message, timeout=_RELEASE_TIMEOUT_S, metadata=self._security.call_metadata()
            )
        except grpc.aio.AioRpcError as error:
            _LOGGER.debug("handoff %s was not released: %s", handoff_id, error.details())


class DecodeReplica(Replica):
    """A worker of the decode tier.

    Attributes:
        connection: starts requests on the replica and receives their outputs.
    """

    def __init__(
        self,
        address: str,
        info: worker_pb2.GetInfoResponse,
        channel: grpc.aio.Channel,
        security: ClusterSecurity,
    ) -> None:
        super().__init__(address, info, channel, security)
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self.connection = DecodeConnection(stub, address, security)

    @property
    @override
    def takes_requests(self) -> bool:
        """False as soon as the connection has broken; `lost` is set a moment later."""
        return super().takes_requests and self.connection.is_open

    @override
    def _activities(self, on_change: Callable[[], None]) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super()._activities(on_change), self.connection.run()]
