"""OpenAI's client drives the HTTP server over real tiers: completions and chats."""

import asyncio
import re
import uuid

import openai
import pytest
from pydantic import BaseModel, Field

from baton import AsyncClient, SamplingParams
from tests.support.client_answers import both_chats, both_completions, whitespace_bias
from tests.support.http_cluster import MODEL, HttpCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "Open the file and return a corresponding file object. If the file cannot be"
TIMEOUT_S = 60
CHAT = [
    {"role": "system", "content": "Describes functions."},
    {"role": "user", "content": [{"type": "text", "text": "How do I open a file?"}]},
]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"enum": ["one", "two"]},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
BIAS = whitespace_bias()
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])"
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9], "b": "two"\}\}\n</tool_call>'
PLACE = r'\{ ?"city" ?: ?"(Rome|Oslo)" ?, ?"size" ?: ?-?\d+ ?\}'

# Names of the requests' fields are those of `SamplingParams` as well.
SAME_OVER_GRPC = {
    "greedy": {"temperature": 0},
    "seed": {"seed": 7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "n": {"n": 3, "seed": 1},
    "best_of": {"n": 2, "best_of": 4, "seed": 2},
    "logprobs": {"logprobs": 3, "temperature": 0},
    "candidates' logprobs": {"logprobs": 2, "n": 2, "seed": 5},
    "stop": {"stop": [" file", "."], "seed": 3},
    "stop kept": {"stop": " file", "include_stop_str_in_output": True, "temperature": 0},
    "stop token": {"stop_token_ids": [13, 14, 15, 16], "seed": 4},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "temperature": 0,
    },
    "logit_bias": {"logit_bias": {"101": 100}, "max_tokens": 4, "temperature": 0},
    "allowed": {"allowed_token_ids": [101, 102], "seed": 1},
    "bad words": {"bad_words": [" file"], "temperature": 0},
    "min_tokens": {"temperature": 0, "min_tokens": 10, "logit_bias": {"1": 100}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"1": 100}, "max_tokens": 6},
    "priority": {"priority": -3, "temperature": 0},
    "cache_salt": {"cache_salt": "a", "temperature": 0},
    "truncation": {"truncate_prompt_tokens": 5, "temperature": 0},
}
OPENAI_NAMES = {
    *("temperature", "top_p", "n", "best_of", "seed", "logprobs", "stop", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
}


def fields_of(**fields):
    """The client's arguments: names that OpenAI does not have go to `extra_body`."""
    known = {name: value for name, value in fields.items() if name in OPENAI_NAMES}
    extra = {name: value for name, value in fields.items() if name not in OPENAI_NAMES}
    return {**known, "extra_body": {"return_token_ids": True, **extra}}


@pytest.mark.parametrize("name", SAME_OVER_GRPC)
async def test_completions_whole_streamed_and_over_grpc(
    http_cluster: HttpCluster, name: str
) -> None:
    stated = {"max_tokens": 12, **SAME_OVER_GRPC[name]}
    whole, choices = await both_completions(
        http_cluster.openai, model=MODEL, prompt=PROMPT, **fields_of(**stated)
    )
    options = {key: stated.pop(key) for key in ("priority", "cache_salt") if key in stated}
    if biases := stated.get("logit_bias"):
        stated["logit_bias"] = {int(token_id): bias for token_id, bias in biases.items()}
    async with AsyncClient(http_cluster.cluster.router.address) as client:
        expected = await client.generate(
            PROMPT, SamplingParams(**stated), timeout_s=TIMEOUT_S, **options
        )
    assert len(choices) == len(expected.outputs)
    for choice, output in zip(choices, expected.outputs, strict=True):
        assert choice["text"] == output.text
        assert choice["token_ids"] == output.token_ids
        assert choice["finish_reason"] == output.finish_reason
        if "logprobs" in stated:
            check_logprobs(choice["logprobs"], output)
    assert whole.usage.prompt_tokens == expected.usage.prompt_tokens
    assert whole.usage.completion_tokens == expected.usage.completion_tokens


def check_logprobs(found, output) -> None:
    own = [entry[token] for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    # Steps of several sizes round differently.
    assert found["token_logprobs"] == pytest.approx([each.logprob for each in own], abs=1e-4)
    for top, entry in zip(found["top_logprobs"], output.logprobs, strict=True):
        assert sorted(top.values()) == pytest.approx(
            sorted(each.logprob for each in entry.values()), abs=1e-4
        )


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": FORMAT, "logit_bias": BIAS}, PLACE),
        ({"response_format": {"type": "json_object"}, "logit_bias": BIAS, "seed": 3}, r"\{.*"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": DATE}, DATE),
        ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
        ({"guided_json": SCHEMA, "logit_bias": BIAS}, PLACE),
        ({"structured_outputs": {"regex": DATE}, "n": 2}, DATE),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_texts_of_a_form(http_cluster: HttpCluster, fields, pattern) -> None:
    _, choices = await both_completions(
        http_cluster.openai,
        model=MODEL,
        prompt=PROMPT,
        **{"seed": 1, "max_tokens": 60, "temperature": 0.7, **fields_of(**fields)},
    )
    for choice in choices:
        assert re.fullmatch(pattern, choice["text"], re.DOTALL), choice["text"]
        assert choice["finish_reason"] == "stop" or fields.get("response_format") != FORMAT


async def test_several_prompts_token_ids_and_echo(http_cluster: HttpCluster) -> None:
    texts = ["Return the", "Open a file"]
    answers = await http_cluster.http.post("/tokenize", json={"model": MODEL, "prompt": texts[0]})
    token_ids = answers.json()["tokens"]
    common = {"model": MODEL, "max_tokens": 5, "temperature": 0, "n": 2, "logprobs": 1}
    whole, choices = await both_completions(
        http_cluster.openai, prompt=texts, echo=True, seed=1, **common, extra_body={"min_tokens": 5}
    )
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice, text in zip(choices, [texts[0]] * 2 + [texts[1]] * 2, strict=True):
        assert choice["text"].startswith(text)
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert len(choice["logprobs"]["tokens"]) > 5
    of_ids, _ = await both_completions(
        http_cluster.openai, prompt=[token_ids], seed=1, **common, extra_body={"min_tokens": 5}
    )
    assert texts[0] + of_ids.choices[0].text == choices[0]["text"]
    assert whole.usage.completion_tokens == 20


async def test_the_second_turn_finds_the_first_ones_blocks(http_cluster: HttpCluster) -> None:
    chat = [{"role": "user", "content": f"{PROMPT} opened, an error is raised. " * 3}]
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 20, "extra_body": {"min_tokens": 20}}
    first = await http_cluster.openai.chat.completions.create(messages=chat, **fields)
    chat += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    stream = await http_cluster.openai.chat.completions.create(
        messages=chat, **fields, stream=True, stream_options={"include_usage": True}
    )
    *_, last = [chunk async for chunk in stream]
    found = last.usage.prompt_tokens_details.cached_tokens
    assert found >= (first.usage.prompt_tokens // 16 - 1) * 16 > 0
    assert last.usage.prompt_tokens > first.usage.prompt_tokens
    salted = await http_cluster.openai.chat.completions.create(
        messages=chat, **fields | {"extra_body": {"cache_salt": uuid.uuid4().hex}}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


async def test_continuous_counts(http_cluster: HttpCluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for create, prompt in (
        (http_cluster.openai.completions.create, {"prompt": PROMPT}),
        (http_cluster.openai.chat.completions.create, {"messages": CHAT}),
    ):
        stream = await create(
            model=MODEL,
            max_tokens=6,
            stream=True,
            stream_options=options,
            extra_body={"ignore_eos": True},
            **prompt,
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream]
        assert counts == sorted(counts)
        assert counts[-1] == 6


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "logprobs": True, "top_logprobs": 3},
        {"n": 2, "seed": 5},
        {"stop": [" the"], "seed": 1, "presence_penalty": 1.0},
        {"max_completion_tokens": 3, "temperature": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_chats_whole_streamed_and_over_grpc(http_cluster: HttpCluster, fields) -> None:
    _, choices = await both_chats(
        http_cluster.openai, model=MODEL, messages=CHAT, **{"max_tokens": 10, **fields}
    )
    stated = dict(fields)
    stated["max_tokens"] = stated.pop("max_completion_tokens", 10)
    if stated.get("logprobs"):
        stated["logprobs"] = stated.pop("top_logprobs")
    async with AsyncClient(http_cluster.cluster.router.address) as client:
        expected = await client.chat(CHAT, SamplingParams(**stated), timeout_s=TIMEOUT_S)
    for choice, output in zip(choices, expected.outputs, strict=True):
        assert choice["content"] == output.text
        assert choice["finish_reason"] == output.finish_reason
        if "logprobs" in stated:
            found = [entry["logprob"] for entry in choice["logprobs"]]
            own = zip(output.logprobs, output.token_ids, strict=True)
            assert found == pytest.approx([each[token].logprob for each, token in own], abs=1e-4)
            assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]} == {3}


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
async def test_calls_of_tools(http_cluster: HttpCluster, choice) -> None:
    extra = {"structured_outputs": {"regex": CALL}} if choice == "auto" else {}
    fields = {
        "model": MODEL,
        "tools": [ADD],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 2,
        "max_tokens": 80,
        "logit_bias": {} if choice == "auto" else BIAS,
        "extra_body": extra,
    }
    whole, ((only),) = await both_chats(http_cluster.openai, messages=CHAT, **fields)
    ((name, arguments),) = only["calls"]
    assert name == "add"
    assert 0 <= arguments["a"] <= 99
    assert arguments["b"] in ("one", "two")
    assert only["content"] == ""
    # With a named function, OpenAI's API says "stop"; this server has one reason for all calls.
    assert only["finish_reason"] == "tool_calls"
    message = whole.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
    chat = [*CHAT, message.model_dump(exclude_none=True), result]
    final = await http_cluster.openai.chat.completions.create(
        model=MODEL, messages=chat, tools=[ADD], tool_choice="none", max_tokens=4, temperature=0
    )
    assert final.choices[0].message.tool_calls is None
    assert final.choices[0].message.content


class Place(BaseModel):
    city: str = Field(pattern="^(Rome|Oslo)$")
    size: int = Field(ge=0, le=99)


async def test_the_clients_helpers(http_cluster: HttpCluster) -> None:
    fields = {"model": MODEL, "messages": CHAT, "seed": 2, "max_tokens": 60, "logit_bias": BIAS}
    parsed = await http_cluster.openai.chat.completions.parse(**fields, response_format=Place)
    place = parsed.choices[0].message.parsed
    assert place.city in ("Rome", "Oslo")
    async with http_cluster.openai.chat.completions.stream(
        **fields, response_format=Place
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == place
    tool = openai.pydantic_function_tool(Place)
    call = await http_cluster.openai.chat.completions.parse(
        **fields, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    assert isinstance(call.choices[0].message.tool_calls[0].function.parsed_arguments, Place)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_frees_everything(
    http_cluster: HttpCluster, streams: bool
) -> None:
    # Long and many, so that no machine is done before the client leaves.
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "n": 16}
    fields["extra_body"] = {"ignore_eos": True}
    if streams:
        stream = await http_cluster.openai.completions.create(**fields, stream=True)
        await anext(stream)
        await stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            await http_cluster.openai.with_options(timeout=0.2).completions.create(**fields)
    await http_cluster.cluster.wait_pools_full()


async def test_errors(http_cluster: HttpCluster) -> None:
    create = http_cluster.openai.completions.create
    for param, fields in {
        "temperature": {"temperature": -1.0},
        "suffix": {"suffix": "x"},
        "n": {"n": 100000},
        "structured_outputs": {"extra_body": {"guided_regex": "(a"}},
        "logit_bias": {"logit_bias": {"999999": 1}},
        "prompt": {"prompt": ""},
        "best_of": {"best_of": 0},
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**{"model": MODEL, "prompt": "a", **fields})
        assert caught.value.body["type"] == "invalid_request_error"
        assert (caught.value.param or "").startswith(param), caught.value
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="unknown", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await create(model=MODEL, prompt="word " * 2000)


async def test_models_health_and_embeddings(http_cluster: HttpCluster) -> None:
    models = await http_cluster.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await http_cluster.openai.models.retrieve(MODEL)).object == "model"
    with pytest.raises(openai.APIStatusError) as caught:
        await http_cluster.openai.embeddings.create(model=MODEL, input="a")
    assert caught.value.status_code == 501
    for path in ("/health", "/ready", "/version", "/openapi.json"):
        assert (await http_cluster.http.get(path)).status_code == 200
    texts = await http_cluster.http.post(
        "/tokenize", json={"model": MODEL, "prompt": "Open the file"}
    )
    back = await http_cluster.http.post(
        "/detokenize", json={"model": MODEL, "tokens": texts.json()["tokens"]}
    )
    assert back.json()["prompt"].endswith("Open the file")


async def test_many_clients_at_once(http_cluster: HttpCluster) -> None:
    """Answers do not mix: each equals the answer to the same request alone."""
    params = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    prompts = [f"{PROMPT} {index}" for index in range(8)]
    create = http_cluster.openai.completions.create
    alone = [(await create(prompt=prompt, **params)).choices[0].text for prompt in prompts]
    together = await asyncio.gather(*(create(prompt=prompt, **params) for prompt in prompts))
    assert [answer.choices[0].text for answer in together] == alone
