"""The requests of `vllm bench serve`, and the counts that it takes from the answers."""

import asyncio

import pytest

from tests.support.bench_requests import chat_body, completion_body, read_result
from tests.support.http_cluster import MODEL, HttpCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "Return the number of items in a container, and"
TOKENS = 10
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


async def result_of(http_cluster: HttpCluster, path: str, body):
    async with http_cluster.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        return await read_result(answer.aiter_raw())


@pytest.mark.parametrize(
    "extra",
    [
        {"ignore_eos": True},
        {"ignore_eos": True, **SAMPLING},
        {"ignore_eos": True, "best_of": 1, "use_beam_search": False, "seed": 0},
        {"ignore_eos": True, "logprobs": 1},
    ],
    ids=["plain", "sampling", "older", "logprobs"],
)
async def test_backend_openai(http_cluster: HttpCluster, extra) -> None:
    """`best_of` and `use_beam_search` are of older releases."""
    result = await result_of(
        http_cluster, "/v1/completions", completion_body(MODEL, TEXT, TOKENS, **extra)
    )
    assert result.text
    assert 1 <= result.num_pieces <= TOKENS
    assert result.usage["completion_tokens"] == TOKENS
    assert result.usage["prompt_tokens"] > 5


async def test_backend_openai_with_token_ids(http_cluster: HttpCluster) -> None:
    body = completion_body(MODEL, [40, 41, 42, 43], TOKENS, ignore_eos=True)
    result = await result_of(http_cluster, "/v1/completions", body)
    assert result.usage["prompt_tokens"] == 4
    assert result.usage["completion_tokens"] == TOKENS


@pytest.mark.parametrize(
    "extra",
    [{"ignore_eos": True}, {"ignore_eos": True, **SAMPLING}, {"stop": None, **SAMPLING}],
    ids=["plain", "sampling", "null"],
)
async def test_backend_openai_chat(http_cluster: HttpCluster, extra) -> None:
    result = await result_of(
        http_cluster, "/v1/chat/completions", chat_body(MODEL, TEXT, TOKENS, **extra)
    )
    assert result.text
    assert result.num_pieces >= 2
    assert 1 <= result.usage["completion_tokens"] <= TOKENS


async def test_many_at_once(http_cluster: HttpCluster) -> None:
    bodies = [completion_body(MODEL, f"{i} {TEXT}", TOKENS, ignore_eos=True) for i in range(12)]
    results = await asyncio.gather(
        *(result_of(http_cluster, "/v1/completions", body) for body in bodies)
    )
    assert {result.usage["completion_tokens"] for result in results} == {TOKENS}


async def test_the_tool_waits_for_the_server_with_these_calls(http_cluster: HttpCluster) -> None:
    models = await http_cluster.http.get("/v1/models")
    assert models.json()["data"][0]["id"] == MODEL
    assert (await http_cluster.http.get("/health")).status_code == 200
