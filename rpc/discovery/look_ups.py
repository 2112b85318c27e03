"""`LookUps`: asks for addresses of names and files, off the event loop."""

import asyncio
import threading
from collections.abc import Sequence

from baton.common.errors import ConfigurationError
from rpc.discovery.source import LookedUpSource

__all__ = ["LookUps"]

_TIMEOUT_S = 5.0


class LookUps:
    """Looks addresses up in a daemon thread, one source at a time: a look-up cannot be
    interrupted, and one that hangs must block neither the event loop's threads nor the end of the
    process.

    Args:
        sources: get their addresses from the thread.
    """

    def __init__(self, sources: Sequence[LookedUpSource]) -> None:
        self._sources = sources
        self._current: LookedUpSource | None = None
        self._is_idle = asyncio.Event()  # no look-up is running
        self._is_idle.set()

    async def run_once(self) -> None:
        """Starts a look-up of all sources unless one runs; waits for it, up to a time limit."""
        if not self._sources:
            return
        if self._is_idle.is_set():
            loop = asyncio.get_running_loop()
            thread = threading.Thread(
                target=self._look_up_all, args=(loop,), name="baton-dns", daemon=True
            )
            thread.start()  # raises if the container has no task left
            self._is_idle.clear()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._is_idle.wait()
        except TimeoutError:
            if self._current is not None:
                self._current.problems.report(f"no answer within {_TIMEOUT_S:g} s")

    def _look_up_all(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs on the thread; passes each result to the event loop as it comes."""
        try:
            for source in self._sources:
                self._current = source
                try:
                    addresses = source.look_up()
                except (OSError, ValueError, ConfigurationError) as error:
                    loop.call_soon_threadsafe(source.problems.report, _reason(error))
                else:
                    loop.call_soon_threadsafe(source.note, addresses)
            loop.call_soon_threadsafe(self._is_idle.set)
        except RuntimeError:
            pass  # the event loop was closed meanwhile


def _reason(error: OSError | ValueError | ConfigurationError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
