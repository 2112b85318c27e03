"""`baton chat` and `baton complete` against a scripted server."""

import io
import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from baton.cli import main
from baton.cli.openai_endpoint import parse_base_url
from baton.common.errors import ConfigurationError
from tests.support.openai_stub import Reply, chat_events, running_openai_stub

USAGE_LINE = "[stop; tokens: 9 prompt, 4 cached, 3 generated]"


def answering(*texts, **options):
    return lambda seen: Reply(events=chat_events(*texts, **options))


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_a_message_is_answered_once(capsys):
    with running_openai_stub(answering("Hel", "lo")) as stub:
        flags = ["--url", stub.url, "--system", "Be brief.", "--temperature", "0"]
        assert main(["chat", "Hi!", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello\n"
    assert captured.err == f"{USAGE_LINE}\n"
    (request,) = stub.requests
    assert request.path == "/v1/chat/completions"
    assert request.body == {
        "model": "stub-model",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi!"},
        ],
    }
    assert "Authorization" not in request.headers


def test_bytes_and_characters_that_an_encoding_lacks_are_replaced():
    with running_openai_stub(answering("\u00e9", "\ud83d")) as stub:
        code = "import sys; from baton.cli import main; sys.exit(main())"
        run = subprocess.run(
            [sys.executable, "-c", code, "chat", "--url", stub.url],
            input=b"a\xff",
            env=os.environ | {"PYTHONIOENCODING": "ascii:strict"},
            capture_output=True,
            check=False,
        )
    assert (run.returncode, run.stdout) == (0, b"??\n"), run.stderr
    assert stub.requests[0].body["messages"][0]["content"] == "a\ufffd"


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_piped_text_is_one_message_and_reasoning_is_left_out(arguments, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines"))
    with running_openai_stub(answering("42", reasoning="hm")) as stub:
        assert main(["chat", *arguments, "--url", stub.url, "--model", "m"]) == 0
    assert capsys.readouterr().out == "42\n"
    assert stub.requests[0].body["model"] == "m"
    assert stub.requests[0].body["messages"] == [{"role": "user", "content": "two\nlines"}]


@pytest.mark.parametrize(("flags", "key"), [(["--api-key", "k1"], "k1"), ([], "k2")])
def test_the_key_is_that_of_the_flag_or_the_environment(flags, key, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k2")
    with running_openai_stub(answering("x")) as stub:
        assert main(["chat", "Hi", "--url", stub.url, *flags]) == 0
    assert stub.requests[0].headers["Authorization"] == f"Bearer {key}"


def test_complete_streams_the_text(capsys):
    chunks = [{"choices": [{"index": 0, "text": text}]} for text in ("a", "b")]
    chunks.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    with running_openai_stub(lambda seen: Reply(events=chunks)) as stub:
        assert main(["complete", "once", "--url", stub.url, "--stop", "x"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("ab\n", "[length]\n")
    assert stub.requests[0].path == "/v1/completions"
    body = stub.requests[0].body
    assert (body["prompt"], body["max_tokens"], body["stop"]) == ("once", 128, ["x"])


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_server_that_is_not_there_is_named_with_the_remedy(command, capsys):
    assert main([command, "Hi", "--url", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "http://127.0.0.1:1/v1" in error
    assert "`baton serve`" in error


def test_the_text_of_an_error_is_shown(capsys):
    refusal = {"error": {"message": "the prompt is too long", "type": "invalid_request_error"}}
    with running_openai_stub(lambda seen: Reply(refusal, status=400)) as stub:
        assert main(["chat", "Hi", "--url", stub.url]) == 1
    assert capsys.readouterr().err == "baton chat: error: HTTP 400: the prompt is too long\n"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(events=[{"error": {"message": "no replica"}}]), "no replica"),
        (Reply(events=chat_events("x"), is_complete=False), "the stream ended before its end"),
        (Reply(events=["data: nonsense\n\n"]), "the server sent no JSON object: nonsense"),
        (Reply("not an object", status=500), "HTTP 500: not an object"),
    ],
)
def test_a_broken_stream_is_an_error(reply, message, capsys):
    with running_openai_stub(lambda seen: reply) as stub:
        assert main(["chat", "Hi", "--url", stub.url]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h:1/v1/", "http://h:1/v1"),
        ("h:8000", "http://h:8000/v1"),
        ("https://h/", "https://h/v1"),
        ("http://h/openai/v2", "http://h/openai/v2"),
    ],
)
def test_a_url_is_completed(text, url):
    assert parse_base_url(text) == url


@pytest.mark.parametrize("text", ["ftp://h", "http://", "http://h:port/v1", "http://h:0"])
def test_a_malformed_url_is_refused(text):
    with pytest.raises(ConfigurationError, match="--url is"):
        parse_base_url(text)


class ChatTerminal:
    """`baton chat` in a terminal of its own."""

    def __init__(self, *arguments):
        self.ours, theirs = pty.openpty()
        # A session of its own, whose terminal this is, so that Ctrl-C reaches it.
        start = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        start += "from baton.cli import main; sys.exit(main(sys.argv[1:]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, "chat", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": ""},
        )
        os.close(theirs)
        self.seen = ""

    def read_until(self, text):
        while text not in self.seen:
            self.seen += os.read(self.ours, 4096).decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text):
        os.write(self.ours, text.encode())

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.ours)


@pytest.mark.timeout(60)
def test_a_conversation_in_a_terminal():
    held = threading.Event()

    def script(seen):
        text = seen.body["messages"][-1]["content"]
        if text == "wait":
            return Reply(events=chat_events("Well"), hold=held)
        if text == "fail":
            return Reply({"error": {"message": "bad luck"}}, status=400)
        return Reply(events=chat_events(f"<{text}>", reasoning="hm"))

    with running_openai_stub(script) as stub:
        chat = ChatTerminal("--url", stub.url)
        try:
            chat.read_until("Talking to stub-model")
            chat.read_until("> ")
            chat.type("one\n")
            assert "\x1b[2mhm\x1b[0m" in chat.read_until("<one>")
            chat.read_until("> ")
            chat.type("wait\n")
            chat.read_until("Well")
            chat.type("\x03")
            chat.read_until("[cancelled]")
            assert stub.client_left.wait(20)
            chat.read_until("> ")
            chat.type("fail\n")
            chat.read_until("error: HTTP 400: bad luck")
            chat.read_until("> ")
            chat.type("two\n")
            chat.read_until("<two>")
            chat.read_until("> ")
            chat.type("/reset\n")
            chat.read_until("A new conversation.")
            chat.type("three\n")
            chat.read_until("<three>")
            chat.read_until("> ")
            chat.type("\x04")
            assert chat.process.wait(20) == 0
        finally:
            held.set()
            chat.close()
    said = [[turn["content"] for turn in seen.body["messages"]] for seen in stub.requests]
    assert said[3] == ["one", "<one>", "wait", "Well", "two"]
    assert said[4] == ["three"]
