"""Signals as exceptions, for commands whose main thread does not wait for signals."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

__all__ = ["exit_on_signals"]

_EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_STATUS_OF_SIGNALS = 128  # plus the signal's number: the status that a shell reports


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
