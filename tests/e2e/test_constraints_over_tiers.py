"""Constrained output through router, prefill and decode processes."""

from dataclasses import replace

import pytest

from baton import AsyncClient, SamplingParams, StructuredOutputs
from baton.common.errors import FailedPreconditionError, InvalidArgumentError
from tests.support.checkpoints import prompt_of
from tests.support.cluster import Cluster
from tests.support.constrained_requests import SCHEMA, check_text
from tests.support.jobs import ConstrainedJob

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = prompt_of(40, seed=3)
JSON = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
PARAMS = SamplingParams(temperature=1.0, seed=4, max_tokens=90, structured_outputs=JSON)


@pytest.mark.parametrize(
    "candidates",
    [
        {"n": 3},
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in ({}, {"n": 2, "best_of": 4}, {"logprobs": 1})
        ),
    ],
)
async def test_answers_and_streams(shared_cluster: Cluster, candidates: dict[str, int]) -> None:
    params = replace(PARAMS, **candidates)
    async with AsyncClient(shared_cluster.router.address) as client:
        whole = await client.generate(PROMPT, params, timeout_s=60)
        for completion in whole.outputs:
            assert completion.finish_reason == "stop"
            assert completion.stop_reason is None
            check_text(JSON, completion.text)
        chunks = [chunk async for chunk in client.stream(PROMPT, params, timeout_s=60)]
    for completion in whole.outputs:
        own = [chunk for chunk in chunks if chunk.index == completion.index]
        assert [token for chunk in own for token in chunk.token_ids] == completion.token_ids
        assert "".join(chunk.text for chunk in own) == completion.text


async def test_tokens_are_those_of_masked_draws(shared_cluster: Cluster) -> None:
    async with AsyncClient(shared_cluster.router.address) as client:
        await ConstrainedJob(1).run(client)


async def test_what_cannot_be_served_is_refused_by_name(shared_cluster: Cluster) -> None:
    async with AsyncClient(shared_cluster.router.address) as client:
        with pytest.raises(InvalidArgumentError, match=r"structured_outputs\.regex"):
            await client.generate(PROMPT, {"structured_outputs": {"regex": "(a"}})
        with pytest.raises(InvalidArgumentError, match="extra_args"):
            await client.generate(PROMPT, {"extra_args": {"unknown": 1}})
        with pytest.raises(FailedPreconditionError, match="reasoning"):
            await client.generate(PROMPT, {"thinking_token_budget": 3})
