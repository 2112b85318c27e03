"""`PrefillReplica` and `DecodeReplica`: one connected worker of either tier."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import grpc
from typing_extensions import override

from baton.common.errors import (
    BatonError,
    DeadlineExceededError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.common.request.request_spec import RequestSpec
from baton.common.request.spec_wire import spec_to_proto
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from router.fleet.capacity import Capacity
from router.fleet.decode_connection import DecodeConnection, ReplicaLostError
from router.fleet.replica import Replica
from router.fleet.replica_load import ReplicaLoads
from router.routing.cache_index import CacheIndex
from rpc.errors import from_rpc_error

__all__ = ["DecodeReplica", "PrefillReplica"]

_LOGGER = logging.getLogger("baton.router")
_RELEASE_TIMEOUT_S = 5.0
_MAX_PENDING_RELEASES = 256
_CLOCK_TOLERANCE_S = 0.05
"""gRPC's timers may end a call a little before this process finds that its deadline has passed."""

_Call = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]


class PrefillReplica(Replica):
    """A worker of the prefill tier."""

    tier = worker_pb2.WORKER_ROLE_PREFILL

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
        super().__init__(address, info, channel, security, index, loads, on_space)
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._releases: set[asyncio.Task[None]] = set()

    @property
    @override
    def has_space(self) -> bool:
        """Whether it has so few prompts to compute that it might soon lack some."""
        return self._load.may_queue_prompt

    @override
    def _capacity(self) -> Capacity:
        """A prompt is no longer than leaves room for one generated token."""
        info = self.info
        return Capacity(min(info.max_model_len - 1, info.max_pool_tokens), info.max_num_seqs)

    async def prefill(
        self,
        spec: RequestSpec,
        namespace: bytes,
        prefix: prefill_pb2.KvHandoff | None = None,
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Computes a prompt on the replica and yields its progress. The caller closes the
        generator, which cancels the call.

        Args:
            spec: the request.
            namespace: digest that the router's block keys start from.
            prefix: where leading blocks of the prompt are that another replica lends.

        Raises:
            ReplicaLostError: the replica was lost.
            BatonError: the replica answered with this error.
        """
        message = prefill_pb2.PrefillRequest(namespace=namespace, prefix=prefix)
        spec_to_proto(spec, message.spec)
        call = self._stub.Prefill(
            message, timeout=spec.remaining_s(), metadata=self._security.call_metadata()
        )
        lost = asyncio.create_task(self.lost.wait())
        try:
            while (response := await self._next_of(call, lost)) is not grpc.aio.EOF:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, spec) from error
        finally:
            call.cancel()
            lost.cancel()

    def release_handoff(self, handoff_id: str) -> None:
        """Makes the replica drop a handoff's blocks. Best effort, in the background: blocks
        that are not dropped expire with their lease.
        """
        self._start_release(prefill_pb2.ReleaseHandoffRequest(handoff_id=handoff_id))

    def release_request(self, request_id: str) -> None:
        """Makes the replica drop the blocks of a call that was cancelled. It may have ended, with a
        handoff that this router did not receive. Best effort.
        """
        self._start_release(prefill_pb2.ReleaseHandoffRequest(request_id=request_id))

    def _start_release(self, message: prefill_pb2.ReleaseHandoffRequest) -> None:
        if self.lost.is_set() or len(self._releases) >= _MAX_PENDING_RELEASES:
            return
        task = asyncio.create_task(self._release(message))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _next_of(self, call: _Call, lost: "asyncio.Task[Any]") -> Any:
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

    def _failure(self, error: grpc.aio.AioRpcError, spec: RequestSpec) -> BatonError:
        """The error of a call. That the replica refuses this router, or has a time limit of its
        own, does not concern the client.
        """
        failure = from_rpc_error(error)
        if isinstance(failure, DeadlineExceededError) and not _has_expired(spec):
            return UnavailableError(f"prefill replica {self.address}: {failure.message}")
        if isinstance(failure, UnauthenticatedError | PermissionDeniedError):
            return ReplicaLostError(f"prefill replica {self.address}: {failure.message}")
        return failure

    async def _release(self, message: prefill_pb2.ReleaseHandoffRequest) -> None:
        try:
            await self._stub.ReleaseHandoff(
                message, timeout=_RELEASE_TIMEOUT_S, metadata=self._security.call_metadata()
            )
        except grpc.aio.AioRpcError as error:
            name = ascii(message.handoff_id or message.request_id)
            _LOGGER.debug("handoff of %s was not released: %s", name, error.details())


def _has_expired(spec: RequestSpec) -> bool:
    deadline = spec.deadline
    return deadline is not None and time.monotonic() >= deadline - _CLOCK_TOLERANCE_S


class DecodeReplica(Replica):
    """A worker of the decode tier.

    Attributes:
        connection: starts requests on the replica and receives their outputs.
    """

    tier = worker_pb2.WORKER_ROLE_DECODE

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
        super().__init__(address, info, channel, security, index, loads, on_space)
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self.connection = DecodeConnection(stub, address, security, self._note_state)

    @override
    def _can_take(self) -> bool:
        """False as soon as the connection has broken; `lost` is set a moment later."""
        return super()._can_take() and self.connection.is_open

    def release_handoff(self, handoff_id: str) -> None:
        """Makes the replica drop the blocks of a request that has moved. Best effort."""
        self.connection.release(handoff_id)

    @override
    def _activities(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super()._activities(), self.connection.run()]
