"""Engines whose ranks are actors of a Ray cluster, and `baton serve` on its nodes."""

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton import Client, SamplingParams
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import get_load
from tests.support.ray_nodes import RayNodes, running_ray
from tests.support.redis_server import RedisServer
from tests.support.serve_process import read_until, running

BATON = "import sys; from baton.cli import main; sys.exit(main())"
NUM_TOKENS = 100

SOON_S = 150.0
"""A worker starts anew meanwhile, also where other tests take most of the machine."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """The driver's node has no CPUs for actors, so ranks come to others."""
    with running_ray(0, 1, 1, 1, 1) as cluster:
        yield cluster


def run_engine(nodes: RayNodes, *options: str, **flags: Any) -> dict[str, Any]:
    settings = {
        "model": str(tiny_checkpoint("llama")),
        "dtype": "float32",
        "max_model_len": 128,
        "num_gpu_blocks_override": 32,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "ray",
        **flags,
    }
    ended = nodes.run("tests.support.ray_engine", json.dumps(settings), *options)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_ranks_on_two_nodes_have_the_tokens_of_one(nodes: RayNodes) -> None:
    found = run_engine(nodes)
    expected = reference_greedy(tiny_checkpoint("llama"), prompt_of(21), 20)
    assert found == {
        "first": expected,
        "second": expected,
        "is_on_other_node": True,
        "left": [],
    }


def test_an_actor_that_is_killed_ends_the_engine(nodes: RayNodes) -> None:
    found = run_engine(nodes, "--kill")
    assert found["error"]
    assert found["seconds"] < 30
    assert found["left"] == []
    assert "second" not in found


class Served:
    """A running `baton serve --on ray`.

    Args:
        process: the command's.
        lines: its first lines.
        client: of its router.
        model: the path that it serves, which no other process does.
    """

    def __init__(self, process: Any, lines: list[str], client: Client, model: Path) -> None:
        self._process, self._client, self._model = process, client, str(model)
        self._shown = dict(re.findall(r"^(\w+) +(\S+)$", "".join(lines), re.MULTILINE))

    def worker(self, name: str) -> psutil.Process:
        """Returns the only worker of a tier."""
        found = self.processes(f"worker.{name}")
        (worker,) = (each for each in found if "--data-parallel-size" not in each.info["cmdline"])
        return worker

    def processes(self, module: str = "worker.") -> list[psutil.Process]:
        """Returns the processes of sets, and those of workers, which are no children of them."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if self._model in line and any(part.startswith(module) for part in line):
                found.append(process)
        return found

    def read_until(self, text: str) -> list[str]:
        return read_until(self._process, text)

    def generate(self, num_tokens: int = 20) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return list(self._client.generate(prompt_of(21), params, timeout_s=SOON_S).token_ids)

    def scale(self, name: str, size: int) -> list[str]:
        """Changes the number of workers of a tier; returns their addresses."""
        flags = "--data-parallel-size", str(size), "--cluster-token-file", self._shown["token"]
        command = [sys.executable, "-c", BATON, "scale", self._shown[name], *flags]
        return subprocess.check_output(command, text=True, timeout=SOON_S).split()

    def wait_until_running(self, address: str) -> None:
        """Waits until a worker has a request."""
        token = Path(self._shown["token"]).read_text().strip()
        metadata = [("authorization", f"Bearer {token}")]
        give_up_at = time.monotonic() + SOON_S
        while not asyncio.run(get_load(address, metadata)).num_running:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)


@contextmanager
def serving(nodes: RayNodes, folder: Path, *flags: object) -> Iterator[Served]:
    """Serves the tiny checkpoint, by a link in a folder, until the context ends; nothing is left
    then. Tests of other processes serve the same checkpoint meanwhile, on hosts of their own.
    """
    model = folder / "llama"
    model.symlink_to(tiny_checkpoint("llama"))
    command = [
        *(nodes.python, "-c", BATON, "serve", model, "--on", "ray"),
        *("--port", "none", "--grpc-port", 0, "--dtype", "float32", "--max-model-len", 128),
        *("--num-gpu-blocks-override", 32, "--queue-timeout-s", SOON_S),
        *("--resume-timeout-s", SOON_S, *flags),
    ]
    with running(command, env=nodes.environment) as process:
        lines = read_until(process, "Ctrl-C")
        (address,) = re.findall(r"^grpc +(\S+)$", "".join(lines), re.MULTILINE)
        with Client(address) as client:
            served = Served(process, lines, client, model)
            yield served
            left = served.processes()
    # Without an init process orphans stay zombies, which hold no resources.
    _, alive = psutil.wait_procs(left, timeout=60)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def test_workers_whose_ranks_are_actors_too(
    nodes: RayNodes, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Each worker has a node, and its second rank another one."""
    flags = ("--tensor-parallel-size", 2, "--distributed-executor-backend", "ray")
    with serving(nodes, tmp_path, *flags, "--kv-connector", redis_server.url) as served:
        expected = reference_greedy(tiny_checkpoint("llama"), prompt_of(21), 20)
        assert served.generate() == expected


def a_tier_is_scaled_while_requests_run(served: Served) -> None:
    expected = reference_greedy(tiny_checkpoint("llama"), prompt_of(21), NUM_TOKENS)
    is_over = threading.Event()

    def stream_again_and_again() -> None:
        while not is_over.is_set():
            assert served.generate(NUM_TOKENS) == expected

    with ThreadPoolExecutor() as threads:
        streams = [threads.submit(stream_again_and_again) for _ in range(3)]
        try:
            first, second = served.scale("decode", 2)
            for address in (first, second):
                served.wait_until_running(address)
            assert served.scale("decode", 1) == [first]
        finally:
            is_over.set()
        for stream in streams:
            stream.result()


def test_workers_on_nodes_come_back_also_elsewhere(nodes: RayNodes, tmp_path: Path) -> None:
    """The last test here, as it kills one of the nodes."""
    expected = reference_greedy(tiny_checkpoint("llama"), prompt_of(21), 20)
    with serving(nodes, tmp_path) as served:
        assert served.generate() == expected
        a_tier_is_scaled_while_requests_run(served)
        before = served.worker("decode")
        before.kill()
        served.read_until("decode-0 | starting again")
        assert served.generate() == expected
        actor = served.worker("decode").parent()
        assert "ServerActor" in " ".join(actor.cmdline())
        node = actor.parent()
        node.kill()  # its actor and its worker end with it
        served.read_until("decode-0 | starting again")
        assert served.generate() == expected
        assert served.worker("decode").parent().parent() != node
