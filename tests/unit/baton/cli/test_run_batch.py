"""`baton run-batch` against a scripted server: results, errors, retries, resume."""

import json
import os
import subprocess
import sys
import threading

import pytest

from baton.cli import main
from tests.support.openai_stub import Reply, running_openai_stub

CHAT = "/v1/chat/completions"


def request_line(custom_id, url=CHAT, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def echo(seen):
    """Answers a request with its body."""
    return Reply({"id": "r", "echo": seen.body}, headers={"x-request-id": "req-1"})


@pytest.fixture
def batch(tmp_path):
    return Batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl")


class Batch:
    def __init__(self, source, target):
        self.source, self.target = source, target

    def write(self, *lines):
        self.source.write_text("".join(f"{line}\n" for line in lines))

    def command(self, stub, *flags):
        url = getattr(stub, "url", stub)
        return ["run-batch", "-i", str(self.source), "-o", str(self.target), "--url", url, *flags]

    def run(self, stub, *flags):
        return main(self.command(stub, *flags))

    def results(self):
        return {record["custom_id"]: record for record in self.lines()}

    def lines(self):
        return [json.loads(line) for line in self.target.read_text().splitlines()]


def test_each_request_gets_a_result(batch, capsys):
    batch.write(request_line("a", model="m", n=1), request_line("b", "/v1/completions", prompt="p"))
    with running_openai_stub(echo) as stub:
        assert batch.run(stub) == 0
    assert {seen.path for seen in stub.requests} == {CHAT, "/v1/completions"}
    result = batch.results()["a"]
    assert result["id"].startswith("batch_req_")
    assert result["error"] is None
    assert result["response"] == {
        "status_code": 200,
        "request_id": "req-1",
        "body": {"id": "r", "echo": {"model": "m", "n": 1}},
    }
    assert "2 requests succeeded, 0 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is needed, not [1]"),
        ('{"custom_id": 7}', "custom_id is 7"),
        ('{"custom_id": "x", "method": "GET"}', "method is 'GET'"),
        (request_line("x", "/v1/files"), "url is '/v1/files'"),
        (request_line("x", stream=True), "body.stream is true"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/completions"}', "body is None"),
        (request_line("x", temperature=float("nan")), "not JSON: NaN is not a JSON value"),
        (request_line("x", top_p=1).replace("1}", "1e999}"), "not JSON: Out of range float"),
        ("[" * 200_000, "not JSON: maximum recursion depth"),
    ],
)
def test_a_malformed_line_is_an_error_line_and_does_not_stop_the_others(batch, line, message):
    batch.write(line, request_line("good"))
    with running_openai_stub(echo) as stub:
        assert batch.run(stub) == 1
        first = batch.target.read_text()
        assert batch.run(stub) == 1  # a second run repeats neither line
        assert batch.target.read_text() == first
    bad, good = sorted(batch.lines(), key=lambda record: record["custom_id"] == "good")
    assert good["response"]["status_code"] == 200
    assert bad["response"] is None
    assert bad["error"]["code"] == "invalid_line"
    assert bad["error"]["line"] == 1
    assert f"line 1: {message}" in bad["error"]["message"]


def test_a_refused_request_is_a_result(batch):
    batch.write(request_line("a"))
    refusal = {"error": {"message": "no such model"}}
    with running_openai_stub(lambda seen: Reply(refusal, status=404)) as stub:
        assert batch.run(stub) == 1
        assert batch.run(stub) == 1
    assert len(stub.requests) == 1
    response = batch.results()["a"]["response"]
    assert (response["status_code"], response["body"]) == (404, refusal)


def test_a_custom_id_twice_is_refused_before_anything_runs(batch, capsys):
    batch.write(request_line("a"), "", request_line("b"), request_line("a"))
    with running_openai_stub(echo) as stub:
        assert batch.run(stub) == 2
    assert "custom_id 'a' is on lines 1 and 4" in capsys.readouterr().err
    assert not stub.requests
    assert not batch.target.exists()


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_after_the_time_that_it_names(batch, status):
    batch.write(request_line("a"))
    replies = [Reply({}, status, {"Retry-After": "0"})] * 3 + [Reply({"ok": True})]
    with running_openai_stub(lambda seen: replies.pop(0)) as stub:
        assert batch.run(stub, "--max-retries", "3") == 0
    assert len(stub.requests) == 4


def test_a_request_that_the_server_never_takes_runs_again_in_the_next_run(batch):
    batch.write(request_line("a"), request_line("b"))
    busy = Reply({"error": {"message": "full"}}, 429, {"Retry-After": "0"})
    with running_openai_stub(lambda seen: busy) as stub:
        assert batch.run(stub, "--max-retries", "1") == 1
    assert batch.results()["a"]["response"]["status_code"] == 429
    with running_openai_stub(echo) as stub:
        assert batch.run(stub) == 0
    assert [record["response"]["status_code"] for record in batch.lines()] == [200, 200]


def test_an_interrupted_run_continues(batch):
    batch.write(*(request_line(str(number), number=number) for number in range(4)))
    held = threading.Event()

    def answer_two(seen):
        if seen.body["number"] >= 2:
            held.wait(20)
        return echo(seen)

    with running_openai_stub(answer_two) as stub:
        command = [sys.executable, "-m", "baton", *batch.command(stub, "--concurrency", "1")]
        command[1:3] = ["-c", "import sys; from baton.cli import main; sys.exit(main())"]
        run = subprocess.Popen(command, stderr=subprocess.PIPE)
        while not batch.target.exists() or batch.target.read_text().count("\n") < 2:
            assert run.poll() is None
        run.kill()
        run.communicate()
        held.set()
    with batch.target.open("ab") as file:  # the third result was cut off
        file.write(b'{"id": "batch_req_7", "custom_id": "2", "resp')
    with running_openai_stub(echo) as stub:
        assert batch.run(stub) == 0
    assert sorted(seen.body["number"] for seen in stub.requests) == [2, 3]
    assert sorted(record["custom_id"] for record in batch.lines()) == ["0", "1", "2", "3"]


def test_a_text_that_utf_8_cannot_hold_is_sent_as_it_is_written(batch):
    batch.write(request_line("a", prompt="\ud800"))
    with running_openai_stub(lambda seen: Reply({})) as stub:
        assert batch.run(stub) == 0
    assert stub.requests[0].body == {"prompt": "\ud800"}


@pytest.mark.parametrize("status", [302, 401, 403, 408])
def test_what_a_right_address_or_key_would_change_runs_again_in_the_next_run(batch, status):
    batch.write(request_line("a"))
    with running_openai_stub(lambda seen: Reply({}, status)) as stub:
        assert batch.run(stub) == 1
    with running_openai_stub(echo) as stub:
        assert batch.run(stub) == 0
    assert [record["response"]["status_code"] for record in batch.lines()] == [200]


def test_a_link_to_the_results_stays_a_link(batch, tmp_path):
    batch.write(request_line("a"))
    real = tmp_path / "real.jsonl"
    real.touch()
    batch.target.symlink_to(real)
    with running_openai_stub(echo) as stub:
        assert batch.run(stub) == 0
    assert batch.target.is_symlink()
    assert real.read_text() == batch.target.read_text() != ""


def test_a_pipe_is_not_replaced_by_a_file(batch, capsys):
    batch.write(request_line("a"))
    os.mkfifo(batch.target)
    assert batch.run("127.0.0.1:1") == 2
    assert f"cannot write {batch.target}: it is not a regular file" in capsys.readouterr().err
    assert batch.target.is_fifo()


def test_a_full_disk_ends_the_run_which_then_continues(batch):
    batch.write(*(request_line(str(number), text="x" * 100) for number in range(4)))
    with running_openai_stub(echo) as stub:
        # A process with a limit of the sizes of its files gets an error as of a full disk.
        limited = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (500, 500)); "
        code = f"import sys; from baton.cli import main; {limited}sys.exit(main())"
        command = [sys.executable, "-c", code, *batch.command(stub)]
        run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        assert run.returncode == 2
        assert run.stderr.endswith(f"error: cannot write {batch.target}: File too large\n")
        assert batch.run(stub) == 0
    assert sorted(record["custom_id"] for record in batch.lines()) == ["0", "1", "2", "3"]


_RESULT = {"custom_id": "a", "response": None, "error": None}


@pytest.mark.parametrize(
    "contents",
    [
        *("my notes\n", "my notes", '{"a": 1}\n', "1\n"),
        json.dumps({**_RESULT, "response": "r"}),
        json.dumps({**_RESULT, "response": {"status_code": "200"}}),
        json.dumps({**_RESULT, "custom_id": ["a"]}),
        json.dumps({**_RESULT, "error": "e"}),
        "[" * 200_000,
    ],
)
def test_a_file_with_other_contents_is_not_touched(batch, contents, capsys):
    batch.write(request_line("a"))
    batch.target.write_text(contents)
    with running_openai_stub(echo) as stub:
        assert batch.run(stub) == 2
    assert "choose another --output-file" in capsys.readouterr().err
    assert batch.target.read_text() == contents
    assert [path.name for path in batch.target.parent.glob("out*")] == ["out.jsonl"]


def test_a_server_that_is_not_there_ends_the_run(batch, capsys):
    batch.write(request_line("a"))
    assert batch.run("http://127.0.0.1:1/v1") == 1
    assert "`baton serve`" in capsys.readouterr().err
    assert batch.target.read_text() == ""


def test_a_slow_answer_is_an_error_line(batch):
    batch.write(request_line("a"))
    held = threading.Event()

    def wait(seen):
        held.wait(20)
        return echo(seen)

    with running_openai_stub(wait) as stub:
        assert batch.run(stub, "--timeout-s", "0.2") == 1
        held.set()
    assert batch.results()["a"]["error"]["code"] == "timeout"


def test_requests_run_at_once_up_to_the_limit(batch):
    batch.write(*(request_line(str(number)) for number in range(8)))
    together = threading.Barrier(4)

    def meet(seen):
        together.wait(20)
        return echo(seen)

    with running_openai_stub(meet) as stub:
        assert batch.run(stub, "--concurrency", "4") == 0
    assert len(batch.lines()) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "0"], "--concurrency is 0"),
        (["--max-retries", "-1"], "--max-retries"),
        (["--timeout-s", "nan"], "--timeout-s is nan"),
        (["--timeout-s", "0"], "--timeout-s is 0"),
        (["--api-key", "sk-1\nsk-2"], "--api-key has characters that no HTTP header can hold"),
        (["--api-key", "sk-\u00e9"], "--api-key has characters that no HTTP header can hold"),
    ],
)
def test_bad_flags_are_refused(batch, flags, message, capsys):
    batch.write(request_line("a"))
    assert batch.run("127.0.0.1:1", *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "sk-" not in error


def test_a_missing_file_is_refused(batch, capsys):
    assert batch.run("127.0.0.1:1") == 2
    assert f"cannot read {batch.source}" in capsys.readouterr().err
