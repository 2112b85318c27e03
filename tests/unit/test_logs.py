"""Log lines as JSON."""

import io
import json
import logging
import subprocess
import sys

import pytest

from baton.processes.output import log_writer
from baton.traceparent import TraceContext
from rpc.logs import JsonFormatter, JsonStderr, json_line_of_process, log_fields, logging_request

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
    with logging_request("r-1", TRACE):
        line = formatted("hello")
    assert (line["request_id"], line["trace_id"]) == ("r-1", TRACE.trace_id)
    assert "request_id" not in formatted("hello")
    with logging_request("r-2", None):
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
