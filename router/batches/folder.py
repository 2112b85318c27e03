"""`BatchFolder`: files and batches on disk, which several routers may share.

    runner.lock                    held by the process that runs the batches
    queue/TIME.END.BATCH.TENANT    a batch that has not finished, and expires at END; an empty file
    tenants/TENANT/files/          ID.json: a `FileRecord`; ID.jsonl: the content
    tenants/TENANT/batches/        ID.json: a `BatchRecord`; ID.cancel: the client wants its end

TENANT is a hash of the client's name. Records and contents appear in one piece. Once a batch is in
the queue, only the process with the lock writes its record, so that no change is lost; others ask
it by files of their own. All methods wait for the disk, and run in threads.
"""

import hashlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from baton.common.errors import (
    BatonError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from router.batches.records import BatchRecord, FileRecord, read_record, record_text

__all__ = [
    "MAX_BATCHES",
    "MAX_FILES",
    "MAX_TTL_S",
    "BatchFolder",
    "QueuedBatch",
    "key_of",
    "new_id",
]

_LOGGER = logging.getLogger("baton.batches")
MAX_FILES = 1000
"""The most files of one client, output files of batches included."""
MAX_BATCHES = 1000
"""The most batches of one client, finished ones included."""
MAX_TTL_S = 30 * 24 * 3600
"""Files and finished batches are removed after so many seconds at the latest."""
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
_MARKER = re.compile(r"[0-9]+\.([0-9]+)\.(batch_[0-9a-f]{32})\.([0-9a-f]{32})")
_TEMPORARY, _CONTENT = ".tmp", ".jsonl"
_MAX_LEFT_S = 3600
"""A younger file without a record may belong to a write that is under way."""
_Record = TypeVar("_Record", FileRecord, BatchRecord)


def new_id(prefix: str) -> str:
    """Returns a new id, which `BatchFolder` takes as part of a path."""
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class QueuedBatch:
    """A batch in the queue.

    Attributes:
        marker: its file there.
        id: the batch's.
        tenant_key: the name of its client's folder.
        expires_at: seconds since 1970 at which its requests expire.
    """

    marker: Path
    id: str
    tenant_key: str
    expires_at: int


class BatchFolder:
    """The folder of batches.

    Args:
        path: the folder, which is made if it does not exist; for this user alone.
        clock: seconds since 1970.

    Attributes:
        lock_path: the file that the process which runs the batches holds locked.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._tenants = path / "tenants"
        self._queue = path / "queue"
        self.lock_path = path / "runner.lock"
        self._clock = clock
        for folder in (path, self._tenants, self._queue):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def now(self) -> int:
        """Seconds since 1970."""
        return int(self._clock())

    def add_file(
        self, tenant: str, filename: str, purpose: str, content: bytes | memoryview, ttl_s: int
    ) -> FileRecord:
        """Keeps a file of a client.

        Raises:
            InvalidArgumentError: the client has as many files as it may have.
        """
        if len(self._ids(key_of(tenant), "files")) >= MAX_FILES:
            raise InvalidArgumentError(
                f"file: this client has {MAX_FILES} files, the most; delete some"
            )
        now = self.now
        record = FileRecord(
            id=new_id("file-"),
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=len(content),
            created_at=now,
            expires_at=now + ttl_s,
        )
        path = self.content_path(key_of(tenant), record.id)
        try:
            _write(path, content)
            self.write_file_record(key_of(tenant), record)
        except OSError:  # which does not say that nothing was written
            self._remove_file(key_of(tenant), record.id)
            raise
        return record

    def write_file_record(self, tenant_key: str, record: FileRecord) -> None:
        """Lets clients see a file whose content is in place."""
        _write(self._record_path(tenant_key, "files", record.id), record_text(record))

    def content_path(self, tenant_key: str, file_id: str) -> Path:
        """The path of a file's content."""
        return self._tenants / tenant_key / "files" / f"{file_id}{_CONTENT}"

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """A file of a client.

        Raises:
            NotFoundError: the client has no such file.
        """
        record = self._read(FileRecord, key_of(tenant), "files", file_id)
        if record is None or record.expires_at <= self.now:
            raise NotFoundError(f"file_id {file_id[:64]!r} names no file", field="file_id")
        return record

    def files(self, tenant: str) -> Sequence[FileRecord]:
        """The files of a client, the newest first."""
        records = self._records(FileRecord, key_of(tenant), "files")
        return [record for record in records if record.expires_at > self.now]

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Removes a file of a client.

        Raises:
            NotFoundError: the client has no such file.
            FailedPreconditionError: a batch that has not finished reads or writes it.
        """
        self.file(tenant, file_id)
        key = key_of(tenant)
        for batch in self._unfinished(key, self._queue_of(key)):
            if file_id in batch.file_ids:
                raise FailedPreconditionError(f"file_id: {batch.id} still needs this file")
        self._remove_file(key, file_id)

    def add_batch(self, record: BatchRecord) -> None:
        """Keeps a batch and puts it into the queue.

        Raises:
            InvalidArgumentError: the client has as many batches as it may have.
        """
        key = key_of(record.tenant)
        if len(self._ids(key, "batches")) >= MAX_BATCHES:
            raise InvalidArgumentError(
                f"input_file_id: this client has {MAX_BATCHES} batches, the most; those that have "
                "finished are removed with time"
            )
        try:
            self.write_batch(key, record)
            self._enqueue(key, record)
        except OSError:  # which does not say that nothing was written
            self._record_path(key, "batches", record.id).unlink(missing_ok=True)
            raise

    def write_batch(self, tenant_key: str, record: BatchRecord) -> None:
        """Replaces the record of a batch. Called by whoever runs it."""
        _write(self._record_path(tenant_key, "batches", record.id), record_text(record))

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """A batch of a client.

        Raises:
            NotFoundError: the client has no such batch.
        """
        record = self.batch_by_key(key_of(tenant), batch_id)
        if record is None:
            raise NotFoundError(f"batch_id {batch_id[:64]!r} names no batch", field="batch_id")
        return record

    def batch_by_key(self, tenant_key: str, batch_id: str) -> BatchRecord | None:
        """A batch in a client's folder; None if it is not there."""
        record = self._read(BatchRecord, tenant_key, "batches", batch_id)
        return None if record is None else self._with_cancel(tenant_key, record)

    def batches(self, tenant: str) -> Sequence[BatchRecord]:
        """The batches of a client, the newest first."""
        records = self._records(BatchRecord, key_of(tenant), "batches")
        return [self._with_cancel(key_of(tenant), record) for record in records]

    def cancel_batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Asks whoever runs a batch to end it. Idempotent until it has ended.

        Raises:
            NotFoundError: the client has no such batch.
            FailedPreconditionError: it has finished.
        """
        record = self.batch(tenant, batch_id)
        if record.is_finished and record.status != "cancelled":
            raise FailedPreconditionError(
                f"batch_id: the batch is {record.status} and cannot be cancelled"
            )
        if not record.is_finished:
            self._cancel_path(key_of(tenant), batch_id).touch()
        return self.batch(tenant, batch_id)

    def reason_to_stop(self, batch: QueuedBatch) -> str | None:
        """`cancelled` if the client wants the end of a batch, `expired` at its time, else None."""
        if self._cancel_path(batch.tenant_key, batch.id).exists():
            return "cancelled"
        return "expired" if self.now >= batch.expires_at else None

    def queue(self) -> Sequence[QueuedBatch]:
        """The batches that have not finished, the oldest first."""
        names = sorted(entry.name for entry in os.scandir(self._queue))
        markers = filter(None, map(_MARKER.fullmatch, names))
        return [QueuedBatch(self._queue / m[0], m[2], m[3], int(m[1])) for m in markers]

    def leave_queue(self, batch: QueuedBatch) -> None:
        """Takes a finished batch out of the queue. Idempotent."""
        batch.marker.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes what has expired, and what interrupted writes left behind. A batch that was never
        put into the queue is put there.
        """
        for tenant in list(self._tenants.iterdir()):
            try:
                self._sweep_tenant(tenant.name)
            except OSError as error:
                _LOGGER.error("cannot remove what has expired in %s: %s", tenant, error)
        # Also names that other versions give; the batches are there again by now.
        self._remove_left(self._queue, "", {queued.marker.name for queued in self.queue()})

    def _sweep_tenant(self, key: str) -> None:
        for kind in ("files", "batches"):
            self._remove_left(self._tenants / key / kind, _TEMPORARY)
        queued = self._queue_of(key)
        batches = self._records(BatchRecord, key, "batches")
        unfinished = [batch for batch in batches if not batch.is_finished]
        in_use = {file_id for batch in unfinished for file_id in batch.file_ids}
        for file in self._records(FileRecord, key, "files"):
            if file.expires_at <= self.now and file.id not in in_use:
                self._remove_file(key, file.id)
        if len(batches) == len(self._ids(key, "batches")):  # else one of another version may run
            kept = in_use.union(self._ids(key, "files"))
            self._remove_left(self._tenants / key / "files", _CONTENT, kept)
        for batch in batches:
            finished_at = max(batch.times.values(), default=batch.created_at)
            if batch.is_finished and finished_at + MAX_TTL_S <= self.now:
                self._cancel_path(key, batch.id).unlink(missing_ok=True)
                self._record_path(key, "batches", batch.id).unlink(missing_ok=True)
            elif not batch.is_finished and batch.id not in queued:
                self._enqueue(key, batch)  # twice does no harm: a finished one leaves

    def _remove_left(self, folder: Path, suffix: str, kept: Container[str] = ()) -> None:
        """Removes what interrupted writes have left in a folder.

        Args:
            folder: the folder.
            suffix: of the files' names.
            kept: names without it that stay.
        """
        for path in list(folder.glob(f"*{suffix}")):
            with suppress(FileNotFoundError):
                is_left = self._clock() - path.stat().st_mtime > _MAX_LEFT_S
                if is_left and path.name.removesuffix(suffix) not in kept:
                    path.unlink()

    def _enqueue(self, key: str, batch: BatchRecord) -> None:
        name = f"{time.time_ns():020}.{batch.expires_at}.{batch.id}.{key}"
        _write(self._queue / name, b"")

    def _queue_of(self, key: str) -> Sequence[str]:
        """Ids of a client's batches in the queue, the oldest first."""
        return [queued.id for queued in self.queue() if queued.tenant_key == key]

    def _unfinished(self, key: str, queued: Sequence[str]) -> Iterator[BatchRecord]:
        """Those of a client's queued batches that have not finished, and can be read."""
        for batch_id in queued:
            record = self._read_or_log(BatchRecord, key, "batches", batch_id)
            if record is not None and not record.is_finished:
                yield record

    def _with_cancel(self, key: str, record: BatchRecord) -> BatchRecord:
        """The record as clients see it while whoever runs the batch has yet to end it."""
        if record.is_finished:
            return record
        with suppress(FileNotFoundError):
            asked_at = int(self._cancel_path(key, record.id).stat().st_mtime)
            times = {**record.times, "cancelling_at": asked_at}
            return replace(record, status="cancelling", times=times)
        return record

    def _remove_file(self, key: str, file_id: str) -> None:
        self._record_path(key, "files", file_id).unlink(missing_ok=True)
        self.content_path(key, file_id).unlink(missing_ok=True)

    def _record_path(self, key: str, kind: str, record_id: str) -> Path:
        return self._tenants / key / kind / f"{record_id}.json"

    def _cancel_path(self, key: str, batch_id: str) -> Path:
        return self._tenants / key / "batches" / f"{batch_id}.cancel"

    def _ids(self, key: str, kind: str) -> Sequence[str]:
        with suppress(FileNotFoundError):
            names = (entry.name for entry in os.scandir(self._tenants / key / kind))
            return [name[:-5] for name in names if name.endswith(".json")]
        return ()

    def _records(self, kind: type[_Record], key: str, folder: str) -> list[_Record]:
        """The records of a client, the newest first; those that cannot be read are left out."""
        read = (self._read_or_log(kind, key, folder, each) for each in self._ids(key, folder))
        records = [record for record in read if record is not None]
        return sorted(records, key=lambda record: (-record.created_at, record.id))

    def _read_or_log(
        self, kind: type[_Record], key: str, folder: str, record_id: str
    ) -> _Record | None:
        """`_read`, but a record that is malformed, or of another version, is logged, and None."""
        try:
            return self._read(kind, key, folder, record_id)
        except BatonError as error:
            _LOGGER.error("%s of %s: %s", record_id, folder, error)
            return None

    def _read(self, kind: type[_Record], key: str, folder: str, record_id: str) -> _Record | None:
        if not _ID.fullmatch(record_id):
            return None
        try:
            text = self._record_path(key, folder, record_id).read_bytes()
        except FileNotFoundError:
            return None
        return read_record(kind, text)


def key_of(tenant: str) -> str:
    """The name of a client's folder, which any file system takes."""
    return hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32]


def _write(path: Path, content: bytes | memoryview) -> None:
    """Writes a file in one piece: after a crash it is there whole, or as it was before."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{uuid.uuid4().hex}{_TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
