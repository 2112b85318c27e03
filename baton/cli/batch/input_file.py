"""Lines of a batch's input file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from baton.common.errors import ConfigurationError

__all__ = ["URLS", "BatchLine", "check_input", "parse_line", "read_lines"]

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input.

    Attributes:
        number: of the line, from 1.
        custom_id: the request's name; None if the line has none.
        url: one of `URLS`.
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
                    yield parse_line(number, raw)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None


def parse_line(number: int, raw: bytes) -> BatchLine:
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
    if url not in URLS:
        return f"url is {url!r:.80}; it must be one of {', '.join(URLS)}"
    if not isinstance(body, dict):
        return f"body is {body!r:.40}; it must be a JSON object"
    if body.get("stream"):
        return "body.stream is true; results of a batch are whole"
    return ""
