"""`FileRecord` and `BatchRecord`: what the folder of batches knows of a file and of a batch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from baton.common.errors import InternalError

__all__ = [
    "BATCH_INPUT",
    "BATCH_OUTPUT",
    "FINISHED",
    "BatchRecord",
    "FileRecord",
    "read_record",
    "record_text",
]

BATCH_INPUT = "batch"
BATCH_OUTPUT = "batch_output"
FINISHED = frozenset({"completed", "failed", "expired", "cancelled"})
"""Statuses that stay."""
_Record = TypeVar("_Record", "FileRecord", "BatchRecord")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of a client.

    Attributes:
        id: its name in the API.
        tenant: whose it is.
        filename: as the client named it.
        purpose: `BATCH_INPUT` or `BATCH_OUTPUT`.
        num_bytes: of its content.
        created_at: seconds since 1970.
        expires_at: seconds since 1970 after which it is removed.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int

    def body(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch of a client.

    Attributes:
        id: its name in the API.
        tenant: whose it is, and for whom its requests run.
        endpoint: the path that all of its requests are for.
        input_file_id: the file with the requests.
        completion_window: as the client stated it, such as 24h.
        created_at: seconds since 1970.
        expires_at: seconds since 1970 at which requests without an answer expire.
        output_ttl_s: seconds for which its output files stay.
        output_id: of the file with the answers, once it exists or not.
        error_id: of the file with the errors, once it exists or not.
        metadata: the client's.
        status: OpenAI's.
        times: seconds since 1970 by name, such as in_progress_at.
        total: number of requests; 0 until the input has been checked.
        completed: number of answers.
        failed: number of errors.
        has_output: whether there is a file with answers that clients may read.
        has_errors: the same of errors.
        errors: why the input was refused, each with code, message, param and line.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_ttl_s: int
    output_id: str
    error_id: str
    metadata: Mapping[str, str] | None = None
    status: str = "validating"
    times: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    errors: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether the status stays."""
        return self.status in FINISHED

    @property
    def file_ids(self) -> tuple[str, str, str]:
        """Ids of the files that it reads and writes: the requests, the answers, the errors."""
        return self.input_file_id, self.output_id, self.error_id

    def body(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        moments = ("in_progress", "finalizing", "completed", "failed", "expired")
        names = (*moments, "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


def record_text(record: FileRecord | BatchRecord) -> bytes:
    """The JSON text from which `read_record` makes an equal record."""
    return json.dumps(asdict(record)).encode()


def read_record(kind: type[_Record], text: bytes) -> _Record:
    """The record that a JSON text describes.

    Raises:
        InternalError: it describes none.
    """
    try:
        fields = json.loads(text)
        if "errors" in fields:
            fields["errors"] = tuple(fields["errors"])
        return kind(**fields)
    except (ValueError, TypeError) as error:
        raise InternalError(f"a {kind.__name__} on disk is malformed: {error}") from None
