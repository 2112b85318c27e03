"""Real proxies with the configurations of deploy/proxies, in front of one router."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rpc.probe import wait_until_serving
from tests.support.cluster import REPOSITORY
from tests.support.ports import reserved_port

__all__ = ["PROXIES", "require_proxy", "running_proxy"]

_CONFIGS = REPOSITORY / "deploy" / "proxies"
_INTEGRATIONS = REPOSITORY / ".venv-integrations" / "bin"
_START_TIMEOUT_S = 30
# The ports and hosts of the configurations.
_PORT = re.compile(r"\b(?:50050|50051|8000)\b")
_ROUTER = re.compile(r"router-[12](?=[:,])")


def _nginx(program: str, config: Path) -> list[str]:
    folder = config.parent
    return [program, "-p", str(folder), "-c", str(config), "-e", "stderr", "-g",
            f"daemon off; pid {folder}/nginx.pid;"]  # fmt: skip


def _haproxy(program: str, config: Path) -> list[str]:
    return [program, "-db", "-f", str(config)]


def _envoy(program: str, config: Path) -> list[str]:
    return [program, "-c", str(config), "--use-dynamic-base-id", "--concurrency", "1",
            "--log-level", "warning"]  # fmt: skip


# By name: the file of deploy/proxies, and the command that runs it.
_COMMANDS: dict[str, tuple[str, Callable[[str, Path], list[str]]]] = {
    "nginx": ("nginx.conf", _nginx),
    "haproxy": ("haproxy.cfg", _haproxy),
    "envoy": ("envoy.yaml", _envoy),
}
PROXIES = tuple(_COMMANDS)


def require_proxy(name: str) -> str:
    """Returns the path of a proxy's program; skips the test if it is not installed."""
    program = shutil.which(name) or shutil.which(name, path=str(_INTEGRATIONS))
    if program is None:
        pytest.skip(f"{name} is not installed")
    return program


@asynccontextmanager
async def running_proxy(
    name: str, folder: Path, grpc_address: str, http_port: str
) -> AsyncIterator[str]:
    """Runs a proxy as deploy/proxies configures it, on a free port; both routers are this one.

    Yields:
        The proxy's `host:port`.
    """
    program = require_proxy(name)
    file, command = _COMMANDS[name]
    host, _, port = grpc_address.partition(":")
    own_port = reserved_port()
    ports = {"50050": str(own_port), "50051": port, "8000": http_port}
    text = _PORT.sub(lambda match: ports[match[0]], (_CONFIGS / file).read_text())
    config = folder / file
    config.write_text(_ROUTER.sub(host, text))
    process = await asyncio.create_subprocess_exec(*command(program, config))
    try:
        address = f"127.0.0.1:{own_port}"
        await _until_serving(address, process)
        yield address
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_serving(address: str, process: asyncio.subprocess.Process) -> None:
    """Waits until the router answers through the proxy."""
    serving = asyncio.ensure_future(wait_until_serving(address, _START_TIMEOUT_S))
    ended = asyncio.ensure_future(process.wait())
    await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    assert process.returncode is None, "the proxy ended"
    await serving
