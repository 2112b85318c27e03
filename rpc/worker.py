"""`WorkerServicer`: WorkerService for whichever tier, over a `Worker`.

`WorkerTier`: the life of a started worker of either tier (`rpc.server.Service`).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from baton.errors import InvalidArgumentError
from baton.v1 import worker_pb2, worker_pb2_grpc
from rpc.server import RpcServer

__all__ = ["Worker", "WorkerServicer", "WorkerTier"]

_DEFAULT_WATCH_INTERVAL_MS = 50
_DEFAULT_DRAIN_TIMEOUT_MS = 30_000


class Worker(Protocol):
    """What a worker's server needs of a tier. `engine.worker.EngineWorker` is the real one."""

    @property
    def info(self) -> worker_pb2.GetInfoResponse:
        """What the worker serves; constant."""

    def load(self) -> worker_pb2.WorkerLoad:
        """Its load now. Cheap."""

    def abort(self, request_ids: Sequence[str]) -> int:
        """Ends requests with ABORTED; returns how many were running."""

    async def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks were cached."""

    def watch_kv_events(self) -> AsyncGenerator[worker_pb2.WatchKvEventsResponse, None]:
        """What is cached, then each change, without end."""

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests, waits for the running; returns how many remain."""

    async def wait_failed(self) -> BaseException:
        """Returns the cause when the worker can serve no more; never, if all goes well."""

    async def close(self) -> None:
        """Releases everything."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Describes and steers one worker; see `protos/baton/v1/worker.proto`.

    Args:
        worker: the tier.
        on_drain: called when the Drain method begins, say to turn health NOT_SERVING.
    """

    def __init__(self, worker: Worker, on_drain: Callable[[], None]) -> None:
        self._worker = worker
        self._on_drain = on_drain
        self._closed = asyncio.Event()

    async def GetInfo(  # noqa: N802 - gRPC's name
        self, request: worker_pb2.GetInfoRequest, context: Any
    ) -> worker_pb2.GetInfoResponse:
        """What the worker serves."""
        return self._worker.info

    async def GetLoad(  # noqa: N802 - gRPC's name
        self, request: worker_pb2.GetLoadRequest, context: Any
    ) -> worker_pb2.GetLoadResponse:
        """Its load now."""
        return worker_pb2.GetLoadResponse(load=self._worker.load())

    async def WatchLoad(  # noqa: N802 - gRPC's name
        self, request: worker_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Its load now and after each change, at most every interval, until `close`."""
        interval_s = _watch_interval_ms(request) / 1000
        sent = None
        while not self._closed.is_set():
            load = self._worker.load()
            if load != sent:
                yield worker_pb2.WatchLoadResponse(load=load)
                sent = load
            await self._closed_within(interval_s)

    async def Abort(  # noqa: N802 - gRPC's name
        self, request: worker_pb2.AbortRequest, context: Any
    ) -> worker_pb2.AbortResponse:
        """Ends requests."""
        return worker_pb2.AbortResponse(num_aborted=self._worker.abort(request.request_ids))

    async def Drain(  # noqa: N802 - gRPC's name
        self, request: worker_pb2.DrainRequest, context: Any
    ) -> worker_pb2.DrainResponse:
        """Refuses new requests and waits for the running ones."""
        is_set = request.HasField("timeout_ms")
        timeout_ms = request.timeout_ms if is_set else _DEFAULT_DRAIN_TIMEOUT_MS
        self._on_drain()
        return worker_pb2.DrainResponse(num_remaining=await self._worker.drain(timeout_ms / 1000))

    async def ResetPrefixCache(  # noqa: N802 - gRPC's name
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Any
    ) -> worker_pb2.ResetPrefixCacheResponse:
        """Forgets every cached prefix."""
        num_blocks = await self._worker.reset_prefix_cache()
        return worker_pb2.ResetPrefixCacheResponse(num_blocks=num_blocks)

    async def WatchKvEvents(  # noqa: N802 - gRPC's name
        self, request: worker_pb2.WatchKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchKvEventsResponse]:
        """What enters and leaves the prefix cache, until `close`."""
        closed = asyncio.create_task(self._closed.wait())
        try:
            async with aclosing(self._worker.watch_kv_events()) as responses:
                while (response := await _next_unless(closed, responses)) is not None:
                    yield response
        finally:
            closed.cancel()

    def close(self) -> None:
        """Ends the streams that watch the worker."""
        self._closed.set()

    async def _closed_within(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        except TimeoutError:
            pass


async def _next_unless(
    ended: "asyncio.Task[bool]", responses: AsyncGenerator[worker_pb2.WatchKvEventsResponse, None]
) -> worker_pb2.WatchKvEventsResponse | None:
    """The next response; None if `ended` is done first."""
    coming = asyncio.ensure_future(anext(responses))
    try:
        await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else None
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


def _watch_interval_ms(request: worker_pb2.WatchLoadRequest) -> int:
    if not request.HasField("interval_ms"):
        return _DEFAULT_WATCH_INTERVAL_MS
    if request.interval_ms < 1:
        raise InvalidArgumentError.for_field("interval_ms", request.interval_ms, ">= 1")
    return request.interval_ms


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
