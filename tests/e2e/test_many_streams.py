"""Two prefill and two decode processes with redis, under 200 concurrent streams."""

import asyncio
import itertools
import random
import time
from pathlib import Path

import grpc
import pytest

from baton import AsyncClient, SamplingParams
from baton.common.request.results import Usage
from baton.v1 import (
    common_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    request_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import WORKER_CALL, ServerProcess, running_cluster
from tests.support.redis_server import RedisServer

NUM_STREAMS = 200
PREFIX_LENGTHS = (20, 48, 96, 130)
"""Of the prefixes that streams share, which are also their seeds."""


def make_prompts() -> list[tuple[list[int], int]]:
    """Prompts of mixed lengths, most with a shared prefix, and how many tokens to generate."""
    draw = random.Random(1)
    prefixes = [prompt_of(length, seed=length) for length in PREFIX_LENGTHS]
    prompts = []
    for index in range(NUM_STREAMS):
        prefix = prefixes[index % 5] if index % 5 < len(prefixes) else []
        suffix = [draw.randrange(256) for _ in range(draw.choice((1, 3, 15, 16, 17, 40)))]
        prompts.append(([*prefix, *suffix], draw.choice((1, 2, 8, 20))))
    return prompts


async def complete(client: AsyncClient, prompt: list[int], expected: list[int]) -> Usage:
    """Streams a completion and compares it; returns its token counts."""
    params = SamplingParams(temperature=0, max_tokens=len(expected), ignore_eos=True)
    chunks = [chunk async for chunk in client.stream(prompt, params, timeout_s=100)]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == len(expected)
    assert usage.prompt_tokens == len(prompt)
    return usage


async def prefill_at(server: ServerProcess, request_id: str, prompt: list[int]) -> int:
    """Prefills at one replica; returns how many prompt tokens it did not compute."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        info = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(
            worker_pb2.GetInfoRequest(), timeout=10, metadata=WORKER_CALL
        )
        spec = request_pb2.RequestSpec(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(temperature=0.0, seed=0),
            stopping=common_pb2.StoppingParams(max_tokens=2),
            timeout_ms=60_000,
        )
        events = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(
            prefill_pb2.PrefillRequest(spec=spec, namespace=info.namespace),
            timeout=30,
            metadata=WORKER_CALL,
        )
        (result,) = [event.result async for event in events if event.HasField("result")]
        return result.outputs[0].cached_tokens


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_200_concurrent_streams_are_all_correct(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    path = tiny_checkpoint("llama")
    expected = [
        (prompt, reference_greedy(path, prompt, num_tokens))
        for prompt, num_tokens in make_prompts()
    ]
    async with (
        running_cluster(
            tmp_path,
            model=path,
            kv_connector=redis_server.url,
            num_prefill=2,
            num_decode=2,
        ) as cluster,
        AsyncClient(cluster.router.address) as client,
    ):
        usages = await asyncio.gather(*(complete(client, *pair) for pair in expected))

        assert sum(usage.cached_tokens for usage in usages) > 0
        await cluster.wait_pools_full()

        # A replica finds in the store what the other has computed. If loads have been slower
        # than computing, it tries a load only now and then.
        give_up_at, num_found = time.monotonic() + 60, 0
        for seed in itertools.count(max(PREFIX_LENGTHS) + 1):
            fresh = prompt_of(100, seed=seed)
            assert await prefill_at(cluster.prefill[0], f"first {seed}", fresh) == 0
            num_found = await prefill_at(cluster.prefill[1], f"second {seed}", fresh)
            if num_found or time.monotonic() > give_up_at:
                break
        assert num_found == 96
        await cluster.wait_pools_full()
