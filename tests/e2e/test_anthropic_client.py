"""Anthropic's client drives the messages API over real tiers."""

from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel

from baton import AsyncClient, SamplingParams
from tests.support.client_answers import whitespace_bias
from tests.support.http_cluster import MODEL, HttpCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "How do I open a file? If it cannot be opened, an error is raised. "
USER = {"role": "user", "content": TEXT}
# Since release 2 the client has no argument for `temperature`, `top_p` and `top_k`.
GREEDY = {"model": MODEL, "max_tokens": 12, "extra_body": {"temperature": 0}}
SEEDED = {
    "model": MODEL,
    "max_tokens": 80,
    "extra_body": {"seed": 2, "logit_bias": whitespace_bias()},
}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9]\}\}\n</tool_call>'


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]


async def both(http_cluster: HttpCluster, **fields):
    """The message, whole and streamed, which must be the same."""
    whole = await http_cluster.anthropic.messages.create(**fields)
    async with http_cluster.anthropic.messages.stream(**fields) as stream:
        final = await stream.get_final_message()
    assert [_comparable(block) for block in final.content] == [
        _comparable(block) for block in whole.content
    ]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    return whole


def _comparable(block):
    return block.model_dump(exclude={"id"}, exclude_none=True)


async def test_a_text_whole_streamed_and_over_grpc(http_cluster: HttpCluster) -> None:
    message = await both(http_cluster, **GREEDY, system="Be short.", messages=[USER])
    assert message.stop_reason == "max_tokens"
    chat = [{"role": "system", "content": "Be short."}, USER]
    async with AsyncClient(http_cluster.cluster.router.address) as client:
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = await client.chat(chat, params, timeout_s=60)
    assert message.content[0].text == expected.outputs[0].text
    async with http_cluster.anthropic.messages.stream(
        **GREEDY, system="Be short.", messages=[USER]
    ) as stream:
        pieces = [text async for text in stream.text_stream]
    assert "".join(pieces) == message.content[0].text


async def test_sampling_fields_and_stop_sequences(http_cluster: HttpCluster) -> None:
    sampling = {"seed": 4, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    fields = {"model": MODEL, "max_tokens": 30, "messages": [USER], "extra_body": sampling}
    first = await both(http_cluster, **fields)
    text = first.content[0].text
    stop = text[5:9]
    stopped = await both(http_cluster, **fields, stop_sequences=[stop])
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == stop
    assert stopped.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "add"}, {"type": "auto"}]
)
async def test_calls_and_their_results(http_cluster: HttpCluster, choice) -> None:
    fields = {**SEEDED, "messages": [USER], "tools": [ADD]}
    choice = {**choice, "disable_parallel_tool_use": True}
    if choice["type"] == "auto":
        fields["extra_body"] = {"seed": 2, "structured_outputs": {"regex": CALL}}
    message = await both(http_cluster, **fields, tool_choice=choice)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert (call.type, call.name) == ("tool_use", "add")
    assert isinstance(call.input["a"], int)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    history = [
        USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    final = await http_cluster.anthropic.messages.create(
        **GREEDY, messages=history, tools=[ADD], tool_choice={"type": "none"}
    )
    assert final.content[0].type == "text"


async def test_parsed_answers_and_prefills(http_cluster: HttpCluster) -> None:
    parsed = await http_cluster.anthropic.messages.parse(
        **SEEDED, messages=[USER], output_format=Place
    )
    assert parsed.parsed_output.city in ("Rome", "Oslo")
    history = [USER, {"role": "assistant", "content": "Call the function"}]
    continued = await both(http_cluster, **GREEDY, messages=history)
    counted = await http_cluster.anthropic.messages.count_tokens(model=MODEL, messages=history)
    assert counted.input_tokens == prompt_tokens(continued.usage)


def prompt_tokens(usage) -> int:
    """Tokens of the prompt; Anthropic counts cached ones apart."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_the_second_turn_finds_the_first_ones_blocks(http_cluster: HttpCluster) -> None:
    history = [{"role": "user", "content": TEXT * 4}]
    first = await http_cluster.anthropic.messages.create(**GREEDY, messages=history)
    history += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And then?"},
    ]
    second = await both(http_cluster, **GREEDY, messages=history)
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first.usage) - 32 > 0
    counted = await http_cluster.anthropic.messages.count_tokens(model=MODEL, messages=history)
    assert counted.input_tokens == prompt_tokens(second.usage)


async def test_errors(http_cluster: HttpCluster) -> None:
    wrong = {"temperature": -1.0}
    for fields in ({"extra_body": wrong}, {"messages": []}, {"max_tokens": 0}):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await http_cluster.anthropic.messages.create(**{**GREEDY, "messages": [USER], **fields})
        assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        await http_cluster.anthropic.messages.create(
            **GREEDY | {"model": "unknown"}, messages=[USER]
        )
    models = [model.id async for model in http_cluster.anthropic.models.list()]
    assert models == [MODEL]


async def test_a_client_that_leaves_frees_everything(http_cluster: HttpCluster) -> None:
    async with http_cluster.anthropic.messages.stream(
        model=MODEL, max_tokens=400, messages=[USER], extra_body={"ignore_eos": True}
    ) as stream:
        async for event in stream:
            if event.type == "text":
                break
    await http_cluster.cluster.wait_pools_full()
