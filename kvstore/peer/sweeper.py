"""`Sweeper`: ends leases and reads on time."""

import threading
import time
from collections.abc import Callable

from kvstore.peer.leases import LeaseTable

__all__ = ["Sweeper"]


class Sweeper:
    """A thread that sleeps until the next lease or read runs out.

    Args:
        leases: of which.
        longest_s: how long it sleeps at most: what begins meanwhile runs out later than that.
        on_swept: called after each sweep with the number of leases that ran out.
    """

    def __init__(
        self, leases: LeaseTable, longest_s: float, on_swept: Callable[[int], None]
    ) -> None:
        self._leases = leases
        self._longest_s = longest_s
        self._on_swept = on_swept
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-kv-leases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        wait_s = self._longest_s
        while not self._closed.wait(wait_s):
            self._on_swept(self._leases.sweep())
            deadline = self._leases.next_deadline
            wait_s = self._longest_s
            if deadline is not None:
                wait_s = max(0.0, min(wait_s, deadline - time.monotonic()))
