"""Real proxies with the configurations of deploy/proxies, in front of one router."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rpc.probe import wait_until_serving
from tests.support.cluster import REPOSITORY
from tests.support.ports import reserved_port, reserved_ports

__all__ = ["PROXIES", "require_proxy", "running_picking_envoy", "running_proxy"]

_CONFIGS = REPOSITORY / "deploy" / "proxies"
_INTEGRATIONS = REPOSITORY / ".venv-integrations" / "bin"
_START_TIMEOUT_S = 90
_SUBSET = "x-gateway-destination-endpoint-subset"
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


@asynccontextmanager
async def running_picking_envoy(
    folder: Path,
    picker: tuple[str, int],
    last_resort: tuple[str, int],
    *,
    response_body_mode: str = "NONE",
) -> AsyncIterator[tuple[str, str]]:
    """Runs Envoy as deploy/proxies/endpoint-picker.yaml configures it, on free ports.

    A request's header `x-test-subset` becomes the hint which servers may be chosen, as gateways
    give it.

    Args:
        folder: gets the configuration.
        picker: host and port of the picker.
        last_resort: host and port of the HTTP server for requests while no picker answers.
        response_body_mode: how the picker gets answers' bodies; gateways send them in the mode
            FULL_DUPLEX_STREAMED.

    Yields:
        Envoy's URL, and that of its admin interface.
    """
    program = require_proxy("envoy")
    own_port, admin_port = reserved_ports(2)
    config = yaml.safe_load((_CONFIGS / "endpoint-picker.yaml").read_text())
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": own_port}
    admin = {"address": "127.0.0.1", "port_value": admin_port}
    config["admin"] = {"address": {"socket_address": admin}}
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    mode = filters[0]["typed_config"]["processing_mode"]
    assert mode["response_body_mode"] == "NONE"
    if response_body_mode != "NONE":
        mode |= {"response_body_mode": response_body_mode, "response_trailer_mode": "SEND"}
    filters.insert(0, _subset_filter())
    places = {"routers": last_resort, "picker": picker}
    for cluster in config["static_resources"]["clusters"]:
        # A busy process of tests, which has the picker too, may answer a check late.
        for check in cluster.get("health_checks", ()):
            check["timeout"] = "30s"
        if cluster["name"] in places:
            host, port = places[cluster["name"]]
            (place,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
            address = {"address": host, "port_value": port}
            place["endpoint"]["address"]["socket_address"] = address
    path = folder / "endpoint-picker.yaml"
    path.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(*_envoy(program, path))
    try:
        await _until_listening(own_port, process)
        yield f"http://127.0.0.1:{own_port}", f"http://127.0.0.1:{admin_port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _subset_filter() -> dict[str, Any]:
    """Returns the filter that makes a header to metadata."""
    present = {"metadata_namespace": "envoy.lb.subset_hint", "key": _SUBSET}
    kind = "envoy.extensions.filters.http.header_to_metadata.v3.Config"
    return {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {
            "@type": f"type.googleapis.com/{kind}",
            "request_rules": [{"header": "x-test-subset", "on_header_present": present}],
        },
    }


async def _until_listening(port: int, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(_START_TIMEOUT_S):
        while True:
            assert process.returncode is None, "the proxy ended"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


async def _until_serving(address: str, process: asyncio.subprocess.Process) -> None:
    """Waits until the router answers through the proxy."""
    serving = asyncio.ensure_future(wait_until_serving(address, _START_TIMEOUT_S))
    ended = asyncio.ensure_future(process.wait())
    await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    assert process.returncode is None, "the proxy ended"
    await serving
