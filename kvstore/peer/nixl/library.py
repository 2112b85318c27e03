"""Imports the `nixl` package and makes agents with Baton's settings.

docs/adr/0020-nixl-transport.md says why these settings. An operator's own
UCX_* and NIXL_* variables win.
"""

import logging
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from baton.common.errors import ConfigurationError

__all__ = ["LATE_WRITES_S", "load_nixl", "new_agent"]

LATE_WRITES_S = 120.0
"""Seconds after which a read that could not be stopped writes nothing any more.

A call of nixl that hangs, or a GPU that copies, may go on when its link is closed. Linux tries for
some 100 seconds to deliver what a closed connection still holds.
"""

# Both builds reach GPUs by the CUDA driver alone, and work without one.
_MODULES = ("nixl_cu12", "nixl_cu13")
# If UCX cannot read memory directly, it would have the remote's CPU send the bytes: a reader that
# dies then crashes the remote process.
_UCX = "PROTO_EMULATION_ENABLE=n"
_LOG_LEVELS = {"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}

_INFINIBAND = Path("/sys/class/infiniband")
# Names that Docker, Podman, Kubernetes' networks and libvirt give to a host's ends of containers'
# and machines' networks.
_OF_CONTAINERS = re.compile(
    r"(docker|podman|cni|cali|lxc|lxd|veth|virbr|vnet)[-\w]*|br-[0-9a-f]{12}"
)
# Pause of the home agent's thread, by which a remote may wait longer to connect.
_REST_US = 500

_creating = threading.Lock()


def load_nixl() -> ModuleType:
    """Imports and returns the package.

    UCX will use the network devices that are there now, except those of containers.

    Raises:
        ConfigurationError: it is not installed, or cannot be loaded.
    """
    for name, level in _LOG_LEVELS.items():
        os.environ.setdefault(name, level)  # the libraries read them as they are loaded
    os.environ.setdefault("UCX_NET_DEVICES", _lasting_devices())
    raises_in_logging = logging.raiseExceptions
    try:
        return _import_first()
    finally:
        logging.raiseExceptions = raises_in_logging
        _send_logs_to_root()


def new_agent(
    nixl: ModuleType, name: str, *, with_thread: bool, timeout_s: float | None = None
) -> Any:
    """Returns a new agent with the UCX backend.

    That takes some tenths of a second; a process makes one agent at a time.

    Args:
        nixl: the package.
        name: unique among all agents of all processes.
        with_thread: whether a thread of its own answers remotes.
        timeout_s: longest wait for other agents that are being made; None for no limit.

    Raises:
        ConfigurationError: UCX finds no transport that it may use.
        TimeoutError: other agents took the time.
    """
    config = nixl.nixl_agent_config(enable_prog_thread=with_thread, backends=[])
    if not _creating.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
        raise TimeoutError("other connections that are being made took the time")
    try:
        with _resting_threads(nixl):
            agent = nixl.nixl_agent(name, config)
        try:
            agent.create_backend("UCX", {"engine_config": _UCX})
        except Exception as error:  # nixl's errors have no base of their own
            raise ConfigurationError(
                f"nixl: UCX does not start ({error}); {_ucx_advice()}"
            ) from error
    finally:
        _creating.release()
    return agent


def _ucx_advice() -> str:
    """Returns which environment variables may keep UCX from finding a transport."""
    devices = os.environ.get("UCX_NET_DEVICES", "")
    names = [part.strip().removeprefix("^").partition(":")[0] for part in devices.split(",")]
    known = {name for _, name in socket.if_nameindex()}
    known.update(path.name for path in _INFINIBAND.glob("*"))
    for name in names:
        if name and name != "all" and "*" not in name and name not in known:
            return f"UCX_NET_DEVICES is {devices!r}, but this machine has no device {name!r}"
    return "see UCX_TLS and UCX_NET_DEVICES"


def _lasting_devices() -> str:
    """Returns the network devices that UCX may use, separated by commas.

    UCX opens all that there are. If one goes while it connects, as those of containers do, it
    cannot connect.
    """
    devices = [name for _, name in socket.if_nameindex() if not _OF_CONTAINERS.fullmatch(name)]
    ports = [f"{port.parts[-3]}:{port.name}" for port in _INFINIBAND.glob("*/ports/*")]
    return ",".join([*devices, *ports])


@contextmanager
def _resting_threads(nixl: ModuleType) -> Iterator[None]:
    """Gives the threads of agents that are made meanwhile a pause between two polls.

    nixl's own Python API sets none: each thread would take a whole core.
    """
    bindings = import_module(nixl.nixl_agent.__module__).nixlBind
    config_type = bindings.nixlAgentConfig

    class RestingConfig(config_type):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _REST_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = RestingConfig
    try:
        yield
    finally:
        bindings.nixlAgentConfig = config_type


def _import_first() -> ModuleType:
    problems = []
    for name in _MODULES:
        try:
            return import_module(name)
        except ImportError as error:
            problems.append(str(error))
    raise ConfigurationError(
        f'nixl:// needs a package: pip install "baton-llm[nixl]" ({"; ".join(problems)})'
    )


def _send_logs_to_root() -> None:
    """Removes the handler by which nixl logs to the standard output."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
