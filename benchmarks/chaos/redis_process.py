"""`python -m benchmarks.chaos.redis_process PORT FOLDER`: becomes a Redis server."""

import os
import sys

from baton.common.errors import ConfigurationError

_COMMAND = "redis-server"


def main(port: str, folder: str) -> None:
    """Replaces this process by a Redis server that saves nothing on disk.

    Raises:
        ConfigurationError: the server is not on PATH.
    """
    flags = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    try:
        os.execvp(_COMMAND, [_COMMAND, *flags, "--loglevel", "warning"])  # noqa: S606 - no shell
    except FileNotFoundError:
        raise ConfigurationError(f"{_COMMAND} is not on PATH") from None


if __name__ == "__main__":
    main(*sys.argv[1:])
