"""A decode tier that is a replica set of real processes, scaled while streams run."""

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc
import psutil
import pytest

from baton import cli
from baton.client import AsyncClient
from baton.common.request.sampling_params import SamplingParams
from rpc.probe import check_health
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import WORKER_CALL, Cluster, ServerProcess, get_load, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STREAMS = 8
"""So many that a worker without any of them costs the least, whatever the others have cached."""
NUM_TOKENS = 150
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Streams:
    """Streams that begin again until `end` is called; each must have the expected tokens.

    Attributes:
        num_ended: how many have run to their end.
    """

    def __init__(
        self, client: AsyncClient, expected: dict[int, list[int]], group: asyncio.TaskGroup
    ) -> None:
        self.num_ended = 0
        self._client = client
        self._is_over = asyncio.Event()
        for seed, tokens in expected.items():
            group.create_task(self._run(prompt_of(40, seed=seed), tokens))

    def end(self) -> None:
        self._is_over.set()

    async def _run(self, prompt: list[int], expected: list[int]) -> None:
        while not self._is_over.is_set():
            outputs = self._client.stream(prompt, PARAMS)
            assert [token async for output in outputs for token in output.token_ids] == expected
            self.num_ended += 1


async def test_streams_go_on_while_their_tier_is_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {
        seed: reference_greedy(tiny_checkpoint("llama"), prompt_of(40, seed=seed), NUM_TOKENS)
        for seed in range(NUM_STREAMS)
    }
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", WORKER_CALL[0][1].removeprefix("Bearer "))
    async with (
        running_cluster(
            tmp_path,
            model=tiny_checkpoint("llama"),
            kv_connector=f"file://{tmp_path}/kv",
            decode_flags=["--data-parallel-size=2"],
        ) as cluster,
        AsyncClient(cluster.router.address) as client,
    ):
        (parent,) = cluster.decode

        async def scale(number: int) -> list[str]:
            arguments = ["scale", parent.address, "--data-parallel-size", str(number)]
            assert await asyncio.to_thread(cli.main, arguments) == 0
            return capsys.readouterr().out.split()

        async with asyncio.timeout(400), asyncio.TaskGroup() as group:
            streams = Streams(client, expected, group)
            three = await scale(3)
            await until_all_run(three)
            (left,) = await scale(1)
            streams.end()
        assert len(three) == 3
        assert left == three[0]
        assert streams.num_ended >= NUM_STREAMS

        await a_killed_worker_comes_back(parent, left)
        outputs = client.stream(prompt_of(40, seed=0), PARAMS)
        assert [token async for output in outputs for token in output.token_ids] == expected[0]
        await the_parent_ends_its_workers(cluster)


async def test_only_the_cluster_scales_and_lists_workers(tmp_path: Path) -> None:
    flags = ["--model=demo", "--data-parallel-size=1", "--num-gpu-blocks-override=64"]
    parent = ServerProcess("worker.decode", tmp_path, "parent", flags)
    try:
        await parent.wait_serving()
        async with grpc.aio.insecure_channel(parent.address) as channel:
            for method in ("WatchReplicas", "Scale"):
                call = channel.unary_stream(f"/baton.v1.ReplicaSetService/{method}")(b"")
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        parent.kill()


async def until_all_run(addresses: list[str]) -> None:
    """Waits until each of some workers has a request."""
    give_up_at = time.monotonic() + 60
    waiting = set(addresses)
    while waiting:
        loads = {address: await get_load(address) for address in addresses}
        assert time.monotonic() < give_up_at, f"{waiting} have no request: {loads}"
        waiting -= {address for address, load in loads.items() if load.num_running}
        await asyncio.sleep(0.01)


async def a_killed_worker_comes_back(parent: ServerProcess, address: str) -> None:
    (worker,) = psutil.Process(parent.process.pid).children()
    os.kill(worker.pid, signal.SIGKILL)
    give_up_at = time.monotonic() + 60
    while worker.is_running() or await check_health(address) != "SERVING":
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.05)


async def the_parent_ends_its_workers(cluster: Cluster) -> None:
    """By SIGTERM in order; by SIGKILL, too, where the system knows how."""
    (parent,) = cluster.decode
    workers = psutil.Process(parent.process.pid).children()
    assert await asyncio.to_thread(parent.stop) == 0
    assert not any(worker.is_running() for worker in workers)
    await parent.restart()
    workers = psutil.Process(parent.process.pid).children()
    assert len(workers) == 2
    parent.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, workers, timeout=20)
    assert not alive
