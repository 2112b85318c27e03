"""The log of a server process: plain lines or JSON, with the ids of the request at hand.

`CURRENT_CALL` holds the call that the present task serves. Both servers set it, for gRPC and for
HTTP; the pipeline reads the call's trace from it, and the JSON lines their ids.
"""

import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import override

from baton.common.observe.traceparent import TraceContext
from baton.common.request.slo import NO_SLO, Slo
from rpc.log_stream import LogStream, RepeatLimit

__all__ = [
    "CURRENT_CALL",
    "CallInfo",
    "JsonFormatter",
    "JsonStderr",
    "json_line_of_process",
    "log_fields",
    "log_stream",
    "serving",
    "session_of_call",
    "slo_of_call",
    "start_logging",
    "timeout_of_call",
]

_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_FIELDS = "baton_fields"
_MAX_CHARS = 2**16
"""Of a line that has not ended; earlier ones are dropped."""


@dataclass(slots=True)
class CallInfo:
    """Known facts of the call that a task serves.

    Attributes:
        request_id: the request's id; empty until it is known.
        trace: the caller's span; None if the caller sent none.
        trace_id: the trace that the request belongs to; empty if it is not traced.
        started_at: `time.monotonic()` at which the call began.
        caller: who makes the call, as its server found out; None if it did not ask.
        session: the conversation that the call belongs to; empty if its headers name none.
        slo: how soon the caller wants its tokens.
        is_counted: whether it counts against the caller's limits of calls.
        timeout_s: seconds that it may take at most; None for as long as calls may take by default.
    """

    request_id: str = ""
    trace: TraceContext | None = None
    trace_id: str = ""
    started_at: float = field(default_factory=time.monotonic)
    caller: object = None
    session: str = ""
    slo: Slo = NO_SLO
    is_counted: bool = True
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.trace is not None:
            self.trace_id = self.trace.trace_id


CURRENT_CALL: ContextVar[CallInfo | None] = ContextVar("current_call_info", default=None)


@contextmanager
def serving(call: CallInfo) -> Iterator[None]:
    """Makes a call the present one inside of the context, so that log lines have its ids."""
    token = CURRENT_CALL.set(call)
    try:
        yield
    finally:
        CURRENT_CALL.reset(token)


def session_of_call() -> str:
    """Returns the session of the call that the present task serves; empty if it has none."""
    call = CURRENT_CALL.get()
    return "" if call is None else call.session


def slo_of_call() -> Slo:
    """Returns the objectives of the call that the present task serves."""
    call = CURRENT_CALL.get()
    return NO_SLO if call is None else call.slo


def timeout_of_call() -> float | None:
    """Returns how many seconds the call that the present task serves may take at most; None for as
    long as calls may take by default.
    """
    call = CURRENT_CALL.get()
    return None if call is None else call.timeout_s


def log_fields(**fields: Any) -> dict[str, Any]:
    """Returns the `extra` of a logging call that adds fields to a JSON line.

    Args:
        fields: texts, numbers and booleans.
    """
    return {_FIELDS: fields}


class JsonFormatter(logging.Formatter):
    """Formats each record as one line of JSON.

    The keys are time (UTC, ISO 8601), level, logger, message; request_id and trace_id where they
    are known; the record's own fields; and exception, with the traceback.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _ids() | getattr(record, _FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class JsonStderr(io.TextIOBase):
    """A stderr whose lines become JSON: those of progress bars, warnings and tracebacks.

    Args:
        stream: gets the lines.

    Attributes:
        stream: gets the lines.
    """

    def __init__(self, stream: TextIO | LogStream) -> None:
        self.stream = stream
        self._rest = ""
        self._lock = threading.Lock()

    @override
    def write(self, text: str, /) -> int:
        """Writes whole lines; of a line that is drawn several times, its last form."""
        with self._lock:
            *lines, rest = (self._rest + text).split("\n")
            self._rest = rest.rpartition("\r")[2][-_MAX_CHARS:]
            for line in lines:
                shown = line.rstrip("\r").rpartition("\r")[2]
                if shown.strip():
                    self.stream.write(_plain_line("stderr", shown) + "\n")
        return len(text)

    @override
    def flush(self) -> None:
        """Flushes the stream."""
        self.stream.flush()

    @override
    def fileno(self) -> int:
        """The stream's own."""
        return self.stream.fileno()

    @override
    def writable(self) -> bool:
        """Always true."""
        return True


class _LimitedHandler(logging.StreamHandler[LogStream]):
    """A handler that leaves messages out of causes that repeat."""

    def __init__(self, stream: LogStream, formatter: logging.Formatter) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)
        self._limit = RepeatLimit()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, unless it repeats too often."""
        for admitted in self._limit.admit(record):
            super().emit(admitted)

    @override
    def close(self) -> None:
        """Writes how many messages were left out, at the end of the process."""
        for record in self._limit.end():
            super().emit(record)
        super().close()


def start_logging(level: str, log_format: str) -> None:
    """Makes the process log to stderr, where no write fails from then on. With JSON, all that
    Python writes there becomes JSON.

    Args:
        level: debug, info, warning or error.
        log_format: text or json.
    """
    is_json = log_format == "json"
    formatter = JsonFormatter() if is_json else logging.Formatter(_TEXT_FORMAT)
    stream = log_stream(lambda text: formatter.format(_warning(text)))
    sys.stderr = JsonStderr(stream) if is_json else stream
    logging.basicConfig(level=level.upper(), handlers=[_LimitedHandler(stream, formatter)])


def log_stream(to_line: Callable[[str], str]) -> LogStream:
    """Returns the stream of a process's log, which is in front of stderr. It is the one that
    `start_logging` has made, if it has.

    Args:
        to_line: makes a line of the log out of a text, without an end.
    """
    stderr = sys.stderr.stream if isinstance(sys.stderr, JsonStderr) else sys.stderr
    if stderr is None:  # the process was started without one, as by 2>&-
        stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open for as long as the process
    return stderr if isinstance(stderr, LogStream) else LogStream(stderr, to_line)


def _warning(text: str) -> logging.LogRecord:
    return logging.LogRecord("baton.log", logging.WARNING, "", 0, text, (), None)


def json_line_of_process(process: str, text: str) -> str:
    """Returns a line that a process wrote as JSON with the key `process`.

    Args:
        process: the process's name.
        text: a line of `JsonFormatter`, a line that something else wrote there, or one that this
            function has made of a line of the process's child.
    """
    if text.startswith('{"process": '):
        return text
    if text.startswith('{"time": '):
        return f'{{"process": {json.dumps(process)}, {text[1:]}'
    return json_line_of_process(process, _plain_line("process", text))


def _plain_line(logger: str, text: str) -> str:
    record = logging.LogRecord(logger, logging.INFO, "", 0, "%s", (text,), None)
    return JsonFormatter().format(record)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _ids() -> dict[str, str]:
    call = CURRENT_CALL.get()
    if call is None:
        return {}
    ids = {"request_id": call.request_id} if call.request_id else {}
    return {**ids, "trace_id": call.trace_id} if call.trace_id else ids
