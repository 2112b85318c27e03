"""A cluster of real processes on a tiny checkpoint: routers, prefill, decode."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import Request, urlopen

import grpc

from baton.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.probe import wait_until_serving
from tests.support.ports import reserved_port

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
_TOKEN = "the-token-of-clusters-in-tests"
WORKER_CALL = (("authorization", f"Bearer {_TOKEN}"),)
"""Metadata of calls of a test to a worker."""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "default",
    "BATON_CLUSTER_TOKEN": _TOKEN,
}
WORKER_MODULES = {"prefill": "worker.prefill", "decode": "worker.decode"}


async def read_metrics(server: "ServerProcess") -> str:
    """Reads the metrics of a process with `--metrics-port`."""
    *_, url = re.findall(r"serving metrics url=(\S+)", server.log())
    request = Request(url, headers=dict(WORKER_CALL))
    return await asyncio.to_thread(lambda: urlopen(request, timeout=30).read().decode())


@dataclass(frozen=True)
class Place:
    """The network namespace, address and environment of a process.

    Attributes:
        host: address that it listens on.
        prefix: start of its command line, for example a command that enters a network namespace.
        environment: further environment variables.
    """

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


HERE = Place()


class ServerProcess:
    """One server; keeps its port over restarts.

    Attributes:
        address: `host:port`.
        flags: flags of its command line; changes apply from the next start on.
        process: the running process.
    """

    def __init__(
        self, module: str, folder: Path, name: str, flags: Sequence[str], place: Place = HERE
    ) -> None:
        self._module, self._name, self._folder, self._place = module, name, folder, place
        self.flags = list(flags)
        self._port = reserved_port()
        self._log_path = folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        port_file = self._folder / f"{self._name}.port"
        port_file.unlink(missing_ok=True)
        http = ["--port=none"] if self._module == "router" else []
        command = [*self._place.prefix, sys.executable, "-m", self._module, *http, *self.flags]
        # Clients of tests call a router by gRPC, unless a flag turns HTTP on.
        prefix = "grpc-" if self._module == "router" else ""
        command += [f"--host={self._place.host}", f"--{prefix}port={self._port}"]
        command += [f"--{prefix}port-file={port_file}"]
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT, **self._place.environment},
            )
        self._port_file = port_file

    async def wait_listening(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self._name} did not start:\n{self.log()}")
            await asyncio.sleep(0.02)

    async def wait_serving(self) -> None:
        await self.wait_listening()
        await wait_until_serving(self.address, START_TIMEOUT_S)

    @property
    def address(self) -> str:
        return f"{self._place.host}:{self._port}"

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Stops the process with SIGSTOP: it keeps its connections and does nothing."""
        self.process.send_signal(signal.SIGSTOP)

    async def restart(self) -> None:
        """Starts the ended process again at its address; waits until it serves."""
        self.start()
        await self.wait_serving()

    def stop(self) -> int:
        """Ends the process with SIGTERM; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


class Cluster:
    """A router with prefill and decode replicas.

    Attributes:
        http_url: of the router's HTTP server; empty if it has none.
    """

    http_url = ""

    def __init__(
        self, router: ServerProcess, prefill: list[ServerProcess], decode: list[ServerProcess]
    ) -> None:
        self.router, self.prefill, self.decode = router, prefill, decode

    @property
    def workers(self) -> list[ServerProcess]:
        return [*self.prefill, *self.decode]

    async def wait_known(self) -> None:
        """Waits until the router uses or has refused every worker. It serves earlier: one decode
        worker suffices.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while unknown := {worker.address for worker in self.workers} - await self._known():
            assert time.monotonic() < deadline, f"the router does not use {unknown}"
            await asyncio.sleep(0.02)

    async def _known(self) -> set[str]:
        async with grpc.aio.insecure_channel(self.router.address) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            request = cluster_pb2.GetClusterRequest()
            state = await stub.GetCluster(request, timeout=60, metadata=WORKER_CALL)
        ready = cluster_pb2.REPLICA_STATE_READY
        others = re.findall(r"replica (\S+) (?:REFUSED|is a replica set)", self.router.log())
        return {*others, *(each.address for each in state.replicas if each.state == ready)}

    async def wait_pools_full(self, timeout_s: float = 60.0) -> None:
        """Waits until no running worker holds a block or a request."""
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


async def get_load(
    address: str, metadata: Sequence[tuple[str, str]] = WORKER_CALL
) -> worker_pb2.WorkerLoad:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        request = worker_pb2.GetLoadRequest()
        return (await stub.GetLoad(request, timeout=60, metadata=metadata)).load


@asynccontextmanager
async def running_cluster(
    folder: Path,
    *,
    model: Path | str,
    kv_connector: str,
    num_prefill: int = 1,
    num_decode: int = 1,
    worker_flags: Sequence[str] = (),
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
    router_flags: Sequence[str] = ("--max-local-prefill-tokens=0",),
    places: Mapping[str, Place] | None = None,
    http: bool = False,
) -> AsyncIterator[Cluster]:
    """Starts the processes, waits until all serve and the router knows them, and kills them at the
    end.

    Flags of a tier override those of all workers. `places` are by tier. With `http`, the router
    has an HTTP server.
    """
    http_port_file = folder / "http.port"
    if http:
        router_flags = [*router_flags, "--port=0", f"--port-file={http_port_file}"]
    own_flags = {"prefill": prefill_flags, "decode": decode_flags}
    places = places or {}
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
                ServerProcess(
                    WORKER_MODULES[tier],
                    folder,
                    f"{tier}{index}",
                    [*flags, *own_flags[tier]],
                    places.get(tier, HERE),
                )
                for index in range(count)
            ]
            servers += tiers[tier]
        await asyncio.gather(*(server.wait_serving() for server in servers))
        router = ServerProcess(
            "router", folder, "router", _router_flags(model, tiers, router_flags)
        )
        servers.append(router)
        await router.wait_serving()
        cluster = Cluster(router, tiers["prefill"], tiers["decode"])
        await cluster.wait_known()
        if http:
            cluster.http_url = f"http://127.0.0.1:{http_port_file.read_text().strip()}"
        yield cluster
    except BaseException:
        for server in servers:
            sys.stderr.write(f"--- {server.log()}\n")
        raise
    finally:
        for server in servers:
            server.kill()


def _router_flags(
    model: Path | str, tiers: dict[str, list[ServerProcess]], flags: Sequence[str]
) -> list[str]:
    targets = [f"--{tier}={s.address}" for tier, servers in tiers.items() for s in servers]
    return [f"--model={model}", "--served-model-name=tiny", *targets, *flags]
