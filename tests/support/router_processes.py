"""A router of two processes over a worker without a model, as processes of their own."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil

from baton.common.model_files.named_models import demo_model_path
from baton.v1 import cluster_pb2_grpc, router_process_pb2, router_process_pb2_grpc
from rpc.channels import open_blocking_channel
from worker.processes.run_folder import SHARED_MEMORY

__all__ = ["RouterOfProcesses", "running_router_processes", "until"]

_TIMEOUT_S = 60.0


def until(condition: Any, timeout_s: float = _TIMEOUT_S) -> Any:
    """Returns a condition's first value that is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it has not come true in time"
        time.sleep(0.02)
    return value


class RouterOfProcesses:
    """A running router.

    Attributes:
        process: the parent.
        http: `host:port` of its HTTP server.
        grpc: `host:port` of its gRPC server.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", http: int, grpc_port: int) -> None:
        self.process = process
        self.http, self.grpc = f"127.0.0.1:{http}", f"127.0.0.1:{grpc_port}"

    @property
    def children(self) -> list[psutil.Process]:
        """The processes that serve, by their numbers."""
        return sorted(psutil.Process(self.process.pid).children(), key=_number_of)

    def num_ended(self) -> dict[int, int]:
        """How many requests have ended in each process that answers."""
        (folder,) = SHARED_MEMORY.glob(f"baton-up-{self.process.pid}-*")
        ended = {}
        for number in range(2):
            with open_blocking_channel(f"unix:{folder}/{number}.sock") as channel:
                stub = router_process_pb2_grpc.RouterProcessServiceStub(channel)
                try:
                    answer = stub.GetProcess(router_process_pb2.GetProcessRequest(), timeout=10)
                except grpc.RpcError:
                    continue
                ended[number] = sum(answer.cluster.activity.finished.values())
        return ended

    @contextlib.contextmanager
    def operators(self) -> Iterator[cluster_pb2_grpc.ClusterServiceStub]:
        """A new connection to the service for operators."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        with open_blocking_channel(self.grpc, options=options) as channel:
            yield cluster_pb2_grpc.ClusterServiceStub(channel)


def _number_of(process: psutil.Process) -> str:
    return process.environ()["_BATON_ROUTER_PROCESS"]


@contextlib.contextmanager
def running_router_processes(
    folder: Path, *flags: str, token: str, step_ms: int = 5
) -> Iterator[RouterOfProcesses]:
    """Runs a router of two processes on free ports; both listen.

    Args:
        folder: gets files.
        flags: of the router.
        token: of its cluster.
        step_ms: time between two tokens of a stream.
    """
    worker_file = folder / "worker"
    worker = [sys.executable, "-P", "-m", "benchmarks.router.scripted_worker"]
    worker += ["decode", str(step_ms), "1", str(worker_file)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_running(worker))
        address = f"127.0.0.1:{until(lambda: _port_in(worker_file))}"
        files = folder / "http", folder / "grpc"
        command = [sys.executable, "-P", "-m", "baton.cli.router", "--processes", "2"]
        command += ["--model", str(demo_model_path()), "--decode", address]
        command += ["--max-local-prefill-tokens", "1000000", "--log-level", "warning"]
        command += ["--port", "0", "--port-file", str(files[0])]
        command += ["--grpc-port", "0", "--grpc-port-file", str(files[1]), *flags]
        process = stack.enter_context(_running(command, BATON_CLUSTER_TOKEN=token))
        http, grpc_port = (int(until(lambda file=file: _port_in(file))) for file in files)
        yield RouterOfProcesses(process, http, grpc_port)


def _port_in(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def _running(command: list[str], **variables: str) -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)
