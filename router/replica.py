"""`Replica`: one connected worker, from its GetInfo to its loss.

What both tiers have in common is its load, its liveness and what this router
has reserved on it; the tiers differ in the calls they take.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from baton.errors import FailedPreconditionError
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from router.decode_connection import DecodeConnection, DecodeStream, ReplicaLostError
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
    """A worker that answers, and how busy it is.

    Attributes:
        address: where it is, `host:port`.
        info: what it serves.
        load: as it last reported.
        lost: set once it is gone; a replica that comes back is a new object.
    """

    def __init__(
        self, address: str, info: worker_pb2.GetInfoResponse, channel: grpc.aio.Channel
    ) -> None:
        self.address = address
        self.info = info
        self.load = worker_pb2.WorkerLoad()
        self.lost = asyncio.Event()
        self._dropped: asyncio.Future[FailedPreconditionError]
        self._dropped = asyncio.get_running_loop().create_future()
        self._worker = worker_pb2_grpc.WorkerServiceStub(channel)
        self._is_ready = False
        self._last_heard_s = 0.0
        self._num_requests = 0
        self._num_tokens = 0
        self._num_blocks = 0

    @property
    def replica_id(self) -> str:
        """Drawn by the worker at each start."""
        return self.info.worker_id

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may be sent to it."""
        return self._is_ready and not self.load.draining and not self.lost.is_set()

    def state(self, overlap_blocks: int) -> ReplicaState:
        """What policy needs to know.

        The worker's report lags and also counts other routers' requests; the
        reservations are exact and count only ours. The larger one is used.
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

    @contextmanager
    def reserve(self, *, num_tokens: int = 0, num_blocks: int = 0) -> Iterator[None]:
        """Counts a request as this replica's, before its own report does.

        Args:
            num_tokens: prompt tokens that it will compute.
            num_blocks: blocks, of the size that keys name, that it will fill.
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
        """Blocks of its pool in units of those that keys name, which all replicas share."""
        return num_pool_blocks * self.info.pool_block_size // self.info.block_size

    def drop(self, reason: FailedPreconditionError) -> None:
        """Takes no requests from now on and ends `run` with this error. Idempotent."""
        if not self._dropped.done():
            self._dropped.set_result(reason)
        self.lost.set()

    async def run(self, on_change: Callable[[], None]) -> None:
        """Follows the worker until it is lost.

        Args:
            on_change: called when it starts or stops taking requests.

        Raises:
            ReplicaLostError: in the end.
            FailedPreconditionError: what `drop` was given.
        """
        tasks = [asyncio.create_task(coroutine) for coroutine in self._activities(on_change)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = done.pop()
            if not ended.cancelled():  # as gRPC may cancel a call; that is no cancel of ours
                ended.result()
        except grpc.aio.AioRpcError as error:
            raise ReplicaLostError(from_rpc_error(error).message) from error
        finally:
            self.lost.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            on_change()
        raise ReplicaLostError("a stream of it was cancelled")

    def _activities(self, on_change: Callable[[], None]) -> Sequence[Coroutine[Any, Any, None]]:
        """What runs while the replica lives; the first to end means that it is lost."""
        return [self._watch_load(on_change), self._probe(), self._until_dropped()]

    async def _watch_load(self, on_change: Callable[[], None]) -> None:
        async for message in self._worker.WatchLoad(worker_pb2.WatchLoadRequest()):
            took_requests = self.takes_requests
            self.load = message.load
            self._is_ready = True
            self._last_heard_s = asyncio.get_running_loop().time()
            if self.takes_requests != took_requests:
                on_change()
        # A worker that has drained ends this stream before its last outputs are out.
        self._is_ready = False
        on_change()
        await self.lost.wait()

    async def _probe(self) -> None:
        """A frozen worker keeps its connections, so one that is silent is asked for its load."""
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_S)
            if asyncio.get_running_loop().time() - self._last_heard_s >= _PROBE_INTERVAL_S:
                await self._worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=_PROBE_TIMEOUT_S)

    async def _until_dropped(self) -> None:
        raise await self._dropped


class PrefillReplica(Replica):
    """A worker of the prefill tier."""

    def __init__(
        self, address: str, info: worker_pb2.GetInfoResponse, channel: grpc.aio.Channel
    ) -> None:
        super().__init__(address, info, channel)
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._releases: set[asyncio.Task[None]] = set()

    async def prefill(
        self, request: prefill_pb2.WorkerRequest, timeout_s: float
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Computes a prompt there; yields what the replica tells of it. To be closed by the
        caller, which cancels what is still under way.

        Raises:
            ReplicaLostError: the replica went away meanwhile.
            BatonError: what the replica answered.
        """
        message = prefill_pb2.PrefillRequest(request=request)
        call = self._stub.Prefill(message, timeout=timeout_s)
        lost = asyncio.create_task(self.lost.wait())
        try:
            while (response := await self._next_of(call, lost)) is not grpc.aio.EOF:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
            lost.cancel()

    def release_handoff(self, handoff_id: str) -> None:
        """Tells the replica, in the background, that a handoff is no longer needed.

        Best effort: what is not released ends with its lease.
        """
        if self.lost.is_set() or len(self._releases) >= _MAX_PENDING_RELEASES:
            return
        task = asyncio.create_task(self._release(handoff_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _next_of(self, call: _PrefillCall, lost: "asyncio.Task[Any]") -> Any:
        """The call's next message, or EOF."""
        reading = asyncio.create_task(call.read())
        try:
            await asyncio.wait((reading, lost), return_when=asyncio.FIRST_COMPLETED)
            # Closing a lost replica's channel cancels its calls, which is not our caller's cancel.
            if not reading.done() or reading.cancelled():
                raise ReplicaLostError(f"prefill replica {self.address} was lost")
            return reading.result()
        finally:
            reading.cancel()

    async def _release(self, handoff_id: str) -> None:
        message = prefill_pb2.ReleaseHandoffRequest(handoff_id=handoff_id)
        try:
            await self._stub.ReleaseHandoff(message, timeout=_RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _LOGGER.debug("handoff %s was not released: %s", handoff_id, error.details())


class DecodeReplica(Replica):
    """A worker of the decode tier."""

    def __init__(
        self, address: str, info: worker_pb2.GetInfoResponse, channel: grpc.aio.Channel
    ) -> None:
        super().__init__(address, info, channel)
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._connection = DecodeConnection(stub, address)

    @property
    def takes_requests(self) -> bool:
        """Not once its connection has broken, which `lost` follows a moment later."""
        return super().takes_requests and self._connection.is_open

    def start(self, command: decode_pb2.StartDecode) -> DecodeStream:
        """Starts a request there; see `DecodeConnection.start`."""
        return self._connection.start(command)

    def prefetch(self, request_id: str, blocks: prefill_pb2.KvHandoff) -> None:
        """Begins to load blocks there; see `DecodeConnection.prefetch`."""
        self._connection.prefetch(request_id, blocks)

    def withdraw_prefetch(self, request_id: str) -> None:
        """See `DecodeConnection.withdraw_prefetch`."""
        self._connection.withdraw_prefetch(request_id)

    def _activities(self, on_change: Callable[[], None]) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super()._activities(on_change), self._connection.run()]
