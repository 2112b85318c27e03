"""`ResultFile`: the answers or the errors of a batch, a line each, to which a run only appends."""

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from router.batches.requests import id_digest

__all__ = ["ResultFile", "result_line"]


def result_line(
    custom_id: str,
    *,
    status: int | None = None,
    request_id: str = "",
    body: bytes = b"null",
    error: Mapping[str, str] | None = None,
) -> bytes:
    """A line of OpenAI's form, with an answer or with an error.

    Args:
        custom_id: the client's name for the request.
        status: of the answer; None if there is none.
        request_id: of the answer.
        body: the answer, which is JSON.
        error: code and message.
    """
    head = json.dumps({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id})
    answer = b"null"
    if status is not None:
        facts = json.dumps({"status_code": status, "request_id": request_id})
        answer = b'%b, "body": %b}' % (facts[:-1].encode(), body)
    end = b', "response": %b, "error": %b}\n' % (answer, json.dumps(error).encode())
    return head[:-1].encode() + end


class ResultFile:
    """A file of results. Opening it drops the line that a killed run left incomplete.

    Args:
        path: the file, which is made if it does not exist.

    Attributes:
        digests: of the `custom_id`s that have a line, as `id_digest` makes them.

    Raises:
        OSError: also by all methods: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        try:
            self.digests, self._num_bytes = _read(path)
            self._file.truncate(self._num_bytes)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self._num_bytes

    def append(self, custom_id: str, line: bytes) -> None:
        """Adds a line, whole or not at all."""
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            self._file.truncate(self._num_bytes)  # a disk was full
            raise
        self._num_bytes += len(line)
        self.digests.add(id_digest(custom_id))

    def sync(self) -> None:
        """Waits until the disk has all lines."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()


def _read(path: Path) -> tuple[set[bytes], int]:
    """The digests of the whole lines, and the bytes of these lines."""
    digests, num_bytes = set(), 0
    for custom_id, length in _whole_lines(path):
        digests.add(id_digest(custom_id))
        num_bytes += length
    return digests, num_bytes


def _whole_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yields `custom_id` and length of each line, until one is incomplete: a power failure may
    leave anything behind what was synced.
    """
    with path.open("rb") as file:
        for line in file:
            try:
                custom_id = json.loads(line)["custom_id"]
            except (ValueError, TypeError, KeyError):
                return
            if not line.endswith(b"\n") or not isinstance(custom_id, str):
                return
            yield custom_id, len(line)
