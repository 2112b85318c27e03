"""Log lines as JSON."""

import errno
import io
import json
import logging
import os
import select
import subprocess
import sys

import pytest

from baton.common.observe.traceparent import TraceContext
from rpc.log_stream import MAX_REPEATS, LogStream
from rpc.logs import (
    CallInfo,
    JsonFormatter,
    JsonStderr,
    json_line_of_process,
    log_fields,
    serving,
)
from worker.processes.output import log_writer

TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", is_sampled=True)


def formatted(message, *args, level=logging.INFO, extra=None, exc_info=None):
    record = logging.getLogger("baton.test").makeRecord(
        "baton.test", level, "", 0, message, args, exc_info, extra=extra
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    return json.loads(line)


def test_a_line_has_time_level_logger_and_message():
    line = formatted("two\nlines of %s", "'\x00\ud800", level=logging.WARNING)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "baton.test",
        "message": "two\nlines of '\x00\ud800",
    }


def test_a_line_has_the_ids_of_the_request_at_hand():
    with serving(CallInfo("r-1", TRACE)):
        line = formatted("hello")
    assert (line["request_id"], line["trace_id"]) == ("r-1", TRACE.trace_id)
    assert "request_id" not in formatted("hello")
    with serving(CallInfo("r-2")):
        assert "trace_id" not in formatted("hello")


def test_fields_and_tracebacks_are_keys():
    try:
        raise ValueError("bad")
    except ValueError:
        line = formatted("failed", extra=log_fields(status=500), exc_info=sys.exc_info())
    assert line["status"] == 500
    assert line["exception"].endswith("ValueError: bad")


@pytest.mark.parametrize("text", ["a plain line", '{"no": "time"}', "{}", ""])
def test_plain_lines_of_processes_become_json(text):
    parsed = json.loads(json_line_of_process("router", text))
    assert (parsed["process"], parsed["message"]) == ("router", text)


def test_a_line_keeps_the_name_of_the_first_process():
    line = json_line_of_process("decode-0", "ready")
    assert json_line_of_process("decode", line) == line


def test_a_cluster_names_the_process_of_each_line(capsys):
    record = logging.makeLogRecord({"name": "baton.rpc", "msg": "listening"})
    log_writer("json")(f"decode-0 | {JsonFormatter().format(record)}")
    line = json.loads(capsys.readouterr().err)
    assert (line["process"], line["message"]) == ("decode-0", "listening")
    log_writer("text")("decode-0 | listening")
    assert capsys.readouterr().err == "decode-0 | listening\n"


def test_what_else_is_written_to_stderr_becomes_json():
    stream = io.StringIO()
    stderr = JsonStderr(stream)
    print("a warning", file=stderr)
    stderr.write("\rloading 10%")
    stderr.write("\rloading 100%")
    stderr.write("\n\n  \nno end")
    stderr.write("x" * 10**6)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["a warning", "loading 100%"]
    assert {line["logger"] for line in lines} == {"stderr"}
    stderr.write("!\n")
    assert len(stream.getvalue().splitlines()[-1]) < 2**16 + 200


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_process_logs_in_the_form_of_its_flag(log_format):
    program = f"""
import logging, warnings
from rpc.logs import log_fields, start_logging
start_logging("info", "{log_format}")
logging.getLogger("baton.test").info("hello %s", "you", extra=log_fields(status=200))
logging.getLogger("baton.test").debug("not logged")
warnings.warn("careful")
raise ValueError("the end")
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = run.stderr.splitlines()
    if log_format == "text":
        assert lines[0].endswith("INFO baton.test hello you")
        assert lines[-1] == "ValueError: the end"
    else:
        parsed = [json.loads(line) for line in lines]
        assert (parsed[0]["message"], parsed[0]["status"]) == ("hello you", 200)
        assert parsed[-1]["message"] == "ValueError: the end"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_process_limits_what_repeats_in_every_log(log_format):
    program = f"""
import asyncio, logging
from rpc.logs import start_logging
start_logging("info", "{log_format}")
async def main():
    for _ in range(1000):
        asyncio.get_running_loop().call_exception_handler({{"message": "accept failed"}})
        logging.getLogger("grpc").error("cannot listen")
asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    for text in ("accept failed", "cannot listen"):
        lines = [line for line in run.stderr.splitlines() if text in line]
        assert len(lines) == MAX_REPEATS + 2
        assert f"left out {1000 - MAX_REPEATS} messages" in lines[-1]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_process_without_stderr_runs(log_format):
    program = f"""
import logging, sys
from worker.processes.output import log_writer
from rpc.logs import start_logging
assert sys.stderr is None
log_writer("{log_format}")("decode-0 | ready")
start_logging("info", "{log_format}")
logging.getLogger("baton.test").info("hello")
print("careful", file=sys.stderr)
"""
    shell = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    assert subprocess.run(shell, check=False).returncode == 0


class FullDisk(io.RawIOBase):
    """A file that takes so many bytes until there is room again; an error may stand for it."""

    def __init__(self):
        self.room = 10**9
        self.error: int | None = errno.ENOSPC
        self.written = b""

    def writable(self):
        return True

    def write(self, data):
        if not self.room:
            if self.error is None:
                return None
            raise OSError(self.error, os.strerror(self.error))
        taken = bytes(data[: self.room])
        self.room -= len(taken)
        self.written += taken
        return len(taken)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE, None])
def test_lines_that_cannot_be_written_are_counted_and_later_ones_come(error):
    disk = FullDisk()
    stream = LogStream(io.TextIOWrapper(io.BufferedWriter(disk)), lambda text: f"log: {text}")
    stream.write("first\n")
    disk.room, disk.error = 3, error
    for number in range(1000):
        stream.write(f"lost {number}\n")
    disk.room = 10**9
    stream.write("again\n")
    stream.write("and again\n")
    reason = "the reader is too slow" if error is None else os.strerror(error)
    assert disk.written.decode().splitlines() == [
        *("first", "los", f"log: 1000 lines of the log were lost: {reason}", "again", "and again"),
    ]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_log_of_a_process_outlives_a_full_disk(tmp_path, unbuffered):
    """A file of limited size stands for the disk: the limit is raised when the log is full."""
    program = """
import logging, resource, signal, sys
from rpc.logs import start_logging
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
start_logging("info", "text")
for number in range(10):
    logging.getLogger("baton.test").info("line %d %s", number, "x" * 50)
print("printed", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
logging.getLogger("baton.test").info("room again")
"""
    log = tmp_path / "log"
    with log.open("wb") as file:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        subprocess.run([sys.executable, "-c", program], check=True, stderr=file, env=environment)
    lines = log.read_text().splitlines()
    assert lines[-1].endswith("room again")
    (lost,) = (line for line in lines if "lines of the log were lost" in line)
    assert "WARNING baton.log 9 lines" in lost  # eight of the ten, and "printed"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_process_runs_on_while_nobody_reads_its_log(unbuffered):
    """The one that reads it may be stopped (SIGSTOP), and the pipe be full."""
    program = """
import logging, sys
from rpc.logs import start_logging
start_logging("info", "text")
for number in range(3000):
    logging.getLogger("baton.test").info("line %d %s", number, "x" * 500)
print("runs", flush=True)
sys.stdin.readline()
logging.getLogger("baton.test").info("read again")
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        try:
            readable, _, _ = select.select([process.stdout], [], [], 60)
            assert readable, "it waits for a reader"
            held = os.read(process.stderr.fileno(), 1 << 20)  # all that the pipe holds
            _, log = process.communicate("\n", timeout=60)
        finally:
            process.kill()
    lines = (held.decode() + log).splitlines()
    assert "line 0 " in lines[0]
    assert any("lines of the log were lost: the reader is too slow" in line for line in lines)
    assert lines[-1].endswith("read again")


def test_a_reader_that_is_a_little_late_each_time_is_not_waited_for_each_time(monkeypatch):
    waited_ms: list[float] = []

    class LateReader:
        """A poll of a pipe that has room after 10 ms."""

        def register(self, descriptor, events):
            pass

        def poll(self, timeout_ms):
            waited_ms.append(min(timeout_ms, 10.0))
            return [(0, select.POLLOUT)] if timeout_ms >= 10.0 else []

    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as file:
        stream = LogStream(file, str, lambda: sum(waited_ms) / 1000)
        with monkeypatch.context() as patched:
            patched.setattr(select, "poll", LateReader)
            for _ in range(100):
                stream.write("line\n")
    assert sum(waited_ms) < 51.0


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_log_of_a_cluster_outlives_a_full_disk(log_format, monkeypatch):
    disk = FullDisk()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(disk)))
    write = log_writer(log_format)
    disk.room = 0
    write("decode-0 | lost")
    disk.room = 10**9
    write("decode-0 | again")
    lost, again = disk.written.decode().splitlines()
    assert "1 lines of the log were lost: No space left on device" in lost
    if log_format == "text":
        assert (lost.partition(" ")[0], again) == ("log", "decode-0 | again")
    else:
        assert json.loads(lost)["process"] == "log"
        assert json.loads(again)["message"] == "again"
