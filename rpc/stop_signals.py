"""The signals that ask a process to stop, as events of the loop or as exceptions.

SIGHUP stops programs that talk in a terminal, which it says has closed. Servers ignore it: tools
that rotate logs send it, and logs go to stderr, so that there is no file to open again.
"""

import asyncio
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType

__all__ = [
    "STOP_SIGNALS",
    "StopSignals",
    "exit_on_signals",
    "ignored_hangup",
    "stop_signals_in_use",
]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals of supervisors and of Ctrl-C, which stop servers."""
_EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_STATUS_OF_SIGNALS = 128  # plus the signal's number: the status that a shell reports


def stop_signals_in_use() -> Sequence[signal.Signals]:
    """Returns the signals of `STOP_SIGNALS` apart from ignored ones: with `&` in a script, the
    shell has set a signal to be ignored.
    """
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def ignored_hangup() -> Generator[None, None, None]:
    """Lets SIGHUP do nothing in the block, in this process and in those that it starts.

    Only for the main thread.
    """
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous or signal.SIG_DFL)  # None: it is not Python's


class StopSignals:
    """Signals to stop: the first sets `requested`; SIGINT after it sets `forced`."""

    def __init__(self) -> None:
        self._numbers = stop_signals_in_use()
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    def __enter__(self) -> "StopSignals":
        for number in self._numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number in self._numbers:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.requested.is_set():
            self.requested.set()
        elif number == signal.SIGINT:
            self.forced.set()


@contextmanager
def exit_on_signals() -> Generator[None, None, None]:
    """Lets the first SIGTERM or SIGHUP raise `SystemExit` in the block, so that it cleans up.

    Later ones do nothing, so that they do not interrupt the clean-up. Code in the block may have
    handlers of its own. Only for the main thread.

    Raises:
        SystemExit: a signal came; with 128 plus its number.
    """
    is_ending = False

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal is_ending
        if not is_ending:
            is_ending = True
            raise SystemExit(_STATUS_OF_SIGNALS + number)

    # Under `nohup`, and with `&` in a script, the shell has set a signal to be ignored.
    previous = {
        number: handler
        for number in _EXIT_SIGNALS
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    for number in previous:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
