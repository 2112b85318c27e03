"""The edge of a server process: logging, the event loop, exit codes."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from baton.errors import ConfigurationError
from rpc.server import StartInterruptedError

__all__ = ["EXIT_CONFIGURATION", "run_process"]

EXIT_CONFIGURATION = 2

_LOGGER = logging.getLogger("baton.rpc")


def run_process(name: str, log_level: str, start: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Runs a server's coroutine to its end and returns the process's exit code.

    A `ConfigurationError`, of `start` itself or of its coroutine, becomes one
    readable line on stderr and exit code 2. A signal while the service starts
    ends the process here, with exit code 0.

    Args:
        name: what to call the process in that line, say "baton prefill".
        log_level: debug, info, warning or error; logs go to stderr.
        start: reads the flags and returns the coroutine to run.
    """
    logging.basicConfig(
        level=log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        asyncio.run(_run(start()))
    except ConfigurationError as error:
        sys.stderr.write(f"{name}: error: {error.message}\n")
        return EXIT_CONFIGURATION
    return 0


async def _run(server: Coroutine[Any, Any, None]) -> None:
    try:
        await server
    except StartInterruptedError:
        _LOGGER.info("stopped while starting")
        # Nothing can interrupt a thread that downloads or reads a model, and both
        # asyncio and the interpreter wait for theirs. Nobody has been served yet.
        os._exit(0)
