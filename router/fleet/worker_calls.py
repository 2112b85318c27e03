"""`WorkerCalls`: calls of one worker's WorkerService."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from baton.common.errors import UnavailableError
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import prefill_pb2, worker_pb2, worker_pb2_grpc
from rpc.cancellation import is_task_cancelled
from rpc.errors import from_rpc_error

__all__ = ["WorkerCalls"]

_Loads = grpc.aio.UnaryStreamCall[worker_pb2.WatchLoadRequest, worker_pb2.WatchLoadResponse]
_KvEvents = grpc.aio.UnaryStreamCall[
    worker_pb2.WatchKvEventsRequest, worker_pb2.WatchKvEventsResponse
]


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Raises Baton's errors in place of gRPC's, and of the cancellation of a call whose channel was
    closed: the task that waits for it is not cancelled.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise
        raise UnavailableError("the worker was lost") from None


class WorkerCalls:
    """Calls of one worker.

    Args:
        channel: a channel to it.
        security: what this router shows to it.
    """

    def __init__(self, channel: grpc.aio.Channel, security: ClusterSecurity) -> None:
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._security = security

    def watch_load(self) -> _Loads:
        """Opens the stream of its load reports."""
        return self._stub.WatchLoad(
            worker_pb2.WatchLoadRequest(), metadata=self._security.call_metadata()
        )

    def watch_kv_events(self) -> _KvEvents:
        """Opens the stream of the events of its prefix cache."""
        return self._stub.WatchKvEvents(
            worker_pb2.WatchKvEventsRequest(), metadata=self._security.call_metadata()
        )

    async def get_load(self, timeout_s: float) -> worker_pb2.GetLoadResponse:
        """Asks for the load now, and for what it has done.

        Raises:
            BatonError: it did not answer in time, or was lost.
        """
        request = worker_pb2.GetLoadRequest()
        with _typed_errors():
            return await self._stub.GetLoad(
                request, timeout=timeout_s, metadata=self._security.call_metadata()
            )

    async def lend_prefix(
        self, namespace: bytes, keys: Sequence[bytes], timeout_s: float
    ) -> prefill_pb2.KvHandoff | None:
        """Asks to lend the beginning of a prompt; None if it lends nothing of it.

        Raises:
            BatonError: it did not answer in time, refused, or was lost.
        """
        request = worker_pb2.LendPrefixRequest(namespace=namespace, keys=keys)
        with _typed_errors():
            answer = await self._stub.LendPrefix(
                request, timeout=timeout_s, metadata=self._security.call_metadata()
            )
        return answer.handoff if answer.HasField("handoff") else None

    async def change_role(self, role: "worker_pb2.WorkerRole.ValueType", timeout_s: float) -> None:
        """Changes the tier of the worker.

        Raises:
            BatonError: the worker cannot have this role, or did not answer in time.
        """
        with _typed_errors():
            await self._stub.ChangeRole(
                worker_pb2.ChangeRoleRequest(role=role),
                timeout=timeout_s,
                metadata=self._security.call_metadata(),
            )
