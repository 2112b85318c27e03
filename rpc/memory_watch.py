"""`MemoryWatch`: warns before the kernel kills this process for lack of memory.

The process itself can say nothing then, and the first process of a container has none above it in
there that could.
"""

import asyncio
import logging
from collections.abc import Callable

from baton.common.container_limits import MEMORY_REMEDY
from baton.common.machine_limits import kept_memory_share

__all__ = ["MemoryWatch"]

_LOGGER = logging.getLogger("baton.rpc")
_INTERVAL_S = 0.5
_WARNED_SHARE = 0.95
_CALM_SHARE = 0.85
"""Below this share another warning may follow."""


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
