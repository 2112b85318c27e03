"""The edge of a server process: logging, the event loop, exit codes."""

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from baton.errors import ConfigurationError

__all__ = ["EXIT_CONFIGURATION", "run_process"]

EXIT_CONFIGURATION = 2


def run_process(name: str, log_level: str, start: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Runs a server's coroutine to its end and returns the process's exit code.

    A `ConfigurationError`, of `start` itself or of its coroutine, becomes one
    readable line on stderr and exit code 2.

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
        asyncio.run(start())
    except ConfigurationError as error:
        sys.stderr.write(f"{name}: error: {error.message}\n")
        return EXIT_CONFIGURATION
    return 0
