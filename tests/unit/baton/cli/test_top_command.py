"""The terminal of `baton top`: its screen, resizes, lost routers and pipes."""

import io
import signal
import time
from types import SimpleNamespace

import pytest

from baton.cli import top
from baton.common.errors import UnauthenticatedError, UnavailableError
from tests.unit.baton.cli.test_top_view import BEFORE, NOW

FLAGS = SimpleNamespace(address="router:1", interval=0.001)


@pytest.fixture
def looks(monkeypatch):
    """What the router answers: samples and errors; then Ctrl-C."""
    answers = []

    def look(router):
        if not answers:
            raise KeyboardInterrupt
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(top, "_look", look)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    return answers


class Terminal(io.StringIO):
    """Keeps what is written to it."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(top, "sys", SimpleNamespace(stdout=stream))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def test_a_terminal_gets_its_other_screen_and_has_its_own_again(looks, terminal):
    before = signal.getsignal(signal.SIGWINCH)
    looks += [BEFORE, NOW]
    top._follow(None, FLAGS)
    text = terminal.getvalue()
    assert text.startswith("\x1b[?1049h\x1b[?25l\x1b[H\x1b[1mrouter router:1")
    assert text.endswith("\x1b[?25h\x1b[?1049l")
    assert text.count("\x1b[H") == 2
    assert "\x1b[31mdecode  10.0.0.3:50063" in text, "lost replicas are red"
    assert signal.getsignal(signal.SIGWINCH) is before


def test_no_color(looks, terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    looks += [BEFORE]
    top._follow(None, FLAGS)
    assert "\x1b[1m" not in terminal.getvalue()


def test_a_router_that_does_not_answer_is_asked_again(looks, terminal):
    looks += [UnavailableError("connection refused"), BEFORE, UnavailableError("gone"), NOW]
    top._follow(None, FLAGS)
    frames = terminal.getvalue().split("\x1b[H")[1:]
    assert ["NO ANSWER" in frame for frame in frames] == [True, False, True, False]
    assert "12 finished" in frames[2], "the last state is still shown"
    assert "5/s  22 finished" in frames[3]


def test_a_refusal_ends_it_and_gives_the_terminal_back(looks, terminal):
    looks += [UnauthenticatedError("the call lacks a valid credential of this cluster")]
    with pytest.raises(UnauthenticatedError):
        top._follow(None, FLAGS)
    assert terminal.getvalue().endswith("\x1b[?25h\x1b[?1049l")


def test_a_resize_draws_the_screen_again_at_once(looks, terminal, monkeypatch):
    looks += [NOW]
    screen = top._Screen("router:1")
    with screen.shown():
        screen.take(None)
        monkeypatch.setattr(screen._resized, "wait", resizing(screen, monkeypatch))
        screen.draw_until(time.monotonic() + 60)
    first, second = terminal.getvalue().split("\x1b[H")[1:]
    assert "loaded/s" not in first
    assert "loaded/s" in second


def resizing(screen, monkeypatch):
    """Returns a wait in which the terminal becomes wider, once."""
    waits = iter((True, False))

    def wait(timeout_s):
        assert timeout_s > 0
        if next(waits):
            monkeypatch.setenv("COLUMNS", "140")
            signal.raise_signal(signal.SIGWINCH)
        return screen._resized.is_set()

    return wait


def test_a_pipe_gets_a_table_per_look(looks, capsys):
    looks += [BEFORE, NOW]
    top._follow(None, FLAGS)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert text.count("router router:1") == 2
    assert text.endswith("LOST     connection refused\n\n")
