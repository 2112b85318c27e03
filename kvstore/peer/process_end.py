"""`ProcessEnd`: tells when a process of this machine is gone, with all its threads."""

import os
import select
import weakref

__all__ = ["ProcessEnd"]


class ProcessEnd:
    """Watches one process; whoever gets its id later is another one. Any thread may ask.

    Args:
        pid: of the process, which runs now.

    Raises:
        OSError: there is none, or Linux cannot tell (before 5.3).
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._fd)

    def has_come(self) -> bool:
        """Whether its last thread has ended: no system call of it is under way any more."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))
