"""`baton bench serve` as a user runs it, with scripted endpoints."""

import json

import pytest

from baton.cli import main
from tests.support.fake_completions import running_fake_completions
from tests.support.fake_generation import running_fake_generation

FLAGS = ("--num-requests", "6", "--input-len", "4", "--output-len", "3", "--num-warmups", "1")


def test_a_router_is_measured(tmp_path, capsys):
    path = tmp_path / "report.json"
    with running_fake_generation() as server:
        flags = ("--target", f"grpc://{server.address}", "--goodput", "ttft:60000", "tpot:60000")
        arrivals = ("--request-rate", "200", "--max-concurrency", "2")
        files = ("--json", str(path), "--save-records")
        assert main(["bench", "serve", *flags, *FLAGS, *arrivals, *files]) == 0
        assert len(server.requests) == 7
        assert all(t < 300 for request in server.requests for t in request.token_ids.ids)
    report = json.loads(path.read_text())
    assert report["metrics"]["num_output_tokens"] == 18
    assert report["metrics"]["goodput"]["share"] == 1
    assert report["metrics"]["peak_concurrency"] <= 2
    assert len(report["records"]) == 6
    assert report["arrivals"]["kind"] == "poisson"
    output = capsys.readouterr().out
    assert "fake at grpc://" in output
    assert all(name in output for name in ("TTFT", "ITL", "TPOT", "E2E", "good requests"))


def test_failures_are_reported_and_the_command_fails_if_every_request_fails(capsys):
    flags = ("--num-requests", "3", "--output-len", "9", "--num-warmups", "0")
    with running_fake_generation() as server:
        assert main(["bench", "serve", "--target", f"grpc://{server.address}", *flags]) == 1
    output = capsys.readouterr().out
    assert "3 tokens came, 9 were asked for" in output


def test_http_needs_the_size_of_the_vocabulary(capsys):
    with running_fake_completions() as server:
        server.events = [{"choices": [{"text": "x", "token_ids": [1, 2, 3]}]}, "[DONE]"]
        assert main(["bench", "serve", "--target", server.url, *FLAGS]) == 2
        assert "--vocab-size is missing" in capsys.readouterr().err
        assert main(["bench", "serve", "--target", server.url, *FLAGS, "--vocab-size", "9"]) == 0
        assert len(server.bodies) == 7
        assert all(body["model"] == "fake-http" for body in server.bodies)
    assert "fake-http at http://" in capsys.readouterr().out


def test_an_absent_server_is_reported(capsys):
    assert main(["bench", "serve", "--target", "http://127.0.0.1:1/v1", "--vocab-size", "9"]) == 1
    assert "cannot reach http://127.0.0.1:1/v1/models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--goodput", "ttft:fast"), "--goodput has 'ttft:fast'"),
        (("--plot", "/no/where/x.png"), "--plot is /no/where/x.png"),
        (("--max-concurrency", "0"), "--max-concurrency is 0"),
        (("--target", "somewhere"), "--target is 'somewhere'"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_sent(flags, message, capsys):
    assert main(["bench", "serve", *flags]) == 2
    assert message in capsys.readouterr().err
