"""Ends this process, with all stacks in its log, if its event loop does not run for long.

A thread that hangs with Python's global lock stops all others, so another process watches
(`rpc.watchdog_process`). A timer within this process would count the time in which it is paused.
"""

import asyncio
import ctypes
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

__all__ = ["end_on_signal", "ending_when_stuck"]

_LOGGER = logging.getLogger("baton.rpc")
_LIMIT_S = 60.0
_BEATS_PER_LIMIT = 10
_PROGRAM = Path(__file__).with_name("watchdog_process.py")


@asynccontextmanager
async def ending_when_stuck(limit_s: float = _LIMIT_S) -> AsyncIterator[None]:
    """Ends the process if the event loop does not run for long while the context is open.

    Args:
        limit_s: time in which this process ran, but not its event loop.
    """
    end_on_signal()
    beating = asyncio.create_task(_beat(limit_s))
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def end_on_signal() -> None:
    """Makes SIGUSR2 log all stacks and end the process.

    The handlers are not Python's: they also run while a thread holds the global lock. The signal's
    default would not end the first process of a container.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGUSR2, ctypes.cast(libc._exit, ctypes.c_void_p))
    faulthandler.register(signal.SIGUSR2, sys.stderr, all_threads=True, chain=True)


async def _beat(limit_s: float) -> None:
    """Runs the watchdog's process, and reports to it again and again that the event loop runs."""
    process: asyncio.subprocess.Process | None = None
    try:
        while True:
            try:
                if process is None or process.returncode is not None:
                    process = await _start(limit_s)
                assert process.stdin is not None
                process.stdin.write(b".")
            except OSError as error:
                _LOGGER.warning("no watchdog for hangs of the event loop: %s", error)
            await asyncio.sleep(limit_s / _BEATS_PER_LIMIT)
    finally:
        if process is not None and process.returncode is None:
            process.kill()  # it may be stopped by a signal, and would not see its input end
            await process.wait()


async def _start(limit_s: float) -> asyncio.subprocess.Process:
    """Starts the process.

    Raises:
        OSError: the machine cannot start it.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-IS",  # without the packages of the installation, which take time and memory
        str(_PROGRAM),
        str(os.getpid()),
        str(limit_s),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
