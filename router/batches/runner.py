"""`BatchRunner`: runs the batches of a folder, in one of the processes that share it.

    lock     the runner.lock of the folder; the kernel frees it when its process ends
    queue    looked at every second, or when a client of this process changes something
    batches  several at once; each waits in turn for places, of which there are few; a request that
             is refused for a time leaves its place to others; a batch that is cancelled or
             expires while it waits ends without one
    results  appended one by one, so that a run that ends at any moment goes on elsewhere

A batch's requests have a low priority, and at most half of the fleet's places: interactive traffic
keeps the others, and is served first.
"""

import asyncio
import fcntl
import logging
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from router.batches.folder import BatchFolder, QueuedBatch
from router.batches.requests import BatchRequest
from router.batches.run import BatchRun
from router.batches.slots import BatchSlots, Slots

__all__ = ["Answer", "BatchRunner", "CallApi"]

_LOGGER = logging.getLogger("baton.batches")
_MAX_BATCHES = 16
"""The most batches that run at once; the others wait in the queue."""
_MAX_BATCHES_OF_TENANT = 4
_MAX_ENDING = 4
"""The most batches that end at once without having run: each has its input in memory."""
_MAX_BYTES = 64 * 2**20
_INTERVAL_S = 1.0
_SWEEP_INTERVAL_S = 600.0
_TRY_AGAIN_S = 10.0
_FIRST_SERVER_ERROR = 500
_MAX_FAILURES = 3
"""How often a request may fail in the server, other than by the load."""
_MIN_WAIT_S, _MAX_WAIT_S = 0.5, 30.0
_SLACK_S = 60.0
"""Requests have no deadline but that their batch expires, which ends them before this one."""
_NUM_THREADS = 4
_P = ParamSpec("_P")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the API.

    Attributes:
        status: of HTTP.
        body: JSON.
        is_busy: whether the load, or a limit of the client, alone is why there is no other answer.
        retry_after_s: seconds after which the same request may succeed; None if not stated.
    """

    status: int
    body: bytes
    is_busy: bool = False
    retry_after_s: float | None = None


class CallApi(Protocol):
    """Calls the API as a client does, in this process."""

    def __call__(
        self, tenant: str, path: str, body: bytes, request_id: str, timeout_s: float
    ) -> Awaitable[Answer]:
        """Returns the answer.

        Args:
            tenant: the name of the client for whom the request runs.
            path: the endpoint.
            body: the request's.
            request_id: names the request.
            timeout_s: seconds until its deadline, however long other requests may take.
        """


class BatchRunner:
    """Runs batches while this process holds the lock of their folder.

    Args:
        folder: the folder.
        call: calls the API.
        read_limit: returns how many requests may run at once.
        max_line_bytes: the most bytes of a request.
        interval_s: seconds between two looks at the folder.
    """

    def __init__(
        self,
        folder: BatchFolder,
        call: CallApi,
        read_limit: Callable[[], int],
        max_line_bytes: int,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._folder = folder
        self._call = call
        self._slots = Slots(read_limit, _MAX_BYTES)
        self._max_line_bytes = max_line_bytes
        self._interval_s = interval_s
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "batch-files")
        self._running: dict[str, asyncio.Task[None]] = {}
        self._of_tenants: Counter[str] = Counter()  # of those with a place, by the client's folder
        self._ending: set[str] = set()  # those of the running ones that have none
        self._not_before: dict[str, float] = {}
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Looks at the folder at once: a client has changed something."""
        self._woken.set()

    async def run(self) -> None:
        """Runs batches until it is cancelled. Waits while another process runs them."""
        try:
            while True:
                try:
                    await self._run_with_lock()
                except OSError as error:
                    _LOGGER.error("cannot lock the folder of batches, trying again: %s", error)
                await asyncio.sleep(_TRY_AGAIN_S)
        finally:
            self._threads.shutdown(wait=False)

    async def _run_with_lock(self) -> None:
        """Waits for the lock of the folder, and runs batches.

        Raises:
            OSError: the folder cannot be locked.
        """
        lock = await self._in_thread(os.open, self._folder.lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not await self._in_thread(_locks, lock):
                await self._pause()
            _LOGGER.info("this process runs the batches")
            await self._run_batches()
        finally:
            await self._stop()
            os.close(lock)  # frees the lock; the batches have ended

    async def _run_batches(self) -> None:
        loop = asyncio.get_running_loop()
        swept_at = float("-inf")
        while True:
            try:
                if loop.time() - swept_at > _SWEEP_INTERVAL_S:
                    swept_at = loop.time()
                    await self._in_thread(self._folder.sweep)
                await self._begin_batches()
            except OSError as error:
                _LOGGER.error("cannot read the folder of batches, trying again: %s", error)
            self._slots.grant()
            await self._pause()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._woken.wait()
        self._woken.clear()

    async def _begin_batches(self) -> None:
        """Starts batches of the queue: those for which there is room, and those that are to end."""
        queue = await self._in_thread(self._folder.queue)
        for queued in queue:
            if self._has_room(queued):
                self._of_tenants[queued.tenant_key] += 1
                self._begin(queued)
        waiting = [queued for queued in queue if self._may_begin(queued)]
        for queued in await self._in_thread(self._to_end, waiting):
            if len(self._ending) < _MAX_ENDING and self._may_begin(queued):  # it may be there twice
                self._ending.add(queued.id)
                self._begin(queued)

    def _has_room(self, queued: QueuedBatch) -> bool:
        """Whether a batch may begin to run."""
        has_room = self._of_tenants.total() < _MAX_BATCHES
        has_room = has_room and self._of_tenants[queued.tenant_key] < _MAX_BATCHES_OF_TENANT
        return has_room and self._may_begin(queued)

    def _may_begin(self, queued: QueuedBatch) -> bool:
        """Whether a batch does not run, and has not failed just now."""
        now = asyncio.get_running_loop().time()
        return queued.id not in self._running and self._not_before.get(queued.id, now) <= now

    def _to_end(self, batches: Sequence[QueuedBatch]) -> Sequence[QueuedBatch]:
        """The batches that are cancelled or have expired. Waits for the disk."""
        return [queued for queued in batches if self._folder.reason_to_stop(queued) is not None]

    def _begin(self, queued: QueuedBatch) -> None:
        self._not_before.pop(queued.id, None)
        task = asyncio.create_task(self._run_batch(queued))
        self._running[queued.id] = task
        task.add_done_callback(partial(self._end, queued))

    def _end(self, queued: QueuedBatch, task: asyncio.Task[None]) -> None:
        batch_id = queued.id
        del self._running[batch_id]
        if batch_id in self._ending:
            self._ending.discard(batch_id)
        else:
            self._of_tenants -= Counter((queued.tenant_key,))  # without those that have none left
        self.wake()
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._not_before[batch_id] = asyncio.get_running_loop().time() + _TRY_AGAIN_S
        _LOGGER.error("batch %s stopped, trying again", batch_id, exc_info=error)

    async def _stop(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run_batch(self, queued: QueuedBatch) -> None:
        run = BatchRun(self._folder, queued, self._max_line_bytes)
        disk = _Disk(self._threads)
        try:
            if await disk.call(run.begin):
                status = await self._send_until_stopped(run, disk)
                await disk.call(run.finish, status)
        finally:
            await disk.call(run.close)

    async def _send_until_stopped(self, run: BatchRun, disk: "_Disk") -> str:
        """Sends the requests of a batch; returns its last status."""
        sending = asyncio.create_task(self._send_all(run, disk))
        try:
            while True:
                reason = await disk.call(run.reason_to_stop)
                if reason is not None:
                    return reason
                await asyncio.wait({sending}, timeout=self._interval_s)
                if sending.done():
                    sending.result()
                    return "completed"
                await disk.call(run.checkpoint)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_all(self, run: BatchRun, disk: "_Disk") -> None:
        slots = BatchSlots(self._slots)
        async with asyncio.TaskGroup() as group:
            while requests := await disk.call(run.next_requests):
                for request in requests:
                    await slots.take(request.num_bytes)
                    sending = self._send(run, request, disk, slots)
                    _start(group, sending, partial(slots.release, request.num_bytes))

    async def _send(
        self, run: BatchRun, request: BatchRequest, disk: "_Disk", slots: BatchSlots
    ) -> None:
        """Sends a request, which has a place, until it has an answer that stays."""
        record = run.record
        request_id = f"{record.id}-{request.number}"
        num_failures, wait_s = 0, _MIN_WAIT_S
        while True:
            answer = await self._call(
                *(record.tenant, record.endpoint, request.body, request_id), run.left_s + _SLACK_S
            )
            num_failures += answer.status >= _FIRST_SERVER_ERROR and not answer.is_busy
            is_final = answer.status < _FIRST_SERVER_ERROR or num_failures >= _MAX_FAILURES
            if is_final and not answer.is_busy:
                break
            least_s = min(answer.retry_after_s or 0.0, _MAX_WAIT_S)
            await slots.rest(least_s + wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _MAX_WAIT_S)
        await disk.call(run.add_answer, request.custom_id, answer.status, request_id, answer.body)

    async def _in_thread(
        self, function: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs
    ) -> _Result:
        return await _settled(self._threads, partial(function, *args, **kwargs))


class _Disk:
    """Calls methods of a run in threads, one at a time.

    Args:
        threads: the threads.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._turn = asyncio.Lock()

    async def call(
        self, method: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs
    ) -> _Result:
        """Returns the result of a method."""
        async with self._turn:
            return await _settled(self._threads, partial(method, *args, **kwargs))


def _start(
    group: asyncio.TaskGroup, sending: Coroutine[Any, Any, None], release: Callable[[], None]
) -> None:
    """Sends a request that has a place."""
    try:
        task = group.create_task(sending)
    except RuntimeError:  # another request of the group has failed
        sending.close()
        release()
        raise
    task.add_done_callback(lambda _: release())


async def _settled(threads: Executor, function: Callable[[], _Result]) -> _Result:
    """Returns the result of a function in a thread. If the caller is cancelled, the function has
    ended all the same when this ends: nothing changes files behind the back of what follows.
    """
    call = asyncio.get_running_loop().run_in_executor(threads, function)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait({call})
        raise


def _locks(lock: int) -> bool:
    """Whether this process gets the lock of an open file, or has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
