"""`KvEventStream`: follows the events of one replica's prefix cache for the router's index.

The stream is a help, never a condition: when it fails, the replica stays in use, the index knows
only what was sent there, and the stream is opened again after a backoff.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable

import grpc

from baton.v1 import worker_pb2
from router.routing.cache_form import CacheForm
from router.routing.cache_index import CacheIndex
from router.routing.event_reader import MAX_STALENESS_S, KvEventReader
from router.routing.replica_cache import KvEventError, ReplicaCache
from rpc.cancellation import is_task_cancelled

__all__ = ["KvEventStream"]

_LOGGER = logging.getLogger("baton.router")
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_BEGIN_TIMEOUT_S = 10.0
"""Within this time a worker sends the beginning of its events."""

_Call = grpc.aio.UnaryStreamCall[worker_pb2.WatchKvEventsRequest, worker_pb2.WatchKvEventsResponse]


class KvEventStream:
    """The events of one connected replica.

    Args:
        address: its `host:port`.
        info: its description of what it serves.
        open_stream: opens the stream of its events.
        index: learns what its prefix cache holds.
        load: returns its last load report.
        is_leaving: whether it drains or leaves its tier, when the stream may end.
    """

    def __init__(
        self,
        address: str,
        info: worker_pb2.GetInfoResponse,
        open_stream: Callable[[], _Call],
        index: CacheIndex,
        load: Callable[[], worker_pb2.WorkerLoad],
        is_leaving: Callable[[], bool],
    ) -> None:
        self._address = address
        self._worker_id = info.worker_id
        self._form = CacheForm.from_info(info)
        self._open_stream = open_stream
        self._index = index
        self._load = load
        self._is_leaving = is_leaving
        self._call: _Call | None = None
        self._reader: KvEventReader | None = None
        self._cache: ReplicaCache | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._problem = ""

    @property
    def cache(self) -> ReplicaCache | None:
        """What the index knows of the replica; None if it has no prefix cache."""
        return self._cache

    @property
    def staleness_s(self) -> float:
        """For how long events are known that have not arrived; 0.0 if there are none."""
        return 0.0 if self._reader is None else self._reader.staleness_s(time.monotonic())

    def report(self, newest: int) -> None:
        """Takes the number of the replica's newest event from a report of its load. A stream that
        is too far behind is opened again.
        """
        if self._reader is not None:
            self._reader.report(newest, time.monotonic())
            if (
                self._reader.staleness_s(time.monotonic()) > MAX_STALENESS_S
                and self._call is not None
            ):
                self._call.cancel()

    async def run(self) -> None:
        """Follows the events until cancelled. Nothing that goes wrong here ends the replica."""
        if self._form is None:
            await asyncio.Event().wait()
            return
        while True:
            # Of a worker that is a replica of both tiers, the first one follows the events.
            self._cache = self._index.join(self._worker_id, self._form)
            async with self._cache.turn:
                await self._follow_once(self._cache)
            self._backoff_s = min(self._backoff_s * 2, _MAX_BACKOFF_S)
            await asyncio.sleep(self._backoff_s * random.uniform(0.5, 1.0))

    async def _follow_once(self, cache: ReplicaCache) -> None:
        """Follows one stream to its end, and logs why it ended."""
        reader = self._reader = KvEventReader(
            cache, self._index.stored, lambda: self._load().kv_store_ids
        )
        problem = "the stream ended"
        try:
            await self._follow(reader)
        except KvEventError as error:
            problem = str(error)
        except grpc.aio.AioRpcError as error:
            problem = error.details() or error.code().name
        except TimeoutError:
            problem = f"they did not begin within {_BEGIN_TIMEOUT_S:g} s"
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            problem = f"they were more than {MAX_STALENESS_S:g} s behind"  # the call was cancelled
        except Exception:
            _LOGGER.exception("events of replica %s", self._address)
        finally:
            reader.end()
            self._reader = None
        self._log_absent(problem)

    async def _follow(self, reader: KvEventReader) -> None:
        self._call = call = self._open_stream()
        try:
            async with asyncio.timeout(_BEGIN_TIMEOUT_S) as beginning:
                async for message in call:
                    reader.take(message.events)
                    if reader.has_begun and beginning.when() is not None:
                        beginning.reschedule(None)
                        self._log_present()
                    await asyncio.sleep(0)  # a snapshot has many messages
        finally:
            call.cancel()

    def _log_present(self) -> None:
        self._backoff_s = _FIRST_BACKOFF_S
        if self._problem:
            self._problem = ""
            _LOGGER.info("replica %s: events of its prefix cache are back", self._address)

    def _log_absent(self, problem: str) -> None:
        """Logs why events are absent, unless it repeats the last message."""
        if problem != self._problem and not self._is_leaving():
            self._problem = problem
            _LOGGER.warning(
                "replica %s: events of its prefix cache are absent (%s); only prompts that were "
                "sent there count",
                self._address,
                problem,
            )
