"""`Interactive`: whether clients wait for answers, so that batches leave room for theirs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.processes.counts import Accounts
from rpc.logs import CURRENT_CALL

__all__ = ["Interactive", "is_call_awaited"]


def is_call_awaited() -> bool:
    """Whether a client waits for the answer of the present call: not for those of batches."""
    call = CURRENT_CALL.get()
    return call is None or call.is_counted


class Interactive:
    """The requests of clients who wait for the answer: all but those of batches.

    Args:
        accounts: where they are counted, for all processes of the router.
        clock: monotonic seconds.
    """

    def __init__(self, accounts: Accounts, clock: Callable[[], float] = time.monotonic) -> None:
        self._account = accounts.account("interactive", "")
        self._clock = clock
        self._last_at = float("-inf")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts a request of the present call while the context lasts, if a client waits."""
        if not is_call_awaited():
            yield
            return
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    @property
    def quiet_s(self) -> float:
        """Seconds since one ran in this process, or in another one when this was last asked."""
        with self._account.open() as counts:
            is_quiet = counts.has_room(0, 0)  # without what a dead process held
        now = self._clock()
        if not is_quiet:
            self._last_at = now
        return now - self._last_at

    def _add(self, change: int) -> None:
        with self._account.open() as counts:
            counts.add_running(change)
        self._last_at = self._clock()
