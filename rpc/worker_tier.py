"""`WorkerTier`: the life of a started worker of either tier (`rpc.server.Service`)."""

import asyncio
from collections.abc import Awaitable, Callable

from baton.v1 import worker_pb2_grpc
from rpc.server import RpcServer
from rpc.worker import Worker, WorkerServicer

__all__ = ["WorkerTier"]


class WorkerTier:
    """Adds WorkerService to a server, which it then declares ready.

    Args:
        worker: a started worker; closed with the tier.
        server: has the tier's own servicer already.
        flush: ends what streams the tier's own servicer has, once all
            requests have ended, within the seconds it is given.
    """

    def __init__(
        self,
        worker: Worker,
        server: RpcServer,
        flush: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        self._worker = worker
        self._server = server
        self._flush = flush
        self._servicer = WorkerServicer(worker, lambda: server.set_serving(False))
        self._failure_watch = asyncio.create_task(self._watch_failure())
        server.add_servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, self._servicer)
        server.set_serving(True)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests; waits for the running ones and for their last outputs to go out."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await self._worker.drain(timeout_s)
        self._servicer.close()
        if self._flush is not None:
            await self._flush(max(0.0, deadline - loop.time()))

    async def close(self) -> None:
        """Stops the worker."""
        self._failure_watch.cancel()
        await self._worker.close()

    async def _watch_failure(self) -> None:
        self._server.fail(await self._worker.wait_failed())
