"""Commands end quietly if the reader of their output has exited, as `head` does."""

import subprocess
import sys

from tests.support.fake_generation import running_fake_generation

BROKEN_PIPE_STATUS = 141  # what a shell calls a program that SIGPIPE ended


def run(*arguments, **streams):
    command = [sys.executable, "-c", "import sys; from baton.cli import main; sys.exit(main())"]
    return subprocess.run([*command, *arguments], check=False, timeout=60, **streams)


def test_generate_cancels_its_request_and_ends_quietly(unread_pipe):
    with running_fake_generation() as server:
        arguments = ("generate", "hang", "--address", server.address)
        ended = run(*arguments, stdout=unread_pipe, stderr=subprocess.PIPE)
        assert server.cancelled.wait(10)
    assert (ended.returncode, ended.stderr) == (BROKEN_PIPE_STATUS, b"")


def test_generate_prints_its_text_if_stderr_is_not_read(unread_pipe):
    with running_fake_generation() as server:
        arguments = ("generate", "hi", "--address", server.address)
        ended = run(*arguments, stdout=subprocess.PIPE, stderr=unread_pipe)
    assert (ended.returncode, ended.stdout) == (BROKEN_PIPE_STATUS, b"Hello, world\n")


def test_a_command_that_prints_only_at_its_end_ends_quietly(unread_pipe):
    ended = run("health", "127.0.0.1:1", stdout=unread_pipe, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (BROKEN_PIPE_STATUS, b"")
