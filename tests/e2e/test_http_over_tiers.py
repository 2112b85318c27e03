"""OpenAI's client through HTTP, router, prefill and decode: the tokens of `transformers`."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from baton import AsyncClient
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "tiny"
PROMPT = list(prompt_of(40, seed=5))
OTHER = list(prompt_of(30, seed=6))


@pytest_asyncio.fixture(loop_scope="session")
async def client(shared_cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    url = f"{shared_cluster.http_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_greedy_tokens_of_several_prompts(client: AsyncOpenAI) -> None:
    fields = {"ignore_eos": True, "return_token_ids": True}
    request = {"model": MODEL, "temperature": 0, "max_tokens": 12, "extra_body": fields}
    whole = await client.completions.create(prompt=[PROMPT, OTHER], **request)
    stream = await client.completions.create(prompt=[PROMPT, OTHER], stream=True, **request)
    streamed: dict[int, list[int]] = {0: [], 1: []}
    async for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids
    expected = [reference_greedy(tiny_checkpoint("llama"), each, 12) for each in (PROMPT, OTHER)]
    assert [choice.token_ids for choice in whole.choices] == expected
    assert [streamed[0], streamed[1]] == expected
    assert whole.usage.completion_tokens == 24


async def test_http_and_grpc_draw_the_same_tokens(
    client: AsyncOpenAI, shared_cluster: Cluster
) -> None:
    params = {"temperature": 0.9, "seed": 7, "max_tokens": 16, "n": 2, "top_p": 0.9}
    async with AsyncClient(shared_cluster.router.address) as grpc_client:
        by_grpc = await grpc_client.generate(PROMPT, params, timeout_s=60)
    by_http = await client.completions.create(
        model=MODEL, prompt=PROMPT, extra_body={"return_token_ids": True}, **params
    )
    assert [choice.token_ids for choice in by_http.choices] == [
        output.token_ids for output in by_grpc.outputs
    ]
    assert [choice.text for choice in by_http.choices] == [o.text for o in by_grpc.outputs]


async def test_an_echo_is_scored(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="naïve 😀", max_tokens=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text == "naïve 😀"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(each < 0 for each in choice.logprobs.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0


async def test_json_and_choices_are_enforced(client: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = await client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=64,
        seed=1,
        extra_body={"structured_outputs": {"json": schema, "disable_any_whitespace": True}},
    )
    assert answer.choices[0].text in ('{"a":true}', '{"a":false}')
    chosen = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=64, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert chosen.choices[0].text in ("yes", "no")
    formed = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, seed=1, extra_body={"response_format": shape}
    )
    assert formed.choices[0].text.startswith("{")


TOOL = {
    "type": "function",
    "function": {
        "name": "flip",
        "parameters": {
            "type": "object",
            "properties": {"up": {"type": "boolean"}},
            "required": ["up"],
            "additionalProperties": False,
        },
    },
}


async def test_a_chat_with_a_forced_call(client: AsyncOpenAI) -> None:
    choice = {"type": "function", "function": {"name": "flip"}}
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Flip it."}],
        "tools": [TOOL],
        "tool_choice": choice,
        "seed": 3,
        "temperature": 0.5,
        "max_tokens": 80,
    }
    whole = await client.chat.completions.create(**request)
    arguments = ""
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            arguments += delta.function.arguments
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "flip"
    assert call.function.arguments == arguments
    if whole.choices[0].finish_reason == "tool_calls":
        assert type(json.loads(arguments)["up"]) is bool


async def test_a_second_turn_finds_the_first_in_a_cache(client: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me of the fox. " * 4}]
    request = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    first = await client.chat.completions.create(messages=messages, **request)
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "And the dog?"})
    second = await client.chat.completions.create(messages=messages, **request)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > 0


async def test_clients_that_leave_free_every_tier(
    client: AsyncOpenAI, shared_cluster: Cluster
) -> None:
    request = {"model": MODEL, "max_tokens": 400, "extra_body": {"ignore_eos": True}}

    async def leave() -> None:
        stream = await client.completions.create(prompt=PROMPT, stream=True, **request)
        await anext(stream)
        await stream.close()

    await asyncio.gather(*(leave() for _ in range(4)))
    waiting = asyncio.ensure_future(client.completions.create(prompt=OTHER, **request))
    await asyncio.wait([waiting], timeout=0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await shared_cluster.wait_pools_full()
