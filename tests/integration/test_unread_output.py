"""Commands whose reader has left, as `head` does: they end quietly."""

import subprocess
import sys

import pytest

from tests.support.fake_generation import running_fake_generation

pytestmark = pytest.mark.alone

BROKEN_PIPE_STATUS = 141  # what a shell calls a program that SIGPIPE ended


def run(*arguments, **streams):
    command = [sys.executable, "-c", "import sys; from baton.cli import main; sys.exit(main())"]
    return subprocess.run([*command, *arguments], check=False, timeout=60, **streams)


def test_generate_cancels_and_ends_without_a_word(unread_pipe):
    with running_fake_generation() as server:
        arguments = ("generate", "hang", "--address", server.address)
        ended = run(*arguments, stdout=unread_pipe, stderr=subprocess.PIPE)
        assert server.cancelled.wait(10)
    assert (ended.returncode, ended.stderr) == (BROKEN_PIPE_STATUS, b"")


def test_figures_that_nobody_reads_are_no_failure_of_the_text(unread_pipe):
    with running_fake_generation() as server:
        arguments = ("generate", "hi", "--address", server.address)
        ended = run(*arguments, stdout=subprocess.PIPE, stderr=unread_pipe)
    assert (ended.returncode, ended.stdout) == (BROKEN_PIPE_STATUS, b"Hello, world\n")


def test_output_that_is_written_at_the_end_alone(unread_pipe):
    ended = run("health", "127.0.0.1:1", stdout=unread_pipe, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (BROKEN_PIPE_STATUS, b"")
