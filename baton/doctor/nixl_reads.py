"""`why_unreadable`: whether nixl can read the memory of another process of this machine.

Run as a module, it is that other process: it prints its transport's metadata
and lives until its standard input is closed.
"""

import subprocess
import sys
import threading
from contextlib import closing

from baton.common.module_process import module_command
from kvstore.peer.nixl.transport import NixlTransport
from kvstore.peer.transport import TransferError, UnreadablePeerError

__all__ = ["why_unreadable"]

_MARK = "metadata: "  # UCX may print lines of its own


def why_unreadable(timeout_s: float = 30.0) -> str:
    """Starts a process and reads some bytes of it; returns why that failed, "" if it did not.

    Raises:
        ConfigurationError: nixl is not installed, or does not start.
    """
    with closing(NixlTransport()) as transport:
        other = subprocess.Popen(
            module_command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        limit = threading.Timer(timeout_s, other.kill)  # ends the wait for its output
        limit.start()
        try:
            metadata = _read_metadata(other)
            if metadata is None:
                return "the other process did not start"
            transport.add_peer("self-test", metadata, timeout_s)
        except (UnreadablePeerError, TransferError) as error:
            return str(error)
        finally:
            limit.cancel()
            other.communicate()
    return ""


def _read_metadata(other: "subprocess.Popen[str]") -> bytes | None:
    assert other.stdout is not None
    for line in other.stdout:
        if line.startswith(_MARK):
            return bytes.fromhex(line.removeprefix(_MARK).strip())
    return None


def _serve() -> None:
    with closing(NixlTransport()) as transport:
        print(f"{_MARK}{transport.metadata().hex()}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
