"""`BatchRun`: a batch on disk while it runs, in the process that holds the folder's lock."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from router.batches.folder import BatchFolder, QueuedBatch
from router.batches.records import BATCH_OUTPUT, BatchRecord, FileRecord
from router.batches.requests import (
    BatchRequest,
    ChangedInputError,
    check_input,
    id_digest,
    read_requests,
)
from router.batches.results import ResultFile, result_line

__all__ = ["BatchRun"]

_LOGGER = logging.getLogger("baton.batches")
_MAX_CHUNK = 32
_MAX_CHUNK_BYTES = 2**20
_SUCCESS = range(200, 300)
_LOST = (
    *(ChangedInputError, FileNotFoundError, PermissionError),
    *(IsADirectoryError, NotADirectoryError),
)
"""Errors of reading the input that another try does not change, as it may those of a disk."""
_MESSAGES = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed before the batch was cancelled.",
}


class BatchRun:
    """The requests of a batch that have no result yet, and the files that get the results.

    All methods wait for the disk; one at a time is called. What they leave behind at any moment is
    what another run goes on from.

    Args:
        folder: the folder of batches.
        queued: the batch.
        max_line_bytes: the most bytes of a request.

    Raises:
        OSError: also by all methods: the folder cannot be read or written.
    """

    def __init__(self, folder: BatchFolder, queued: QueuedBatch, max_line_bytes: int) -> None:
        self._folder = folder
        self._queued = queued
        self._max_line_bytes = max_line_bytes
        self._open = ExitStack()
        self._record: BatchRecord | None = None
        self._results: tuple[ResultFile, ResultFile] | None = None  # answers, errors
        self._unread: Iterator[BatchRequest] = iter(())
        self._input_errors: tuple[Mapping[str, object], ...] = ()
        self._changed = False

    @property
    def record(self) -> BatchRecord:
        """The batch, once `begin` has returned True."""
        assert self._record is not None, "the run has begun"
        return self._record

    @property
    def _files(self) -> tuple[ResultFile, ResultFile]:
        """The files of answers and of errors, once `begin` has returned True."""
        assert self._results is not None, "the run has begun"
        return self._results

    def begin(self) -> bool:
        """Checks the input, and opens the results; returns whether there is something to run."""
        record = self._folder.batch_by_key(self._queued.tenant_key, self._queued.id)
        if record is None or record.is_finished:
            self._folder.leave_queue(self._queued)
            return False
        self._record = record = self._without_cancel(record)
        if not record.total and not self._check_input(record):
            return False
        self._results = self._open_results(record.output_id), self._open_results(record.error_id)
        self._unread = self._without_result()
        self._save(status="in_progress", **self._counts())
        return True

    def next_requests(self) -> Sequence[BatchRequest]:
        """The next requests without a result, some at a time; none at the end, and once the input
        is lost.
        """
        chunk: list[BatchRequest] = []
        num_bytes = 0
        while len(chunk) < _MAX_CHUNK and num_bytes < _MAX_CHUNK_BYTES:
            request = next(self._unread, None)
            if request is None:
                break
            chunk.append(request)
            num_bytes += request.num_bytes
        return chunk

    def add_answer(self, custom_id: str, status: int, request_id: str, body: bytes) -> None:
        """Keeps the answer to a request."""
        line = result_line(custom_id, status=status, request_id=request_id, body=body)
        output, errors = self._files
        self._add(output if status in _SUCCESS else errors, custom_id, line)

    @property
    def left_s(self) -> float:
        """Seconds until the batch expires; 0 afterwards."""
        return max(0.0, self._queued.expires_at - self._folder.now)

    def reason_to_stop(self) -> str | None:
        """`expired`, `cancelled` or None."""
        return self._folder.reason_to_stop(self._queued)

    def checkpoint(self) -> None:
        """Lets clients see the progress, and waits until the disk has the results."""
        if self._changed:
            self._sync()
            self._save(**self._counts())
            self._changed = False

    def finish(self, status: str) -> None:
        """Ends the batch.

        Args:
            status: completed, expired or cancelled; requests without a result get an error then.
                If the input is lost, the batch is `failed`, with the results that it has.
        """
        if status in _MESSAGES:
            self._end_requests(status)
        if self._input_errors:
            status = "failed"
        self._sync()
        self._save(status="finalizing", **self._counts())
        output, errors = self._files
        ends = {
            "has_output": self._publish(output, self.record.output_id, "output"),
            "has_errors": self._publish(errors, self.record.error_id, "error"),
        }
        if status == "cancelled":
            asked = self._folder.batch_by_key(self._queued.tenant_key, self._queued.id)
            times = {} if asked is None else asked.times
            self._record = replace(self.record, times={**times, **self.record.times})
        self._save(status=status, errors=self._input_errors, **ends)
        self._folder.leave_queue(self._queued)
        record = self.record
        _LOGGER.info(
            "batch %s: %s, %d answers, %d errors",
            *(record.id, status, record.completed, record.failed),
        )

    def close(self) -> None:
        """Closes the files. Idempotent."""
        self._open.close()

    def _check_input(self, record: BatchRecord) -> bool:
        """Checks the input file; returns whether the batch may run."""
        try:
            check = check_input(self._input_path, record.endpoint, self._max_line_bytes)
        except OSError as error:
            self._fail(0, self._errors_of_lost_input(error))
            return False
        if check.errors:
            self._fail(check.total, check.errors)
            return False
        self._record = replace(record, total=check.total)
        return True

    def _fail(self, total: int, errors: tuple[Mapping[str, object], ...]) -> None:
        self._save(status="failed", total=total, errors=errors)
        self._folder.leave_queue(self._queued)
        _LOGGER.info("batch %s: failed, its input has errors", self._queued.id)

    def _errors_of_lost_input(
        self, error: OSError | ChangedInputError
    ) -> tuple[Mapping[str, object], ...]:
        """Entries of the record for an input file that is lost.

        Raises:
            OSError: it may not be: another try may succeed, and there is time for one.
        """
        if not isinstance(error, _LOST) and self.reason_to_stop() is None:
            raise error
        is_gone = isinstance(error, FileNotFoundError)
        reason = getattr(error, "strerror", None) or error
        return (
            {
                "code": "file_not_found" if is_gone else "file_not_readable",
                "message": f"the input file {self.record.input_file_id} cannot be read: {reason}",
                "param": "input_file_id",
                "line": None,
            },
        )

    @property
    def _input_path(self) -> Path:
        return self._folder.content_path(self._queued.tenant_key, self.record.input_file_id)

    def _open_results(self, file_id: str) -> ResultFile:
        path = self._folder.content_path(self._queued.tenant_key, file_id)
        results = ResultFile(path)
        self._open.callback(results.close)
        return results

    def _without_result(self) -> Iterator[BatchRequest]:
        output, errors = self._files
        done = output.digests | errors.digests
        num_left = self.record.total - len(done)
        if not num_left:
            return  # it had ended but for its record, and needs its input no more
        try:
            for request in read_requests(self._input_path, self.record.endpoint, done):
                num_left -= 1
                yield request
            if num_left > 0:
                raise ChangedInputError(f"{num_left} of its requests are gone")
        except (OSError, ChangedInputError) as error:
            self._input_errors = self._errors_of_lost_input(error)

    def _add(self, results: ResultFile, custom_id: str, line: bytes) -> None:
        digest = id_digest(custom_id)
        if all(digest not in file.digests for file in self._files):
            results.append(custom_id, line)
            self._changed = True

    def _end_requests(self, status: str) -> None:
        """Writes the error of each request that has no result."""
        error = {"code": f"batch_{status}", "message": _MESSAGES[status]}
        _, errors = self._files
        for request in self._without_result():
            self._add(errors, request.custom_id, result_line(request.custom_id, error=error))

    def _publish(self, results: ResultFile, file_id: str, name: str) -> bool:
        """Lets clients see a file of results; removes it if it is empty."""
        if not results.num_bytes:
            path = self._folder.content_path(self._queued.tenant_key, file_id)
            path.unlink(missing_ok=True)
            return False
        record, now = self.record, self._folder.now
        file = FileRecord(
            id=file_id,
            tenant=record.tenant,
            filename=f"{record.id}_{name}.jsonl",
            purpose=BATCH_OUTPUT,
            num_bytes=results.num_bytes,
            created_at=now,
            expires_at=now + record.output_ttl_s,
        )
        self._folder.write_file_record(self._queued.tenant_key, file)
        return True

    def _sync(self) -> None:
        for results in self._files:
            results.sync()

    def _counts(self) -> dict[str, int]:
        output, errors = self._files
        return {"completed": len(output.digests), "failed": len(errors.digests)}

    def _save(self, **fields: object) -> None:
        """Changes the record, with the moment at which it gets a new status."""
        record = self.record
        if fields.get("status", record.status) != record.status:
            times = {f"{fields['status']}_at": self._folder.now, **record.times}
            fields["times"] = times  # a status that it had before keeps its moment
        self._record = replace(record, **fields)  # type: ignore[arg-type]
        self._folder.write_batch(self._queued.tenant_key, self._record)

    @staticmethod
    def _without_cancel(record: BatchRecord) -> BatchRecord:
        """The record as it was written: clients see `cancelling` in place of its status."""
        status = "in_progress" if record.total else "validating"
        return replace(record, status=status) if record.status == "cancelling" else record
