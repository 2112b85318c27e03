"""Tiers whose engines have two ranks each: streams go on when a rank is killed or frozen."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from baton.client import AsyncClient
from baton.common.request.sampling_params import SamplingParams
from kernels.library.commands import library
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import ServerProcess, get_load, running_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(library() is None, reason="no native kernels"),
]

NUM_TOKENS = 300
SOON = 20


@pytest.mark.parametrize(
    ("number", "connector"),
    [
        (signal.SIGSTOP, "file://{tmp_path}/kv"),
        (signal.SIGKILL, "grpc://"),
    ],
)
async def test_a_stream_outlives_a_rank_and_its_group_comes_back(
    tmp_path: Path, number: signal.Signals, connector: str
) -> None:
    model, prompt = tiny_checkpoint("llama"), prompt_of(40)
    expected = reference_greedy(model, prompt, NUM_TOKENS)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with (
        running_cluster(
            tmp_path,
            model=model,
            kv_connector=connector.format(tmp_path=tmp_path),
            num_decode=2,
            worker_flags=["--tensor-parallel-size=2", "--step-timeout-s=3"],
        ) as cluster,
        AsyncClient(cluster.router.address) as client,
    ):
        tokens, lost = [], None
        async for output in client.stream(prompt, params):
            tokens += output.token_ids
            if lost is None and len(tokens) >= SOON:
                lost = await busy_one(cluster.decode)
                (rank,) = ranks_of(lost)
                os.kill(rank, number)
        assert tokens == expected
        assert lost is not None
        assert await asyncio.to_thread(lost.process.wait, 30) == 1
        await wait_until_ended(rank)
        await lost.restart()
        cluster.decode[1 - cluster.decode.index(lost)].kill()
        again = [
            token async for output in client.stream(prompt, params) for token in output.token_ids
        ]
        assert again == expected
        await cluster.wait_pools_full()


async def busy_one(workers: list[ServerProcess]) -> ServerProcess:
    """Waits until one of the workers runs a request; returns it."""
    give_up_at = time.monotonic() + 30
    while time.monotonic() < give_up_at:
        for worker in workers:
            if (await get_load(worker.address)).num_running:
                return worker
        await asyncio.sleep(0.01)
    raise AssertionError("no worker runs the request")


async def wait_until_ended(pid: int) -> None:
    """Waits until a process, whose parent may have ended first, has ended."""
    give_up_at = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and not yet reaped by the process that has inherited it


def ranks_of(worker: ServerProcess) -> list[int]:
    """Returns the process ids of a worker's other ranks."""
    pids = []
    for path in Path(f"/proc/{worker.process.pid}/task").glob("*/children"):
        pids += map(int, path.read_text().split())
    return [
        pid for pid in pids if b"engine.runtime.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
