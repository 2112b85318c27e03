"""The files of a batch: lines of the input, and `OutputFile`, which an interrupted run leaves."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, NoReturn, Self
from uuid import uuid4

from baton.common.errors import ConfigurationError

__all__ = [
    "BatchLine",
    "OutputFile",
    "check_input",
    "read_lines",
]

_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_START = b'{"id": "batch_req_'
_FIRST_REDIRECT, _FIRST_ERROR, _FIRST_SERVER_ERROR = 300, 400, 500
# The key is wrong, or the server is slow or busy: the same request may succeed later.
_RETRIED_STATUSES = (401, 403, 408, 429)
_RETRIED_CODES = ("timeout", "connection_lost")
"""Codes of errors whose request the next run sends again."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input.

    Attributes:
        number: of the line, from 1.
        custom_id: the request's name; None if the line has none.
        url: one of `_URLS`.
        body: of the request, as JSON.
        problem: why the line is no request; empty if it is one.
    """

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    problem: str = ""


def check_input(path: Path) -> int:
    """Reads the file once; returns how many lines it has. Blank lines do not count.

    Raises:
        ConfigurationError: the file cannot be read, or two lines have one custom_id.
    """
    first_lines: dict[str, int] = {}
    num_lines = 0
    for line in read_lines(path):
        num_lines += 1
        if line.custom_id is None:
            continue
        first = first_lines.setdefault(line.custom_id, line.number)
        if first != line.number:
            raise ConfigurationError(
                f"{path}: custom_id {line.custom_id!r} is on lines {first} and {line.number}; "
                "each request needs its own"
            )
    return num_lines


def read_lines(path: Path) -> Iterator[BatchLine]:
    """Yields the lines of a file, one at a time, without blank ones.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _parse_line(number, raw)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None


def _parse_line(number: int, raw: bytes) -> BatchLine:
    """Parses a line. A line that is no request has a `problem`."""
    try:
        return _parse_record(number, json.loads(raw, parse_constant=_refuse_constant))
    except (ValueError, RecursionError) as error:
        return BatchLine(number, problem=f"not JSON: {error}")


def _parse_record(number: int, record: Any) -> BatchLine:
    if not isinstance(record, dict):
        return BatchLine(number, problem=f"a JSON object is needed, not {record!r:.40}")
    custom_id, url, body = record.get("custom_id"), record.get("url"), record.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return BatchLine(number, problem=f"custom_id is {custom_id!r:.40}; it must be a text")
    if problem := _problem(record.get("method"), url, body):
        return BatchLine(number, custom_id, problem=problem)
    return BatchLine(number, custom_id, str(url), json.dumps(body, allow_nan=False).encode())


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _problem(method: Any, url: Any, body: Any) -> str:
    if method != "POST":
        return f"method is {method!r:.40}; it must be 'POST'"
    if url not in _URLS:
        return f"url is {url!r:.80}; it must be one of {', '.join(_URLS)}"
    if not isinstance(body, dict):
        return f"body is {body!r:.40}; it must be a JSON object"
    if body.get("stream"):
        return "body.stream is true; results of a batch are whole"
    return ""


class OutputFile:
    """Results in OpenAI's batch output format, a line each. A `with` block opens and closes it.

    Opening it keeps the results that are final. It drops a line that an interruption cut off, and
    failures that another attempt may not have: those requests have no result.

    Args:
        path: the file; it is made if it does not exist.

    Attributes:
        num_succeeded: results that are answers.
        num_failed: results that are errors.

    Raises:
        ConfigurationError: the file cannot be written, is a device or a pipe, or has other lines
            than results.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # a link stays a link
        self._finished_ids: set[str] = set()
        self._finished_lines: set[int] = set()
        self._file: BinaryIO | None = None
        self.num_succeeded = self.num_failed = 0

    def __enter__(self) -> Self:
        try:
            if self._path.exists() and not self._path.is_file():
                raise ConfigurationError(f"cannot write {self._path}: it is not a regular file")
            if self._path.exists():
                self._keep_final_results()
            self._file = self._path.open("ab")
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None
        try:
            self._file.close()
        except OSError as error:
            if kind is None:  # else the write that failed has raised it already
                raise self._unwritable(error) from None

    @property
    def num_results(self) -> int:
        """Number of requests that have a result."""
        return self.num_succeeded + self.num_failed

    def has_result(self, line: BatchLine) -> bool:
        """Whether a line of the input has a result. A line without a custom_id goes by number."""
        if line.custom_id is None:
            return line.number in self._finished_lines
        return line.custom_id in self._finished_ids

    def write_response(
        self, line: BatchLine, status: int, request_id: str, body: Mapping[str, Any]
    ) -> None:
        """Writes what the server answered.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._write(line, response, None)

    def write_error(self, line: BatchLine, code: str, message: str) -> None:
        """Writes why there is no answer.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        self._write(line, None, {"code": code, "message": message, "line": line.number})

    def _write(self, line: BatchLine, response: Any, error: Any) -> None:
        record = {
            "id": f"batch_req_{uuid4().hex}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
        assert self._file is not None
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
        except OSError as failure:
            raise self._unwritable(failure) from None
        self._count(record)

    def _unwritable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(f"cannot write {self._path}: {error.strerror}")

    def _keep_final_results(self) -> None:
        """Replaces the file by one with its final results, in one step."""
        kept = self._path.with_name(f"{self._path.name}.kept")
        try:
            with self._path.open("rb") as old, kept.open("wb") as new:
                for number, raw in enumerate(old, 1):
                    record = self._parse(number, raw)
                    if record is not None and _is_final(record):
                        self._count(record)
                        new.write(raw.rstrip(b"\n") + b"\n")
            kept.replace(self._path)
        finally:
            kept.unlink(missing_ok=True)

    def _parse(self, number: int, raw: bytes) -> dict[str, Any] | None:
        """Returns a result; None for the beginning of one, at the end of the file."""
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):
            record = None
        if _is_result(record):
            return dict(record)
        is_torn = not raw.endswith(b"\n") and raw[: len(_START)] == _START[: len(raw)]
        if is_torn:
            return None
        raise ConfigurationError(
            f"{self._path} has other contents than results of a batch (line {number}); "
            "choose another --output-file"
        )

    def _count(self, record: Mapping[str, Any]) -> None:
        if _is_success(record):
            self.num_succeeded += 1
        else:
            self.num_failed += 1
        if record["custom_id"] is not None:
            self._finished_ids.add(record["custom_id"])
        elif record["error"]:
            self._finished_lines.add(record["error"].get("line"))


def _is_result(record: Any) -> bool:
    if not isinstance(record, dict) or not {"custom_id", "response", "error"} <= record.keys():
        return False
    response = record["response"]
    return (
        isinstance(record["custom_id"], str | NoneType)
        and isinstance(record["error"], dict | NoneType)
        and (
            response is None
            or (isinstance(response, dict) and isinstance(response.get("status_code"), int))
        )
    )


def _is_success(record: Mapping[str, Any]) -> bool:
    response = record["response"]
    return bool(response) and response["status_code"] < _FIRST_REDIRECT


def _is_final(record: Mapping[str, Any]) -> bool:
    if response := record["response"]:
        status = response["status_code"]
        is_refusal = _FIRST_ERROR <= status < _FIRST_SERVER_ERROR
        return _is_success(record) or (is_refusal and status not in _RETRIED_STATUSES)
    return (record["error"] or {}).get("code") not in _RETRIED_CODES
