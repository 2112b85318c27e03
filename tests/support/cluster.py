"""A cluster of real processes on a tiny checkpoint: routers, prefill, decode."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from baton.health import wait_until_serving
from baton.v1 import worker_pb2, worker_pb2_grpc

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
WORKER_MODULES = {"prefill": "prefill_service", "decode": "decode_service"}


class ServerProcess:
    """One server; keeps its port over restarts.

    Attributes:
        address: `127.0.0.1:port`.
        process: the running process.
    """

    def __init__(self, module: str, folder: Path, name: str, flags: Sequence[str]) -> None:
        self._module, self._name, self._folder, self._flags = module, name, folder, list(flags)
        self._port = 0
        self._log_path = folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        port_file = self._folder / f"{self._name}.port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", self._module, *self._flags]
        command += [f"--port={self._port}", f"--port-file={port_file}"]
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
            )
        self._port_file = port_file

    async def wait_listening(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self._name} did not start:\n{self.log()}")
            await asyncio.sleep(0.02)
        self._port = int(self._port_file.read_text())

    async def wait_serving(self) -> None:
        await self.wait_listening()
        await wait_until_serving(self.address, START_TIMEOUT_S)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ends the process in good order; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


class Cluster:
    """A router before some prefill and decode replicas."""

    def __init__(
        self, router: ServerProcess, prefill: list[ServerProcess], decode: list[ServerProcess]
    ) -> None:
        self.router, self.prefill, self.decode = router, prefill, decode

    @property
    def workers(self) -> list[ServerProcess]:
        return [*self.prefill, *self.decode]

    async def wait_pools_full(self, timeout_s: float = 20.0) -> None:
        """Waits until no worker that lives holds a block or a request."""
        alive = [worker for worker in self.workers if worker.process.poll() is None]
        deadline = time.monotonic() + timeout_s
        while True:
            loads = [await get_load(worker.address) for worker in alive]
            if all(
                load.num_free_blocks == load.num_blocks
                and load.num_running == load.num_waiting == 0
                for load in loads
            ):
                return
            assert time.monotonic() < deadline, f"blocks leaked: {loads}"
            await asyncio.sleep(0.05)


async def get_load(address: str) -> worker_pb2.WorkerLoad:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return (await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=10)).load


@asynccontextmanager
async def running_cluster(
    folder: Path,
    *,
    model: Path,
    kv_connector: str,
    num_prefill: int = 1,
    num_decode: int = 1,
    worker_flags: Sequence[str] = (),
    router_flags: Sequence[str] = ("--max-local-prefill-tokens=0",),
) -> AsyncIterator[Cluster]:
    """Starts the processes, waits until all serve, and ends them in the end."""
    flags = [
        f"--model={model}",
        "--served-model-name=tiny",
        f"--kv-connector={kv_connector}",
        "--dtype=float32",
        "--num-threads=1",
        "--max-model-len=512",
        "--num-gpu-blocks-override=512",
        *worker_flags,
    ]
    tiers: dict[str, list[ServerProcess]] = {}
    servers: list[ServerProcess] = []
    try:
        for tier, count in (("prefill", num_prefill), ("decode", num_decode)):
            tiers[tier] = [
                ServerProcess(WORKER_MODULES[tier], folder, f"{tier}{index}", flags)
                for index in range(count)
            ]
            servers += tiers[tier]
        await asyncio.gather(*(server.wait_serving() for server in servers))
        router = ServerProcess(
            "router", folder, "router", _router_flags(model, tiers, router_flags)
        )
        servers.append(router)
        await router.wait_serving()
        yield Cluster(router, tiers["prefill"], tiers["decode"])
    except BaseException:
        for server in servers:
            sys.stderr.write(f"--- {server.log()}\n")
        raise
    finally:
        for server in servers:
            server.kill()


def _router_flags(
    model: Path, tiers: dict[str, list[ServerProcess]], flags: Sequence[str]
) -> list[str]:
    targets = [f"--{tier}={s.address}" for tier, servers in tiers.items() for s in servers]
    return [f"--model={model}", "--served-model-name=tiny", *targets, *flags]
