"""The signals that ask a process to stop."""

import signal
from collections.abc import Sequence

__all__ = ["STOP_SIGNALS", "stop_signals_in_use"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Those of supervisors, of Ctrl-C, and of a terminal that closes."""


def stop_signals_in_use() -> Sequence[signal.Signals]:
    """Returns the signals of `STOP_SIGNALS` apart from ignored ones: under `nohup`, and with `&` in
    a script, the shell has set a signal to be ignored.
    """
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
