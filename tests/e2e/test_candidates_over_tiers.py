"""Several candidates through router, prefill and decode processes equal those of one process."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from baton import LLM, AsyncClient, SamplingParams
from baton.common.request.results import CompletionOutput
from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.cluster import WORKER_CALL, Cluster, ServerProcess, running_cluster

DRAWN = SamplingParams(temperature=1.5, seed=7, max_tokens=24, ignore_eos=True, n=3)
CASES = {
    "drawn": DRAWN,
    "best": replace(DRAWN, n=2, best_of=4),
    "beams": SamplingParams(max_tokens=16, beam_width=4, n=2),
    "patient beams": SamplingParams(
        max_tokens=16, beam_width=3, length_penalty=0.0, early_stopping="never"
    ),
    "one token": replace(DRAWN, max_tokens=1),
    "the best token": replace(DRAWN, max_tokens=1, n=1, best_of=4),
    "one token of beams": SamplingParams(max_tokens=1, beam_width=4, n=2),
}
PROMPTS = [prompt_of(length, seed=length) for length in (5, 32, 50)]


@pytest.mark.slow
async def test_candidates_of_two_tiers_equal_those_of_one_process(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama")
    expected = expected_outputs(model)
    store = f"file://{tmp_path}/kv"
    async with running_cluster(tmp_path, model=model, kv_connector=store, num_decode=2) as cluster:
        async with AsyncClient(cluster.router.address) as client:
            await check(client, expected)
            await check_streams(client, expected)
            await kill_and_check(client, cluster, expected)
        await cluster.wait_pools_full()
        await check_reset(cluster.prefill[0])


def expected_outputs(model: Path) -> dict[str, list[list[CompletionOutput]]]:
    with LLM(str(model), max_model_len=512, num_gpu_blocks_override=512, dtype="float32") as llm:
        return {
            name: [result.outputs for result in llm.generate(PROMPTS, params, use_tqdm=False)]
            for name, params in CASES.items()
        }


async def check(client: AsyncClient, expected: dict[str, list[list[CompletionOutput]]]) -> None:
    for name, params in CASES.items():
        calls = [client.generate(prompt, params, timeout_s=60) for prompt in PROMPTS]
        for result, outputs in zip(await asyncio.gather(*calls), expected[name], strict=True):
            assert result.outputs == rounded_like(result.outputs, outputs), name


def rounded_like(
    found: list[CompletionOutput], expected: list[CompletionOutput]
) -> list[CompletionOutput]:
    """`expected`, with `found`'s scores where they are close enough."""
    return [
        replace(theirs, score=ours.score)
        if theirs.score is not None and ours.score == pytest.approx(theirs.score, abs=1e-4)
        else theirs
        for ours, theirs in zip(found, expected, strict=True)
    ]


async def check_streams(
    client: AsyncClient, expected: dict[str, list[list[CompletionOutput]]]
) -> None:
    """Checks that a stop text ends only its own candidate."""
    whole = expected["drawn"][0]
    stop = next(
        character
        for character in whole[1].text[1:]
        if character.isascii() and character not in whole[0].text + whole[2].text
    )
    texts = dict.fromkeys(range(3), "")
    reasons = {}
    async for chunk in client.stream(PROMPTS[0], replace(DRAWN, stop=[stop]), timeout_s=60):
        texts[chunk.index] += chunk.text
        if chunk.finish_reason is not None:
            reasons[chunk.index] = chunk.finish_reason
    assert reasons == {0: "length", 1: "stop", 2: "length"}
    assert whole[1].text.startswith(texts[1] + stop)
    assert (texts[0], texts[2]) == (whole[0].text, whole[2].text)


async def kill_and_check(
    client: AsyncClient,
    cluster: Cluster,
    expected: dict[str, list[list[CompletionOutput]]],
) -> None:
    """Kills a decode replica under streams of candidates; checks that no token is lost."""
    long = replace(DRAWN, max_tokens=300)
    before = await asyncio.gather(
        *(client.generate(prompt, long, timeout_s=60) for prompt in PROMPTS)
    )
    streams = [
        asyncio.create_task(collect(client, prompt, long, cluster.decode[0], number == 0))
        for number, prompt in enumerate(PROMPTS)
    ]
    for token_ids, result in zip(await asyncio.gather(*streams), before, strict=True):
        assert token_ids == {c.index: list(c.token_ids) for c in result.outputs}


async def collect(
    client: AsyncClient,
    prompt: list[int],
    params: SamplingParams,
    victim: ServerProcess,
    kills_victim: bool,
) -> dict[int, list[int]]:
    token_ids: dict[int, list[int]] = {index: [] for index in range(params.n)}
    async for chunk in client.stream(prompt, params, timeout_s=60):
        token_ids[chunk.index].extend(chunk.token_ids)
        if kills_victim and len(token_ids[0]) > 20:
            kills_victim = False
            victim.kill()
    return token_ids


async def check_reset(worker: ServerProcess) -> None:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        reset = worker_pb2.ResetPrefixCacheRequest()
        for is_filled in (True, False):
            answer = await stub.ResetPrefixCache(reset, timeout=10, metadata=WORKER_CALL)
            assert (answer.num_blocks > 0) == is_filled
