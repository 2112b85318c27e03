"""A cluster of supervised processes with several routers, which can be killed and frozen."""

import asyncio
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import (
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from baton.common.errors import UnavailableError
from baton.up.cluster import start_server, start_workers, stop_in_order
from baton.up.plan import ClusterConfig, Server, plan_cluster
from baton.v1 import worker_pb2, worker_pb2_grpc
from benchmarks.chaos.requests import Event
from benchmarks.output import write_line
from engine.config import EngineConfig
from router.processes.place import ProcessPlace
from rpc.channels import open_channel
from rpc.probe import wait_until_serving
from rpc.server_config import MetricsConfig
from worker.processes.ports import free_port
from worker.processes.run_folder import SHARED_MEMORY, embedded_store, run_folder, sharing_machine
from worker.processes.spawn import ProcessSpec
from worker.processes.supervisor import RestartPolicy, SupervisedProcess

__all__ = [
    "ChaosCluster",
    "ComputedTokens",
    "counting_computed",
    "running_chaos_cluster",
    "shared_files",
]

_METRIC = "baton_engine_step_tokens"
_INTERVAL_S = 1.0
_METRICS_TIMEOUT_S = 2.0
_RESTARTS = RestartPolicy(first_delay_s=0.2, max_delay_s=1.0, stop_grace_s=20.0)
_START_TIMEOUT_S = 120.0
_LOAD_TIMEOUT_S = 10.0
_POLL_S = 0.2
_DRAIN_TIMEOUT_S = 20.0


class ComputedTokens:
    """Sums of counters that begin at 0 when their process starts again. Pure.

    Attributes:
        total: tokens since the first reading of each worker.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._last: dict[str, float] = {}

    def read(self, name: str, value: float) -> None:
        """Takes a worker's counter."""
        last = self._last.get(name, value)
        self.total += value - last if value >= last else value
        self._last[name] = value


@contextmanager
def counting_computed(workers: Sequence[Server]) -> Iterator[ComputedTokens]:
    """Reads the workers' metrics once a second while the context is open."""
    computed = ComputedTokens()

    async def follow(worker: Server) -> None:
        while True:
            try:
                value = await asyncio.to_thread(_computed_by, worker.metrics_url)
            except OSError:  # it is down or frozen
                pass
            else:
                computed.read(worker.spec.name, value)
            await asyncio.sleep(_INTERVAL_S)

    tasks = [asyncio.create_task(follow(worker)) for worker in workers]
    try:
        yield computed
    finally:
        for task in tasks:
            task.cancel()


def _computed_by(url: str) -> float:
    with urllib.request.urlopen(url, timeout=_METRICS_TIMEOUT_S) as response:  # noqa: S310 - http
        text: str = response.read().decode()
    for family in text_string_to_metric_families(text):
        if family.name == _METRIC:
            return next(s.value for s in family.samples if s.name.endswith("_sum"))
    return 0.0


@dataclass(frozen=True, slots=True)
class ChaosCluster:
    """The processes of a cluster by name.

    Attributes:
        routers: the routers' servers.
        workers: the workers' servers.
        processes: all processes by name, Redis included if there is one.
        router_processes: number of processes of each router, which starts them itself.
    """

    routers: Sequence[Server]
    workers: Sequence[Server]
    processes: Mapping[str, SupervisedProcess]
    router_processes: int = 1

    @property
    def names(self) -> Sequence[str]:
        """The names of all processes that can be disturbed."""
        several = range(self.router_processes if self.router_processes > 1 else 0)
        routers = [router.spec.name for router in self.routers]
        return [*self.processes, *(f"{router}/{i}" for router in routers for i in several)]

    async def disturb(self, event: Event, freeze_s: float) -> None:
        """Kills, drains or freezes a process; one that runs no more is left alone."""
        pid = self._pid_of(event.target)
        if pid is None:
            return
        if event.kind == "freeze":
            _send(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(freeze_s)
            finally:
                _send(pid, signal.SIGCONT)
        else:
            _send(pid, signal.SIGKILL if event.kind == "kill" else signal.SIGTERM)

    async def restart(self, name: str) -> None:
        """Drains a process, and returns when it serves again.

        Raises:
            UnavailableError: it does not end.
        """
        before = self._pid_of(name)
        if before is not None:
            _send(before, signal.SIGTERM)
        for _ in range(int(_START_TIMEOUT_S / _POLL_S)):
            if self._pid_of(name) not in (None, before):
                break
            await asyncio.sleep(_POLL_S)
        else:
            raise UnavailableError(f"{name} has not ended within {_START_TIMEOUT_S:g} s")
        for server in (*self.workers, *self.routers):
            if server.spec.name == name.partition("/")[0]:
                await wait_until_serving(server.address, _START_TIMEOUT_S)

    def _pid_of(self, name: str) -> int | None:
        """The id of a process; None while it does not run."""
        parent, _, number = name.partition("/")
        pid = self.processes[parent].pid
        return pid if pid is None or not number else _router_process(pid, int(number))

    async def wait_serving(self) -> None:
        """Returns when every router and worker is serving."""
        servers = (*self.workers, *self.routers)
        await asyncio.gather(*(wait_until_serving(s.address, _START_TIMEOUT_S) for s in servers))

    async def first_serving_router(self, preferred: int) -> int:
        """Waits until a router serves; returns its index, the preferred one if that serves too."""
        waits = [
            asyncio.create_task(wait_until_serving(router.address, _START_TIMEOUT_S))
            for router in self.routers
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        serving = [index for index, wait in enumerate(waits) if wait.done()]
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        return preferred if preferred in serving else serving[0]

    async def loads(self) -> dict[str, worker_pb2.GetLoadResponse]:
        """Asks every worker for its load and counters, by name."""
        return {server.spec.name: await _load_of(server) for server in self.workers}

    async def wait_until_free(self, timeout_s: float) -> list[str]:
        """Waits until no worker holds a block or a request; returns what is held at the timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            held = [
                f"{name}: {load.num_blocks - load.num_free_blocks} blocks, "
                f"{load.num_running + load.num_waiting} requests"
                for name, load in ((n, r.load) for n, r in (await self.loads()).items())
                if load.num_free_blocks < load.num_blocks
                or load.num_running
                or load.num_waiting
                or load.num_swapped_blocks
            ]
            if not held or loop.time() >= deadline:
                return held
            await asyncio.sleep(_POLL_S)

    def resources(self) -> dict[str, tuple[float, int, int]]:
        """Resident memory in MiB, descriptors and threads of every running process, by name."""
        found = {}
        for name, process in self.processes.items():
            # A process may end meanwhile.
            if process.pid is not None and (used := _resources_of(process.pid)) is not None:
                found[name] = used
        return found


@asynccontextmanager
async def running_chaos_cluster(
    engine: EngineConfig,
    *,
    num_routers: int,
    num_prefill: int,
    num_decode: int,
    router_processes: int = 1,
    log: bool,
) -> AsyncIterator[ChaosCluster]:
    """Runs a cluster whose processes start again whenever they end.

    Args:
        engine: configures every worker. `redis://` as its connector starts a Redis server too, and
            `shm://` makes a store that is removed with the cluster.
        num_routers: number of routers, at least one.
        num_prefill: number of prefill workers.
        num_decode: number of decode workers, at least one.
        router_processes: number of processes of each router.
        log: whether the processes' output goes to stderr.

    Raises:
        ConfigurationError: a process ended before it served.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(run_folder())
        write = write_line if log else _drop_line
        processes: dict[str, SupervisedProcess] = {}
        if engine.kv_connector == "shm://":
            engine = replace(engine, kv_connector=stack.enter_context(embedded_store()))
        if engine.kv_connector == "redis://":
            port = free_port("127.0.0.1")
            engine = replace(engine, kv_connector=f"redis://127.0.0.1:{port}/0")
            spec = ProcessSpec("redis", "benchmarks.chaos.redis_process", (str(port), str(folder)))
            processes["redis"] = SupervisedProcess(spec, write, _RESTARTS)
            processes["redis"].start()
        config = ClusterConfig.grpc_only(engine, num_prefill=num_prefill, num_decode=num_decode)
        grpc = replace(config.router.grpc, drain_timeout_s=_DRAIN_TIMEOUT_S)
        router = replace(config.router, grpc=grpc, metrics=MetricsConfig(port=0))
        config = replace(config, router=router, router_processes=router_processes)
        takes_turns = len(config.targets) > 1
        engine = stack.enter_context(sharing_machine(config.engine, turns=takes_turns))
        config = replace(config, engine=engine)
        plan = plan_cluster(config)
        routers = [plan.router, *(plan_cluster(config).router for _ in range(num_routers - 1))]
        routers = [_named(server, f"router-{i}") for i, server in enumerate(routers)]
        servers = (*plan.workers, *routers)
        processes |= {s.spec.name: SupervisedProcess(s.spec, write, _RESTARTS) for s in servers}
        cluster = ChaosCluster(routers, plan.workers, processes, router_processes)
        try:
            await start_workers((s, processes[s.spec.name]) for s in plan.workers)
            await asyncio.gather(*(start_server(s, processes[s.spec.name]) for s in routers))
            yield cluster
        finally:
            for process in processes.values():
                if process.pid is not None:
                    _send(process.pid, signal.SIGCONT)
            await stop_in_order([p for n, p in processes.items() if n != "redis"])
            if "redis" in processes:
                await processes["redis"].stop()


def shared_files() -> set[str]:
    """The names of folders in shared memory that clusters of this process have made."""
    return {path.name for path in SHARED_MEMORY.glob(f"baton-up-{os.getpid()}-*")}


def _named(server: Server, name: str) -> Server:
    return replace(server, spec=replace(server.spec, name=name))


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _router_process(parent: int, number: int) -> int | None:
    """Returns the id of one of a router's processes; None while it does not run."""
    with suppress(OSError):  # the parent, or a process, has just ended
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            pairs = (text.partition("=") for text in variables.split("\0"))
            place = ProcessPlace.from_environment({name: value for name, _, value in pairs})
            if place is not None and place.index == number:
                return int(pid)
    return None


async def _load_of(server: Server) -> worker_pb2.GetLoadResponse:
    async with open_channel(server.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=_LOAD_TIMEOUT_S)


def _resources_of(pid: int) -> tuple[float, int, int] | None:
    """Returns resident memory in MiB, descriptors and threads; None if the process has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        lines = (folder / "status").read_text().splitlines()
        num_descriptors = len(list((folder / "fd").iterdir()))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in fields:
        return None
    memory_mib = int(fields["VmRSS"].split()[0]) / 1024
    return memory_mib, num_descriptors, int(fields["Threads"])


def _drop_line(line: str) -> None:
    """Drops a line of a process's output."""
