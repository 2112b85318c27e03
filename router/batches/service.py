"""`BatchService`: the files and batches of clients, for the event loop."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from baton.common.errors import InvalidArgumentError, NotFoundError, UnavailableError
from router.batches.folder import MAX_TTL_S, BatchFolder, key_of, new_id
from router.batches.records import BATCH_INPUT, BatchRecord, FileRecord
from router.batches.requests import ENDPOINTS
from router.batches.runner import BatchRunner

__all__ = ["BatchService", "window_s"]

_LOGGER = logging.getLogger("baton.batches")
_NUM_THREADS = 4
_STOP_TIMEOUT_S = 10.0
_MIN_TTL_S = 3600
_MAX_WINDOW_S = 7 * 24 * 3600
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512
_MAX_NAME_CHARS = 255
_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def window_s(text: str) -> int:
    """The seconds of a completion window such as 24h.

    Raises:
        InvalidArgumentError: it has another form, or is too long.
    """
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        limit = "a number with s, m, h or d, such as 24h, and at most 7d"
        raise InvalidArgumentError.for_field("completion_window", text, limit)
    return seconds


class BatchService:
    """Files and batches. Each client sees its own. Used by the event loop alone.

    Args:
        folder: keeps them.
        runner: runs the batches.

    Raises:
        UnavailableError: by all methods that wait: the disk does not take or give a file.
    """

    def __init__(self, folder: BatchFolder, runner: BatchRunner) -> None:
        self._folder = folder
        self._runner = runner
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "batch-api")
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to run batches, unless another process does."""
        self._running = asyncio.create_task(self._runner.run())
        self._running.add_done_callback(_log_end)

    async def stop(self) -> None:
        """Ends the requests that run; another process, or a later one, goes on. Waits some seconds
        for a disk that does not answer. Idempotent.
        """
        if self._running is None:
            return
        self._running.cancel()
        _, waiting = await asyncio.wait({self._running}, timeout=_STOP_TIMEOUT_S)
        self._running = None
        if waiting:
            _LOGGER.warning("the disk does not answer; the batches end with the process")

    async def close(self) -> None:
        """Stops, and takes no more calls. Idempotent."""
        await self.stop()
        self._threads.shutdown(wait=False)

    async def add_file(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        content: bytes | memoryview,
        ttl_s: int | None = None,
    ) -> FileRecord:
        """Keeps a file.

        Args:
            tenant: whose it is.
            filename: as the client named it.
            purpose: must be batch.
            content: the content.
            ttl_s: seconds for which it stays; None for the longest time.

        Raises:
            InvalidArgumentError: a value is wrong, or the client has too many files.
        """
        if purpose != BATCH_INPUT:
            raise InvalidArgumentError.for_field("purpose", purpose, BATCH_INPUT)
        name = filename[-_MAX_NAME_CHARS:]
        ttl_s = _checked_ttl("expires_after", ttl_s)
        return await self._wait(self._folder.add_file, tenant, name, purpose, content, ttl_s)

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """A file.

        Raises:
            NotFoundError: the client has no such file.
        """
        return await self._wait(self._folder.file, tenant, file_id)

    async def content_path(self, tenant: str, file_id: str) -> tuple[FileRecord, Path]:
        """A file and where its content is.

        Raises:
            NotFoundError: the client has no such file, or its content is lost.
        """
        record = await self.file(tenant, file_id)
        path = self._folder.content_path(key_of(tenant), file_id)
        if not await self._wait(path.is_file):
            raise NotFoundError(f"the content of {file_id} is lost", field="file_id")
        return record, path

    async def files(self, tenant: str) -> Sequence[FileRecord]:
        """The files of a client, the newest first."""
        return await self._wait(self._folder.files, tenant)

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Removes a file.

        Raises:
            NotFoundError: the client has no such file.
            FailedPreconditionError: a batch that has not finished reads or writes it.
        """
        await self._wait(self._folder.delete_file, tenant, file_id)

    async def add_batch(
        self,
        tenant: str,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        metadata: Mapping[str, str] | None = None,
        output_ttl_s: int | None = None,
    ) -> BatchRecord:
        """Begins a batch.

        Args:
            tenant: whose it is.
            input_file_id: a file with requests.
            endpoint: the path that all of them are for.
            completion_window: such as 24h.
            metadata: the client's.
            output_ttl_s: seconds for which its output files stay; None for the longest time.

        Raises:
            InvalidArgumentError: a value is wrong, or the client has too many batches.
            NotFoundError: the client has no such file.
        """
        if endpoint not in ENDPOINTS:
            raise InvalidArgumentError.for_field(
                "endpoint", endpoint, f"one of {', '.join(ENDPOINTS)}"
            )
        seconds = window_s(completion_window)
        output_ttl_s = _checked_ttl("output_expires_after", output_ttl_s)
        _check_metadata(metadata or {})
        file = await self.file(tenant, input_file_id)
        if file.purpose != BATCH_INPUT:
            raise InvalidArgumentError.for_field(
                "input_file_id", input_file_id, f"a file with the purpose {BATCH_INPUT}"
            )
        now = self._folder.now
        record = BatchRecord(
            id=new_id("batch_"),
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            created_at=now,
            expires_at=now + seconds,
            output_ttl_s=output_ttl_s,
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            metadata=metadata,
        )
        await self._wait(self._folder.add_batch, record)
        self._runner.wake()
        return record

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """A batch.

        Raises:
            NotFoundError: the client has no such batch.
        """
        return await self._wait(self._folder.batch, tenant, batch_id)

    async def batches(self, tenant: str) -> Sequence[BatchRecord]:
        """The batches of a client, the newest first."""
        return await self._wait(self._folder.batches, tenant)

    async def cancel_batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Ends a batch soon; requests that have an answer keep it.

        Raises:
            NotFoundError: the client has no such batch.
            FailedPreconditionError: it has finished.
        """
        record = await self._wait(self._folder.cancel_batch, tenant, batch_id)
        self._runner.wake()
        return record

    async def _wait(
        self, function: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs
    ) -> _Result:
        call = partial(function, *args, **kwargs)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except OSError as error:
            _LOGGER.error("the folder of batches: %s", error)
            message = f"the folder of batches cannot be used: {error.strerror}"
            raise UnavailableError(message) from None


def _checked_ttl(field: str, ttl_s: int | None) -> int:
    if ttl_s is not None and not _MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise InvalidArgumentError.for_field(
            f"{field}.seconds", ttl_s, f"in [{_MIN_TTL_S}, {MAX_TTL_S}]"
        )
    return MAX_TTL_S if ttl_s is None else ttl_s


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise InvalidArgumentError(
            f"metadata has {len(metadata)} keys; at most {_MAX_METADATA} are allowed"
        )
    for key, value in metadata.items():
        if len(key) > _MAX_KEY_CHARS:
            raise InvalidArgumentError(
                f"metadata has a key of more than {_MAX_KEY_CHARS} characters"
            )
        if not isinstance(value, str) or len(value) > _MAX_VALUE_CHARS:
            limit = f"a text of at most {_MAX_VALUE_CHARS} characters"
            raise InvalidArgumentError.for_field("metadata", value, limit)


def _log_end(running: "asyncio.Task[None]") -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        _LOGGER.error("batches are no longer run by this process", exc_info=error)
