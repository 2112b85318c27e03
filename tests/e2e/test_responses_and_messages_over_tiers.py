"""The Responses API and Anthropic's API over HTTP, router, prefill and decode processes, through
the official clients: the text of the chat API."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.support.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "tiny"
USER = {"role": "user", "content": "Say something."}
GREEDY = {"temperature": 0, "ignore_eos": True}
PARAMETERS = {
    "type": "object",
    "properties": {"up": {"type": "boolean"}},
    "required": ["up"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(loop_scope="session")
async def openai_client(shared_cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    url = f"{shared_cluster.http_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def anthropic_client(shared_cluster: Cluster) -> AsyncIterator[AsyncAnthropic]:
    url = shared_cluster.http_url
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_three_apis_give_one_text_whole_and_streamed(
    openai_client: AsyncOpenAI, anthropic_client: AsyncAnthropic
) -> None:
    chat = await openai_client.chat.completions.create(
        model=MODEL, messages=[USER], max_tokens=12, extra_body=GREEDY
    )
    text = chat.choices[0].message.content
    response = await openai_client.responses.create(
        model=MODEL, input=[USER], max_output_tokens=12, extra_body=GREEDY
    )
    deltas = ""
    async for event in await openai_client.responses.create(
        model=MODEL, input=[USER], max_output_tokens=12, stream=True, extra_body=GREEDY
    ):
        deltas += event.delta if event.type == "response.output_text.delta" else ""
    request = {"model": MODEL, "messages": [USER], "max_tokens": 12, "extra_body": GREEDY}
    message = await anthropic_client.messages.create(**request)
    async with anthropic_client.messages.stream(**request) as stream:
        pieces = [piece async for piece in stream.text_stream]
        last = await stream.get_final_message()
    assert text
    assert response.output_text == deltas == message.content[0].text == "".join(pieces) == text
    assert (response.status, message.stop_reason) == ("incomplete", "max_tokens")
    usage = last.usage
    counted = await anthropic_client.messages.count_tokens(model=MODEL, messages=[USER])
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert counted.input_tokens == response.usage.input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == response.usage.output_tokens == 12


async def test_forced_calls_have_arguments_of_the_schema(
    openai_client: AsyncOpenAI, anthropic_client: AsyncAnthropic
) -> None:
    function = {"type": "function", "name": "flip", "parameters": PARAMETERS}
    response = await openai_client.responses.create(
        model=MODEL,
        input="Hi",
        tools=[function],
        tool_choice={"type": "function", "name": "flip"},
        max_output_tokens=200,
        extra_body={"temperature": 0},
    )
    (call,) = response.output
    assert call.name == "flip"
    if response.status == "completed":
        assert set(json.loads(call.arguments)) == {"up"}
    async with anthropic_client.messages.stream(
        model=MODEL,
        messages=[USER],
        tools=[{"name": "flip", "input_schema": PARAMETERS}],
        tool_choice={"type": "tool", "name": "flip"},
        max_tokens=200,
        extra_body={"temperature": 0},
    ) as stream:
        message = await stream.get_final_message()
    (block,) = message.content
    assert block.name == "flip"
    if message.stop_reason == "tool_use":
        assert set(block.input) == {"up"}
