"""The signals that ask a process to stop."""

import asyncio
import signal
from collections.abc import Sequence

__all__ = ["STOP_SIGNALS", "StopSignals", "stop_signals_in_use"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals of supervisors, of Ctrl-C, and of a terminal that closes."""


def stop_signals_in_use() -> Sequence[signal.Signals]:
    """Returns the signals of `STOP_SIGNALS` apart from ignored ones: under `nohup`, and with `&` in
    a script, the shell has set a signal to be ignored.
    """
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


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
