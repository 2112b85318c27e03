"""`write_port_file`: the port on which a server listens, for other processes."""

import os
from pathlib import Path

from baton.common.errors import ConfigurationError

__all__ = ["write_port_file"]


def write_port_file(path: Path, port: int) -> None:
    """Writes a server's port, in one piece: no reader sees half a number.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(f"{port}\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigurationError(f"cannot write --port-file {path}: {error.strerror}") from None
