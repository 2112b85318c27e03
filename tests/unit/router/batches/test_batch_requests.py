"""What the lines of an input file must be."""

import json

import pytest

from router.batches import requests
from router.batches.requests import BATCH_PRIORITY, check_input, id_digest, read_requests
from tests.support.batches import ENDPOINT, input_line, input_of

MAX_BYTES = 4096


def errors_of(tmp_path, content: bytes):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return check_input(path, ENDPOINT, MAX_BYTES)


def test_requests_are_counted_and_read(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n" + input_of(["a", "b"])[:-1])
    assert check_input(path, ENDPOINT, MAX_BYTES) == requests.InputCheck(2, ())
    read = list(read_requests(path, ENDPOINT))
    assert [(each.number, each.custom_id) for each in read] == [(2, "a"), (3, "b")]
    assert json.loads(read[0].body) == {**input_line("a")["body"], "priority": BATCH_PRIORITY}
    done = {id_digest("a")}
    assert [each.custom_id for each in read_requests(path, ENDPOINT, done)] == ["b"]


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"{}", "invalid_request", "custom_id"),
        (input_line(""), "invalid_request", "custom_id"),
        (input_line("x" * 513), "invalid_request", "custom_id"),
        (input_line("a", body=[]), "invalid_request", "body"),
        (input_line("a", body={"stream": True}), "invalid_request", "body.stream"),
        (input_line("a", method="GET"), "invalid_method", "method"),
        (input_line("a", url="/v1/messages"), "invalid_url", "url"),
        (input_line("a", body={"prompt": "x" * MAX_BYTES}), "line_too_large", None),
        (input_line("good"), "duplicate_custom_id", "custom_id"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, line, code, param):
    text = line if isinstance(line, bytes) else json.dumps(line).encode()
    check = errors_of(tmp_path, input_of(["good"]) + text + b"\n" + input_of(["last"]))
    assert check.total == 3
    (error,) = check.errors
    assert (error["line"], error["code"], error["param"]) == (2, code, param)


def test_an_empty_file_and_one_with_too_many_requests(tmp_path, monkeypatch):
    assert errors_of(tmp_path, b"\n\n").errors[0]["code"] == "empty_file"
    monkeypatch.setattr(requests, "MAX_REQUESTS", 1)
    assert errors_of(tmp_path, input_of("ab")).errors[0]["code"] == "too_many_requests"


def test_errors_are_few(tmp_path):
    assert len(errors_of(tmp_path, b"{\n" * 500).errors) == 100
