"""`baton bench router`: requests and streamed tokens of a router, beside bare servers."""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.common.errors import InternalError
from baton.common.model_files.named_models import demo_model_path
from benchmarks.output import add_output_args, check_output_args, report_of_run, write_report
from benchmarks.report import Report, Table
from benchmarks.workloads.kind import refuse_below
from rpc.probe import wait_until_serving

__all__ = ["add_args", "main"]

_START_TIMEOUT_S = 60.0
_CLIENT_TIMEOUT_S = 180.0
_NUM_PROBES = 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _RouterLoad:
    """Streams that start together, each `num_rounds` times: how many, of how many tokens, one
    per `step_ms`.
    """

    name: str
    num_streams: int
    num_rounds: int
    num_tokens: int
    step_ms: float


_LOADS = (
    _RouterLoad("steady", 64, 1, 200, 50.0),
    _RouterLoad("crowded", 400, 1, 100, 50.0),
    _RouterLoad("flooded", 800, 1, 150, 50.0),
    _RouterLoad("requests", 32, 40, 1, 5.0),
)
_SMOKE_LOADS = (_RouterLoad("smoke", 4, 2, 5, 5.0),)


@dataclass(frozen=True, slots=True)
class _Row:
    """Figures of one server under one load.

    Attributes:
        server: "grpc" or "http", of a router or of a bare server.
        load: the load's name.
        tokens_per_s: streamed tokens per second.
        tokens_per_message: how many tokens a message had.
        cpu_us_per_token: processor time of the server's process per token.
        tokens_per_cpu_s: its inverse: what one core could stream at this load.
        first_token_ms: median time to the first token of requests beside the streams.
    """

    server: str
    load: str
    tokens_per_s: float
    tokens_per_message: float
    cpu_us_per_token: float
    tokens_per_cpu_s: float
    first_token_ms: float


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--smoke", action="store_true", help="run everything once, tiny; its figures mean nothing"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes of the router (default: %(default)s)",
    )
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Measures what a router costs, over gRPC and HTTP, beside a bare grpc.aio server and a
    bare uvicorn server that stream the same number of constant messages. The router's worker has
    no model: it sends a token per stream and step.
    """
    check_output_args(args)
    refuse_below(1, processes=args.processes)
    loads = _SMOKE_LOADS if args.smoke else _LOADS
    rows = [_measure(load, args.processes) for load in loads]
    write_report(_report(args, [row for load_rows in rows for row in load_rows]), args)
    return 0


def _measure(load: _RouterLoad, num_processes: int) -> list[_Row]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        servers = _start_servers(load, num_processes, Path(folder), processes)
        return [
            _run_client(name, kind, process, port, load) for name, kind, process, port in servers
        ]


_Server = tuple[str, str, "subprocess.Popen[bytes]", int]
"""Its name, its protocol, its process and its port."""


def _start_servers(
    load: _RouterLoad, num_processes: int, folder: Path, processes: ExitStack
) -> list[_Server]:
    """Starts the bare servers and a router over a scripted worker."""
    step = str(load.step_ms)
    servers: list[_Server] = []
    for kind in ("grpc", "http"):
        port_file = folder / f"floor-{kind}"
        module = ("benchmarks.router.floors", kind, step, str(port_file))
        process = processes.enter_context(_running(*module))
        servers.append((f"bare {kind}", kind, process, _port_of(port_file, process)))
    worker_file = folder / "worker"
    worker = processes.enter_context(
        _running("benchmarks.router.scripted_worker", step, str(worker_file))
    )
    address = f"127.0.0.1:{_port_of(worker_file, worker)}"
    files = {"grpc": folder / "grpc", "http": folder / "http"}
    router = processes.enter_context(
        _running(
            "baton.cli.router",
            *("--processes", str(num_processes)),
            *("--model", str(demo_model_path()), "--decode", address, "--log-level", "error"),
            *("--grpc-port", "0", "--grpc-port-file", str(files["grpc"])),
            *("--port", "0", "--port-file", str(files["http"])),
            *("--max-local-prefill-tokens", "1000000"),
        )
    )
    ports = {kind: _port_of(path, router) for kind, path in files.items()}
    asyncio.run(wait_until_serving(f"127.0.0.1:{ports['grpc']}", _START_TIMEOUT_S))
    return [*servers, *((f"router {kind}", kind, router, ports[kind]) for kind in ports)]


@contextmanager
def _running(module: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-P", "-m", module, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _port_of(path: Path, process: "subprocess.Popen[bytes]") -> int:
    """Waits until a server has written its port."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise InternalError(f"a server did not start; its status is {process.returncode}")
        time.sleep(0.02)
    return int(path.read_text())


def _run_client(
    name: str, kind: str, process: "subprocess.Popen[bytes]", port: int, load: _RouterLoad
) -> _Row:
    command = [sys.executable, "-P", "-m", "benchmarks.router.client", kind, str(port)]
    command += map(str, (load.num_streams, load.num_rounds, load.num_tokens, _NUM_PROBES))
    before_s = _cpu_seconds(process.pid)
    output = subprocess.run(command, check=True, timeout=_CLIENT_TIMEOUT_S, stdout=subprocess.PIPE)
    cpu_s = _cpu_seconds(process.pid) - before_s
    found = json.loads(output.stdout)
    sys.stderr.write(f"{name}: {load.name}\n")
    num_tokens = load.num_streams * load.num_rounds * load.num_tokens
    return _Row(
        server=name,
        load=load.name,
        tokens_per_s=num_tokens / found["seconds"],
        tokens_per_message=num_tokens / found["num_messages"],
        cpu_us_per_token=1e6 * cpu_s / num_tokens,
        tokens_per_cpu_s=num_tokens / cpu_s,
        first_token_ms=statistics.median(found["first_token_ms"]),
    )


def _cpu_seconds(pid: int) -> float:
    """The processor time that a process and those that it has started have used."""
    folder = Path(f"/proc/{pid}")
    times = (folder / "stat").read_text().rpartition(")")[2].split()
    children = (folder / "task" / str(pid) / "children").read_text().split()
    own_s = (int(times[11]) + int(times[12])) / _TICKS_PER_S
    return own_s + sum(_cpu_seconds(int(child)) for child in children)


def _report(args: argparse.Namespace, rows: Sequence[_Row]) -> Report:
    columns = (
        *("server", "load", "tokens/s", "tokens per message", "CPU us per token"),
        *("tokens per CPU second", "first token beside it, ms"),
    )
    table = Table(
        title=f"A router of --processes {args.processes}, and bare servers that send one message "
        "per token",
        columns=columns,
        rows=[list(asdict(row).values()) for row in rows],
        note="The load 'requests' has one token per request: its rows count requests.",
    )
    loads: list[dict[str, Any]] = [asdict(load) for load in _LOADS]
    title = "Router" + (", smoke test: no figures" if args.smoke else "")
    return report_of_run(args, title, [table], loads=loads, rows=[asdict(row) for row in rows])
