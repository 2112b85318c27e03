"""OpenAI's client drives the Responses API over real tiers."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from baton import AsyncClient, SamplingParams
from tests.support.client_answers import whitespace_bias
from tests.support.http_cluster import MODEL, HttpCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "How do I open a file? If it cannot be opened, an error is raised. "
GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
SEEDED = {
    "model": MODEL,
    "max_output_tokens": 80,
    "extra_body": {"seed": 2, "logit_bias": whitespace_bias()},
}
ADD = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]


async def test_a_text_whole_streamed_and_over_grpc(http_cluster: HttpCluster) -> None:
    fields = {**GREEDY, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await http_cluster.openai.responses.create(
        input=TEXT, instructions="Be short.", **fields
    )
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    texts, kinds = [], []
    stream = await http_cluster.openai.responses.create(
        input=TEXT, instructions="Be short.", stream=True, **fields
    )
    async for event in stream:
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            texts.append(event.delta)
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    assert "".join(texts) == whole.output_text == event.response.output_text
    assert event.response.usage.output_tokens == whole.usage.output_tokens == 12
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": TEXT}]
    async with AsyncClient(http_cluster.cluster.router.address) as client:
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
        expected = await client.chat(chat, params, timeout_s=60)
    (output,) = expected.outputs
    assert whole.output_text == output.text
    found = [entry.logprob for entry in whole.output[0].content[0].logprobs]
    own = zip(output.logprobs, output.token_ids, strict=True)
    assert found == pytest.approx([each[token].logprob for each, token in own], abs=1e-4)


async def test_the_streaming_helper(http_cluster: HttpCluster) -> None:
    async with http_cluster.openai.responses.stream(input=TEXT, **GREEDY) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    whole = await http_cluster.openai.responses.create(input=TEXT, **GREEDY)
    assert final.output_text == whole.output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
async def test_calls_and_their_results(http_cluster: HttpCluster, choice) -> None:
    fields = {**SEEDED, "tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False}
    first = await http_cluster.openai.responses.create(input=TEXT, **fields)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
    assert json.loads(call.arguments)["a"] in (1, 2)
    stream = await http_cluster.openai.responses.create(input=TEXT, stream=True, **fields)
    pieces = [event async for event in stream]
    deltas = [e.delta for e in pieces if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    history = [
        {"role": "user", "content": TEXT},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    final = await http_cluster.openai.responses.create(
        input=history, tools=[ADD], tool_choice="none", **GREEDY
    )
    assert final.output_text


async def test_parsed_texts(http_cluster: HttpCluster) -> None:
    parsed = await http_cluster.openai.responses.parse(input=TEXT, text_format=Place, **SEEDED)
    assert parsed.output_parsed.city in ("Rome", "Oslo")


async def test_the_second_turn_finds_the_first_ones_blocks(http_cluster: HttpCluster) -> None:
    history = [{"role": "user", "content": TEXT * 3}]
    first = await http_cluster.openai.responses.create(input=history, **GREEDY)
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history.append({"role": "user", "content": "And then?"})
    second = await http_cluster.openai.responses.create(input=history, **GREEDY)
    assert (
        second.usage.input_tokens_details.cached_tokens
        >= first.usage.input_tokens // 16 * 16 - 16
        > 0
    )


async def test_what_is_not_stored_or_lacking_is_refused(http_cluster: HttpCluster) -> None:
    for fields in ({"previous_response_id": "resp_1"}, {"background": True}, {"input": []}):
        with pytest.raises(openai.BadRequestError):
            await http_cluster.openai.responses.create(**{"input": TEXT, **GREEDY, **fields})
    with pytest.raises(openai.NotFoundError):
        await http_cluster.openai.responses.create(input=TEXT, model="unknown")


async def test_a_client_that_leaves_frees_everything(http_cluster: HttpCluster) -> None:
    stream = await http_cluster.openai.responses.create(
        model=MODEL, input=TEXT, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    await stream.close()
    await http_cluster.cluster.wait_pools_full()
