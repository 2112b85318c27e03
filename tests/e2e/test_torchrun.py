"""torchrun starts an engine's ranks on two hosts, and again when one of them is lost."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from baton.client import AsyncClient
from baton.common.request.sampling_params import SamplingParams
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import REPOSITORY, WORKER_CALL, ServerProcess
from tests.support.ports import reserved_ports
from tests.support.two_hosts import other_host, why_unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable()),
]

NUM_TOKENS = 300
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SOON = 20
LAUNCHER = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d")
WORKER = (
    *("worker.decode", "--distributed-executor-backend=external_launcher"),
    *("--tensor-parallel-size=2", "--step-timeout-s=3", "--host=0.0.0.0", "--dtype=float32"),
    *("--max-model-len=512", "--num-gpu-blocks-override=128", "--num-threads=1"),
)


@contextmanager
def torchrun(
    address: str, prefix: Sequence[str], rendezvous: str, worker: Sequence[str], log: Path
) -> Iterator[psutil.Process]:
    """Starts torchrun on a host; yields it.

    Args:
        address: of the host.
        prefix: start of the command line.
        rendezvous: address and port at which the hosts meet.
        worker: further flags of the worker.
        log: file for the output.
    """
    is_host = rendezvous.startswith(f"{address}:")
    places = (
        *(f"--local-addr={address}", f"--rdzv-endpoint={rendezvous}"),
        f"--rdzv-conf=is_host={int(is_host)}",  # it would compare with the machine's name
    )
    arguments = [*LAUNCHER, *places, "--module", *WORKER, *worker]
    token = WORKER_CALL[0][1].removeprefix("Bearer ")
    with log.open("wb") as output:
        process = psutil.Popen(
            [*prefix, sys.executable, "-m", "torch.distributed.run", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "BATON_CLUSTER_TOKEN": token, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        everyone = [process, *process.children(recursive=True)]
        for each in everyone:
            each.kill()
        psutil.wait_procs(everyone, timeout=20)


async def test_streams_outlive_a_rank_on_another_host(tmp_path: Path) -> None:
    model, prompt = tiny_checkpoint("llama"), prompt_of(40)
    expected = reference_greedy(model, prompt, NUM_TOKENS)
    rendezvous, port = reserved_ports(2)
    with other_host() as (here, namespace), ExitStack() as started:
        there = here.removesuffix("1") + "2"
        flags = (f"--model={model}", f"--port={port}")
        hosts: dict[str, Sequence[str]] = {here: (), there: ("ip", "netns", "exec", namespace)}
        nodes = [
            started.enter_context(
                torchrun(address, prefix, f"{here}:{rendezvous}", flags, tmp_path / address)
            )
            for address, prefix in hosts.items()
        ]
        router = ServerProcess(
            "router",
            tmp_path,
            "router",
            [
                f"--model={model}",
                *(f"--decode={host}:{port}" for host in hosts),  # torchrun chooses that of rank 0
                *("--queue-timeout-s=120", "--resume-timeout-s=120"),
            ],
        )
        started.callback(router.kill)
        await router.wait_serving()
        async with AsyncClient(router.address) as client:
            for number in (signal.SIGKILL, signal.SIGSTOP):
                tokens, lost = [], None
                async for output in client.stream(prompt, PARAMS, timeout_s=200):
                    tokens += output.token_ids
                    if lost is None and len(tokens) >= SOON:
                        lost = asyncio.create_task(lose_rank(nodes, number))
                assert lost is not None
                await lost
                assert tokens == expected, number


async def lose_rank(nodes: Sequence[psutil.Process], number: int) -> None:
    """Kills or freezes rank 1. A frozen one is killed when rank 0 has ended for it: torchrun would
    do so 30 s later, which no flag changes.
    """
    (first,), (rank,) = nodes[0].children(), nodes[1].children()
    os.kill(rank.pid, number)
    if number == signal.SIGSTOP:
        await asyncio.to_thread(psutil.wait_procs, [first], 60)
        rank.kill()
