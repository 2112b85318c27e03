"""The limits of this process: open files, and memory, whose end `MemoryWatch` warns of.

A process that the kernel kills for lack of memory can say nothing itself, and above the first
process of a container there is none in there that could.
"""

import asyncio
import logging
import resource
from collections.abc import Callable

from baton.common.container_limits import MEMORY_REMEDY
from baton.common.machine_limits import kept_memory_share

__all__ = ["MAX_CONNECTIONS", "MemoryWatch", "connection_budget", "raise_descriptor_limit"]

_LOGGER = logging.getLogger("baton.rpc")
_INTERVAL_S = 0.5
_WARNED_SHARE = 0.95
_CALM_SHARE = 0.85
"""Below this share another warning may follow."""
MAX_CONNECTIONS = 8192
"""The most connections of a server, unless a flag states another number."""
_MIN_RESERVE = 256


class MemoryWatch:
    """Logs a warning when the container's memory is nearly used up.

    Args:
        read_share: returns the part of the limit that is in use; None without a limit.
    """

    def __init__(self, read_share: Callable[[], float | None] = kept_memory_share) -> None:
        self._read_share = read_share
        self._has_warned = False

    async def run(self) -> None:
        """Checks again and again, until it is cancelled; returns at once without a limit."""
        while self.check():  # noqa: ASYNC110 - the kernel wakes nobody
            await asyncio.sleep(_INTERVAL_S)

    def check(self) -> bool:
        """Reads the use, and warns once until it has fallen; returns whether there is a limit."""
        share = self._read_share()
        if share is None:
            return False
        if share < _CALM_SHARE:
            self._has_warned = False
        elif share >= _WARNED_SHARE and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "%.0f %% of the memory limit of this container is in use; beyond it the kernel "
                "kills a process (exit code 137): %s",
                100 * share,
                MEMORY_REMEDY,
            )
        return True


def raise_descriptor_limit() -> None:
    """Raises the number of files that this process may open as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_budget() -> int:
    """How many connections the servers of this process may have together.

    The rest of the open files is a reserve for calls to other servers, stores and files: an
    eighth of the limit and at least 256, but not more than half.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return 2 * MAX_CONNECTIONS
    return limit - min(max(limit // 8, _MIN_RESERVE), limit // 2)
