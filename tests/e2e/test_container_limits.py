"""Containers with limits: they serve, or refuse at the start and say what they need."""

import asyncio
import http.client
import itertools
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from baton import AsyncClient, SamplingParams
from baton.common.container_limits import ROUTER_NEEDS, WORKER_NEEDS
from tests.support.checkpoints import prompt_of
from tests.support.containers import IMAGE, OTHER_USER, ComposeProject, run_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LOAD_S = 20.0
NUM_STREAMS = 4
NUM_TOKENS = 24
NUM_IDLE = 1200
MAX_OTHER_LINES = 40
HTTP_PORT = 8000
SUPERVISOR = """
import asyncio
from worker.processes.spawn import ProcessSpec
from worker.processes.supervisor import SupervisedProcess

async def main():
    ended = asyncio.Event()
    def write(line):
        print(line, flush=True)
        if "ended" in line:
            ended.set()
    spec = ProcessSpec("hog", "timeit", ("-n1", "-r1", "bytearray(1 << 30)"))
    process = SupervisedProcess(spec, write)
    process.start()
    await asyncio.wait_for(ended.wait(), 60)
    await process.stop()

asyncio.run(main())
"""

WORKER_TASKS, ROUTER_TASKS = WORKER_NEEDS.all_tasks + 4, ROUTER_NEEDS.all_tasks + 4
REDIS = "redis://redis:6379/0?password_file=/run/kv/password"


@dataclass(frozen=True)
class Served:
    """Limits within which the services serve.

    Attributes:
        worker: keys of compose for each worker.
        router: those for the router.
        memory: of a worker, as its log says.
        kv_connector: the workers' connector.
    """

    worker: str
    router: str
    memory: str
    kv_connector: str = REDIS

    @property
    def limits(self) -> dict[str, str]:
        return {"prefill": self.worker, "decode": self.worker, "router": self.router}


# All but the user's are also read-only, by docker-compose.yml.
SERVED = {
    "all": Served(
        f"mem_limit: 512m, pids_limit: {WORKER_TASKS}, cpus: 1.5",
        f"mem_limit: 160m, pids_limit: {ROUTER_TASKS}, ulimits: {{nofile: 1024}}",
        "512 MiB",
        f"multi://shm://kv?max_bytes=48MiB,{REDIS}",
    ),
    "least": Served("mem_limit: 400m, cpus: 0.5", "mem_limit: 112m", "400 MiB"),
    "shm": Served(
        f"mem_limit: 1g, user: {OTHER_USER}", f"user: {OTHER_USER}", "1024 MiB", "shm://kv"
    ),
}

REFUSED = [
    ("--memory=64m", "decode --model=demo", "memory limit of this container is 64 MiB"),
    ("--memory=32m", "router --model=demo --decode=h:1", "memory limit of this container is 32"),
    ("--memory=200m", "serve demo", "baton serve needs at least"),
    ("--memory=300m", "decode --model=demo", "MiB are needed: weights 10 MiB, process"),
    (
        "--memory=400m",
        "decode --model=demo --kv-cache-memory-bytes=1GiB",
        "set --kv-cache-memory-bytes to at most",
    ),
    (
        "--memory=400m",
        "decode --model=demo --kv-connector=shm://kv?max_bytes=320MiB",
        "KV store 360 MiB",
    ),
    ("--pids-limit=12", "decode --model=demo", r"limit of tasks \(pids\) of this container is 12"),
    (
        f"--pids-limit={WORKER_TASKS}",
        "decode --model=demo --num-threads=32",
        "with --num-threads 32 needs",
    ),
]


async def send_distinct_prompts(address: str, duration_s: float) -> list[str]:
    """Streams distinct prompts without a pause; returns what each ended with."""
    ends: list[str] = []
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    seeds, deadline = itertools.count(1000), time.monotonic() + duration_s

    async def send(client: AsyncClient) -> None:
        while time.monotonic() < deadline:
            seed = next(seeds)
            tokens = 0
            async for chunk in client.stream(prompt_of(100 + seed % 300, seed=seed), params):
                tokens += len(chunk.token_ids)
            ends.append("whole" if tokens == NUM_TOKENS else f"{tokens} tokens")

    async with AsyncClient(address) as client, asyncio.TaskGroup() as streams:
        for _ in range(NUM_STREAMS):
            streams.create_task(send(client))
    return ends


@contextmanager
def idle_connections(host: str, port: int, number: int) -> Iterator[None]:
    """Holds connections that send nothing, as far as the server keeps them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * number)), hard))
    with ExitStack() as connections:
        connections.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(number):
            connections.enter_context(socket.create_connection((host, port), 5))
        yield


def health_status(host: str, port: int) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


async def check_serving(name: str, project: ComposeProject, serving: asyncio.Barrier) -> None:
    """Starts the services, and sends prompts once others serve too: nothing is killed, refused or
    restarted, and the logs stay short.
    """
    await project.scale(prefill=1, decode=1)
    (router,) = project.containers("router")
    host = project.inspect(router, "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
    num_idle = NUM_IDLE if "nofile" in SERVED[name].router else 0
    await serving.wait()
    with idle_connections(host, HTTP_PORT, num_idle):
        ends = await send_distinct_prompts(f"{host}:50051", LOAD_S)
        assert health_status(host, HTTP_PORT) == http.client.OK
    print(f"{name}: {len(ends)} streams")
    assert set(ends) == {"whole"}
    for service in SERVED[name].limits:
        (container,) = project.containers(service)
        assert project.inspect(container, "{{.RestartCount}}") == "0", service
    for tier in ("prefill", "decode"):
        limit = re.escape(f"memory: of a limit of {SERVED[name].memory}: ")
        assert re.search(f"{limit}.*KV cache", project.log(tier))
    assert len(project.log("router").splitlines()) < len(ends) + MAX_OTHER_LINES


def refuse(case: tuple[str, str, str]) -> str:
    """Starts a command within limits that are too low; returns what is wrong with its end."""
    limit, command, expected = case
    run = ("docker", "run", "--rm", limit, "--shm-size=1g", IMAGE, *command.split())
    ended = run_program(*run, check=False)
    *_, line = ended.stderr.splitlines()
    is_right = re.search(expected, line) and re.search(r"; |: raise", line)
    return "" if (ended.returncode, bool(is_right)) == (2, True) else f"{case}: {ended}"


async def check_refusals(serving: asyncio.Barrier) -> None:
    """Tries the limits that are too low, while the services are under load."""
    await serving.wait()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as threads:
        ends = [loop.run_in_executor(threads, refuse, case) for case in REFUSED]
        assert [problem for problem in await asyncio.gather(*ends) if problem] == []


@pytest.mark.alone
async def test_services_serve_distinct_prompts_within_limits_or_are_refused(
    open_project: Callable[..., ComposeProject],
) -> None:
    """All at the same time: each configuration that serves gets the same load."""
    serving = asyncio.Barrier(len(SERVED) + 1)
    with ExitStack() as stack:
        projects = {
            name: stack.enter_context(
                open_project(limits=served.limits, kv_connector=served.kv_connector, name=name)
            )
            for name, served in SERVED.items()
        }
        try:
            async with asyncio.TaskGroup() as checks:
                for name, project in projects.items():
                    checks.create_task(check_serving(name, project, serving))
                checks.create_task(check_refusals(serving))
        except BaseException:
            for project in projects.values():
                print(project.logs())
            raise


@pytest.mark.usefixtures("open_project")
def test_a_process_that_is_killed_for_memory_is_named_with_the_remedy() -> None:
    run = ("docker", "run", "--rm", "--memory=96m", "--memory-swap=96m", "--entrypoint=python")
    ended = run_program(*run, IMAGE, "-c", SUPERVISOR, check=False)
    assert "hog | ended with status -9: the kernel killed it for lack of memory" in ended.stdout
    assert "of 96 MiB of this container" in ended.stdout
