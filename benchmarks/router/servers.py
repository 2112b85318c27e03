"""Processes that the router's benchmarks start, and what they use: processor time and memory."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.common.errors import InternalError
from baton.common.model_files.named_models import demo_model_path
from baton.common.module_process import module_command
from rpc.probe import wait_until_serving

__all__ = [
    "CLIENT_TIMEOUT_S",
    "ServerProcess",
    "cpu_seconds",
    "memory_bytes",
    "run_client",
    "start_floor",
    "start_router",
    "start_workers",
]

CLIENT_TIMEOUT_S = 180.0
_START_TIMEOUT_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A process that serves.

    Attributes:
        pid: its id.
        ports: its ports by protocol: "grpc" or "http".
    """

    pid: int
    ports: dict[str, int]


def start_floor(kind: str, step_ms: float, folder: Path, processes: ExitStack) -> ServerProcess:
    """Starts a bare server that sends a constant message per stream and step.

    Args:
        kind: "grpc" or "http".
        step_ms: time between two messages.
        folder: for the port file.
        processes: ends the process.
    """
    port_file = folder / f"floor-{kind}"
    process = processes.enter_context(
        _running("benchmarks.router.floors", kind, str(step_ms), str(port_file))
    )
    (port,) = _read_ports(port_file, process)
    return ServerProcess(process.pid, {kind: port})


def start_workers(
    tier: str, num_workers: int, step_ms: float, folder: Path, processes: ExitStack
) -> list[str]:
    """Starts workers of a tier, without a model, in one process; returns their addresses.

    Args:
        tier: "prefill" or "decode".
        num_workers: how many.
        step_ms: time between two tokens of a request.
        folder: for the port file.
        processes: ends the process.
    """
    port_file = folder / f"{tier}-workers"
    process = processes.enter_context(
        _running(
            "benchmarks.router.scripted_worker",
            tier,
            str(step_ms),
            str(num_workers),
            str(port_file),
        )
    )
    return [f"127.0.0.1:{port}" for port in _read_ports(port_file, process)]


def start_router(
    folder: Path,
    processes: ExitStack,
    *,
    decode: Sequence[str],
    prefill: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> ServerProcess:
    """Starts a router over workers, and waits until it serves.

    Args:
        folder: for the port files.
        processes: ends the process.
        decode: addresses of decode workers.
        prefill: addresses of prefill workers.
        flags: further flags of `baton router`.
    """
    files = {"grpc": folder / "grpc", "http": folder / "http"}
    targets = [item for address in decode for item in ("--decode", address)]
    targets += [item for address in prefill for item in ("--prefill", address)]
    process = processes.enter_context(
        _running(
            "baton.cli.router",
            *("--model", str(demo_model_path()), *targets, "--log-level", "error"),
            *("--grpc-port", "0", "--grpc-port-file", str(files["grpc"])),
            *("--port", "0", "--port-file", str(files["http"])),
            *flags,
        )
    )
    ports = {kind: _read_ports(path, process)[0] for kind, path in files.items()}
    asyncio.run(wait_until_serving(f"127.0.0.1:{ports['grpc']}", _START_TIMEOUT_S))
    return ServerProcess(process.pid, ports)


def run_client(module: str, *arguments: object) -> bytes:
    """Runs a client in a process of its own; returns what it prints."""
    command = module_command(f"benchmarks.router.{module}", *map(str, arguments))
    return subprocess.run(
        command, check=True, timeout=CLIENT_TIMEOUT_S, stdout=subprocess.PIPE
    ).stdout


def cpu_seconds(pid: int) -> float:
    """Returns the processor time that a process and those that it has started have used."""
    folder = Path(f"/proc/{pid}")
    times = (folder / "stat").read_text().rpartition(")")[2].split()
    children = (folder / "task" / str(pid) / "children").read_text().split()
    own_s = (int(times[11]) + int(times[12])) / _TICKS_PER_S
    return own_s + sum(cpu_seconds(int(child)) for child in children)


def memory_bytes(pid: int, *, peak: bool = False) -> int:
    """Returns the resident memory of a process, now or at its largest."""
    field = "VmHWM:" if peak else "VmRSS:"
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise InternalError(f"process {pid} has no {field}")


@contextmanager
def _running(module: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(module_command(module, *arguments))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _read_ports(path: Path, process: "subprocess.Popen[bytes]") -> list[int]:
    """Waits until a server has written its ports."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise InternalError(f"a server did not start; its status is {process.returncode}")
        time.sleep(0.02)
    return [int(port) for port in path.read_text().split()]
