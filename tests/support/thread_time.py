"""`ThreadTime`: how long the threads of this and other processes worked or waited for a core."""

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

__all__ = ["ThreadTime"]


class ThreadTime:
    """Measures from its construction on. A duration less this is what threads waited for else.

    So a test can say how long a call may wait for another process, however busy the machine is.

    Args:
        pids: of further processes.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = (os.getpid(), *pids)
        self._before = self._busy_ns()

    def busy_s(self) -> float:
        """Returns the seconds on a core, and in a queue for one, of all threads together."""
        return (self._busy_ns() - self._before).total() / 1e9

    def _busy_ns(self) -> Counter[str]:
        """Returns the nanoseconds by thread, of those that live."""
        busy_ns: Counter[str] = Counter()
        for pid in self._pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):  # it has ended
                    running, queued, _ = (task / "schedstat").read_text().split()
                    busy_ns[task.name] = int(running) + int(queued)
        return busy_ns
