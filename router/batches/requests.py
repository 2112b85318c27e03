"""The requests of a batch: lines of its input file, each a JSON object."""

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_values import object_at, text_at
from baton.common.short_texts import short_repr
from router.requests.json_input import parse_json

__all__ = [
    "BATCH_PRIORITY",
    "ENDPOINTS",
    "MAX_REQUESTS",
    "BatchRequest",
    "ChangedInputError",
    "InputCheck",
    "check_input",
    "id_digest",
    "read_requests",
]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""The endpoints that a batch may call."""
BATCH_PRIORITY = 100
"""Added to the priority of a request; that of interactive ones is 0 unless they state another."""
_MAX_PRIORITY = 2**31 - 1
MAX_REQUESTS = 50_000
"""The most requests of a batch, as at OpenAI."""
_MAX_ID_CHARS = 512
_MAX_ERRORS = 100


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a batch.

    Attributes:
        number: of its line, from 1.
        custom_id: the client's name for it.
        body: JSON of its body, with the priority of batches. Its values would take many times as
            much memory while it runs.
    """

    number: int
    custom_id: str
    body: bytes

    @property
    def num_bytes(self) -> int:
        """The size of its body."""
        return len(self.body)


@dataclass(frozen=True, slots=True)
class InputCheck:
    """The result of a check of an input file.

    Attributes:
        total: the number of requests.
        errors: why they cannot run, at most `_MAX_ERRORS`; OpenAI's objects.
    """

    total: int
    errors: tuple[Mapping[str, Any], ...]


class ChangedInputError(Exception):
    """An input file is not what `check_input` has accepted."""


class _LineError(Exception):
    """A line is no request of the batch."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def id_digest(custom_id: str) -> bytes:
    """A short digest of a `custom_id`: a batch of many long ones is to take little memory."""
    return hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()


def check_input(path: Path, endpoint: str, max_line_bytes: int) -> InputCheck:
    """Reads all requests of a file.

    Args:
        path: the file.
        endpoint: the path that they must be for.
        max_line_bytes: the most bytes of one.

    Raises:
        OSError: the file cannot be read.
    """
    total = 0
    errors: list[Mapping[str, Any]] = []
    seen: dict[bytes, int] = {}
    for number, line in _lines(path, max_line_bytes):
        total += 1
        if total > MAX_REQUESTS:
            errors.append(_error("too_many_requests", f"a batch has at most {MAX_REQUESTS}", None))
            break
        try:
            custom_id, _ = _parse(line, endpoint, max_line_bytes)
            first = seen.setdefault(id_digest(custom_id), number)
            if first != number:
                message = f"custom_id is that of line {first}; each request needs its own"
                raise _LineError("duplicate_custom_id", message, "custom_id")
        except _LineError as error:
            errors.append(_error(error.code, error.message, number, error.param))
        if len(errors) >= _MAX_ERRORS:
            break
    if not total:
        errors.append(_error("empty_file", "the input file has no requests", None))
    return InputCheck(total, tuple(errors))


def read_requests(
    path: Path, endpoint: str, done: Container[bytes] = frozenset()
) -> Iterator[BatchRequest]:
    """Yields the requests of a file that `check_input` has accepted, whatever its limit was.

    Args:
        path: the file.
        endpoint: the path that they are for.
        done: digests of the `custom_id`s of those that are left out.

    Raises:
        OSError: the file cannot be read.
        ChangedInputError: a line is no request any more.
    """
    max_line_bytes = path.stat().st_size
    for number, line in _lines(path, max_line_bytes):
        try:
            custom_id, body = _parse(line, endpoint, max_line_bytes)
        except _LineError as error:
            raise ChangedInputError(f"line {number} has changed: {error.message}") from None
        if id_digest(custom_id) not in done:
            yield BatchRequest(number, custom_id, _text_of(body))


def _lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers; of longer ones the beginning."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(max_line_bytes)
            if line.strip():
                yield number, line


def _parse(line: bytes, endpoint: str, max_line_bytes: int) -> tuple[str, Mapping[str, Any]]:
    """The `custom_id` and the body of a line's request.

    Raises:
        _LineError: it has none.
    """
    if len(line) > max_line_bytes:
        raise _LineError("line_too_large", f"the line has more than {max_line_bytes} bytes")
    try:
        fields = object_at("the line", parse_json("the line", line))
    except InvalidArgumentError as error:
        raise _LineError("invalid_json_line", error.message) from None
    try:
        custom_id = text_at("custom_id", fields.get("custom_id"))
        body = object_at("body", fields.get("body"))
    except InvalidArgumentError as error:
        raise _LineError("invalid_request", error.message, error.field) from None
    if not 0 < len(custom_id) <= _MAX_ID_CHARS:
        message = f"custom_id must have 1 to {_MAX_ID_CHARS} characters"
        raise _LineError("invalid_request", message, "custom_id")
    for name, right in (("method", "POST"), ("url", endpoint)):
        if fields.get(name) != right:
            shown = short_repr(fields.get(name))
            message = f"{name} is {shown}; it must be {right}"
            raise _LineError(f"invalid_{name}", message, name)
    if body.get("stream"):
        message = "body.stream is set; answers of a batch are whole"
        raise _LineError("invalid_request", message, "body.stream")
    return custom_id, body


def _text_of(body: Mapping[str, Any]) -> bytes:
    """JSON of a body, with the priority of batches."""
    fields = dict(body)
    priority = fields.get("priority") or 0
    if isinstance(priority, int | float):  # another type is refused by the endpoint
        fields["priority"] = min(priority + BATCH_PRIORITY, _MAX_PRIORITY)
    return json.dumps(fields).encode()


def _error(
    code: str, message: str, line: int | None, param: str | None = None
) -> Mapping[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
