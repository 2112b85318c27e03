"""Real processes whose KV transfers fail at random, under 50 streams: no token is lost."""

import asyncio
import random
from pathlib import Path

import pytest

from baton import AsyncClient, SamplingParams
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import running_cluster
from tests.support.kv_urls import fresh_shm_name, kv_urls, with_faults
from tests.support.redis_server import RedisServer

# Two stores and a peer; test_fault_matrix.py has all connectors, in one process.
BACKENDS = ("shm", "redis", "nixl")
FAULTS = "corrupt:0.1,truncate:0.1,drop:0.05,delay:0.1,duplicate:0.1,reorder:0.1,fail_load:0.15"
NUM_STREAMS = 50
NUM_ROUNDS = 5
TIMEOUT_S = 100.0


def make_prompts() -> list[tuple[list[int], int]]:
    """Prompts of mixed lengths, most with a shared prefix, and how many tokens to generate."""
    rng = random.Random(2)
    prefixes = [prompt_of(length, seed=length) for length in (20, 48, 96)]
    prompts = []
    for index in range(NUM_STREAMS):
        prefix = prefixes[index % 4] if index % 4 < len(prefixes) else []
        suffix = [rng.randrange(256) for _ in range(rng.choice((1, 15, 16, 17, 70)))]
        prompts.append(([*prefix, *suffix], rng.choice((1, 2, 8, 20))))
    return prompts


async def check_stream(
    client: AsyncClient, prompt: list[int], expected: list[int], salt: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=len(expected), ignore_eos=True)
    stream = client.stream(prompt, params, cache_salt=salt, timeout_s=TIMEOUT_S)
    chunks = [chunk async for chunk in stream]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_every_stream_is_correct_with_all_faults_at_once(
    backend: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    path = tiny_checkpoint("llama")
    streams = [
        (prompt, reference_greedy(path, prompt, num_tokens))
        for prompt, num_tokens in make_prompts()
    ]
    with fresh_shm_name() as name:
        url = kv_urls(tmp_path, name, redis_server.url, timeout_s=5)[backend]
        async with (
            running_cluster(
                tmp_path,
                model=path,
                kv_connector=with_faults(url, f"faults={FAULTS}&fault_delay_s=0.1"),
                num_decode=2,
            ) as cluster,
            AsyncClient(cluster.router.address) as client,
        ):
            logs = ""
            for round_number in range(NUM_ROUNDS):
                salt = f"round {round_number}"
                await asyncio.gather(*(check_stream(client, *each, salt) for each in streams))
                await cluster.wait_pools_full(timeout_s=60)
                logs = "".join(worker.log() for worker in cluster.workers)
                # On a busy machine a round may compute everything: its loads are too slow.
                if "is corrupt" in logs and "injected fault" in logs:
                    break
            else:
                pytest.fail("no object was corrupted, or no fault injected:\n" + logs)
