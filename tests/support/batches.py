"""Input files of batches, and what their results say."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from router.batches.folder import BatchFolder, key_of, new_id
from router.batches.records import BATCH_INPUT, BatchRecord

ENDPOINT = "/v1/completions"
HOUR_S = 3600


def input_line(custom_id: str, **fields: Any) -> dict[str, Any]:
    """A request of a batch; keywords replace its fields."""
    body = {"prompt": [72, 105], "max_tokens": 2}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body, **fields}


def input_of(custom_ids: Iterable[str]) -> bytes:
    """An input file with a request for each id."""
    return b"".join(json.dumps(input_line(each)).encode() + b"\n" for each in custom_ids)


def add_batch(
    folder: BatchFolder, custom_ids: Sequence[str], tenant: str = "", window_s: int = HOUR_S
) -> BatchRecord:
    """Puts a batch into the queue of a folder."""
    file = folder.add_file(tenant, "in.jsonl", BATCH_INPUT, input_of(custom_ids), HOUR_S)
    record = BatchRecord(
        id=new_id("batch_"),
        tenant=tenant,
        endpoint=ENDPOINT,
        input_file_id=file.id,
        completion_window="1h",
        created_at=folder.now,
        expires_at=folder.now + window_s,
        output_ttl_s=HOUR_S,
        output_id=new_id("file-"),
        error_id=new_id("file-"),
    )
    folder.add_batch(record)
    return record


def results_at(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none if there is no file."""
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def results_of(folder: BatchFolder, batch: BatchRecord) -> tuple[list[Any], list[Any]]:
    """The answers and the errors of a batch."""
    key = key_of(batch.tenant)
    ids = batch.output_id, batch.error_id
    answers, errors = (results_at(folder.content_path(key, file_id)) for file_id in ids)
    return answers, errors


def ids_of(results: Iterable[dict[str, Any]]) -> list[str]:
    """The ids of results, in their order."""
    return [result["custom_id"] for result in results]
