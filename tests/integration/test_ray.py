"""Engines whose ranks are actors of a Ray cluster, and `baton serve` on its nodes."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from baton import Client, SamplingParams
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.ray_nodes import RayNodes, running_ray
from tests.support.redis_server import RedisServer
from tests.support.serve_process import read_until, running

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """The driver's node has no CPUs for actors, so ranks come to the other one."""
    with running_ray(0, 1) as cluster:
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

    Attributes:
        client: of its router.
    """

    def __init__(self, process: Any, client: Client) -> None:
        self._process, self.client = process, client

    def worker(self, name: str) -> psutil.Process:
        """Returns the only worker of a tier."""
        (found,) = self.workers(f"worker.{name}")
        return found

    def workers(self, module: str = "worker.") -> list[psutil.Process]:
        """Returns the processes of workers, which are no children of this command."""
        model = str(tiny_checkpoint("llama"))
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if model in line and any(part.startswith(module) for part in line):
                found.append(process)
        return found

    def read_until(self, text: str) -> list[str]:
        return read_until(self._process, text)

    def generate(self) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        return list(self.client.generate(prompt_of(21), params, timeout_s=90).token_ids)


@contextmanager
def serving(nodes: RayNodes, *flags: object) -> Iterator[Served]:
    """Serves the tiny checkpoint until the context ends; nothing is left then."""
    code = "import sys; from baton.cli import main; sys.exit(main())"
    command = [
        *(nodes.python, "-c", code, "serve", tiny_checkpoint("llama"), "--on", "ray"),
        *("--port", "none", "--grpc-port", 0, "--dtype", "float32", "--max-model-len", 128),
        *("--num-gpu-blocks-override", 32, "--queue-timeout-s", 90, "--dns-interval-s", 0.2),
        *flags,
    ]
    with running(command, env=nodes.environment) as process:
        (address,) = re.findall(
            r"^grpc +(\S+)$", "".join(read_until(process, "Ctrl-C")), re.MULTILINE
        )
        with Client(address) as client:
            served = Served(process, client)
            yield served
            left = served.workers()
    # Without an init process orphans stay zombies, which hold no resources.
    _, alive = psutil.wait_procs(left, timeout=20)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def three_nodes() -> Iterator[RayNodes]:
    """Two nodes have room for a worker each, a third one is spare."""
    with running_ray(0, 1, 1, 1) as cluster:
        yield cluster


def test_workers_on_nodes_come_back_also_elsewhere(three_nodes: RayNodes) -> None:
    expected = reference_greedy(tiny_checkpoint("llama"), prompt_of(21), 20)
    with serving(three_nodes) as served:
        assert served.generate() == expected
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


def test_workers_whose_ranks_are_actors_too(redis_server: RedisServer) -> None:
    flags = ("--tensor-parallel-size", 2, "--distributed-executor-backend", "ray")
    with (
        running_ray(0, 2, 2) as cluster,
        serving(cluster, *flags, "--kv-connector", redis_server.url) as served,
    ):
        expected = reference_greedy(tiny_checkpoint("llama"), prompt_of(21), 20)
        assert served.generate() == expected
