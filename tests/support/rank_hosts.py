"""An engine whose ranks are started apart, as on two hosts: rank 0 here, others as processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.common.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.loop.build import build_engine
from engine.loop.core import EngineCore
from engine.request import EngineRequest
from kernels import RankGroup
from tests.support.checkpoints import prompt_of
from tests.support.prefill_core import with_role
from tests.support.requests import engine_request

TOKEN = "a token of thirty-two characters"
NUM_TOKENS = 10
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 64,
    "block_size": 8,
    "tensor_parallel_size": 2,
}


def group_of(rank: int, size: int) -> RankGroup:
    """A group that only divides; it exchanges nothing."""
    methods = dict.fromkeys(RankGroup.__abstractmethods__)
    group: RankGroup = type("Group", (RankGroup,), methods)()
    group.rank, group.size = rank, size
    return group


@contextmanager
def other_rank(
    path: Path, port: int, namespace: str = "", **flags: object
) -> Iterator[subprocess.Popen]:
    """Another host's process: `baton decode` with the same flags."""
    prefix = ["ip", "netns", "exec", namespace] if namespace else []
    given = {**SETTINGS, "nnodes": 2, "node_rank": 1, **flags, "master_port": port}
    arguments = [
        part
        for name, value in given.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "worker.decode", str(path), "--port", "0", *arguments],
        env={**os.environ, "BATON_CLUSTER_TOKEN": TOKEN},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def first_rank(path: Path, port: int, role: str = "both", **flags: object) -> EngineCore:
    """Returns the engine of the first host, which the other ranks have met."""
    given = {**SETTINGS, "nnodes": 2, **flags}
    config = EngineConfig(model=str(path), **given, master_port=port)
    return with_role(build_engine(config, ClusterSecurity(token=TOKEN)), role)


def requests() -> list[EngineRequest]:
    """Returns a greedy request, and one of each of other kinds."""
    kinds = ({}, {"n": 2, "temperature": 1.0, "seed": 3}, {"prompt_logprobs": 1}, {"beam_width": 2})
    return [
        engine_request(str(index), tuple(prompt_of(9 + 11 * index)), max_tokens=NUM_TOKENS, **kind)
        for index, kind in enumerate(kinds)
    ]
