"""Engines whose ranks are actors of a Ray cluster with two nodes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.ray_nodes import RayNodes, running_ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


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
