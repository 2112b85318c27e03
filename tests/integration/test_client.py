"""`Client` and `AsyncClient` against a scripted server."""

import asyncio
import contextlib
import json

import pytest

from baton import AsyncClient, Client, SamplingParams, StructuredOutputs
from baton.common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.common.request.results import CompletionChunk, Timings, Usage
from baton.v1 import common_pb2
from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from tests.support.fake_generation import running_fake_generation
from tests.support.fake_workers import FakeDecode, running_workers
from tests.support.running_router import running_router, script_of, tokenizer

USAGE = Usage(prompt_tokens=4, cached_tokens=2, completion_tokens=3)
TIMINGS = Timings(route_ms=1.5, first_token_ms=20.0, total_ms=30.0)
CHUNKS = [
    CompletionChunk("r", 0, "Hello", [5]),
    CompletionChunk("r", 0, ", world", [6, 7], "stop", "!", USAGE, TIMINGS),
]


@pytest.fixture
def server():
    with running_fake_generation() as fake:
        yield fake


def test_generate_returns_the_whole_result(server):
    with Client(server.address) as client:
        result = client.generate("hi", request_id="mine")
    assert result.request_id == "mine"
    assert result.text == result.outputs[0].text == "Hello, world"
    assert result.token_ids == [5, 6, 7]
    assert (result.finish_reason, result.stop_reason) == ("stop", 7)
    assert (result.usage, result.timings) == (USAGE, TIMINGS)
    assert result.prompt_token_ids is None


async def test_async_generate_returns_the_same(server):
    with Client(server.address) as client:
        expected = client.generate([1, 2, 3], request_id="mine")
    async with AsyncClient(server.address) as client:
        assert await client.generate([1, 2, 3], request_id="mine") == expected
    assert expected.prompt_token_ids == [1, 2, 3]


def test_every_parameter_reaches_the_server(server):
    params = SamplingParams(
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        seed=0,
        max_tokens=9,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
    )
    with Client(server.address, model="m") as client:
        client.generate([7], params, request_id="r", priority=-1, cache_salt="s")
    (request,) = server.requests
    assert (request.request_id, request.model, request.cache_salt) == ("r", "m", "s")
    assert request.WhichOneof("prompt") == "token_ids"
    assert list(request.token_ids.ids) == [7]
    sampling, stopping = request.sampling, request.stopping
    # Zeros are sent, so that the server does not use its defaults.
    assert all(sampling.HasField(name) for name in ("temperature", "top_k", "top_p", "seed"))
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 3, 0.5)
    assert (stopping.max_tokens, stopping.ignore_eos) == (9, True)
    assert (list(stopping.stop), list(stopping.stop_token_ids)) == (["a", "b"], [4])
    assert (request.priority, request.HasField("priority")) == (-1, True)


def test_only_stated_parameters_are_sent(server):
    with Client(server.address) as client:
        client.generate("hi")
        client.generate("hi", {"top_k": 3, "min_tokens": 90, "detokenize": False})
        with pytest.raises(InvalidArgumentError, match="top_p is 2"):
            client.generate("hi", {"top_p": 2})
        with pytest.raises(TypeError, match="topp"):
            client.generate("hi", {"topp": 1})
    nothing, some = server.requests
    for name in ("sampling", "stopping", "text_params"):
        assert not getattr(nothing, name).ListFields()
    assert some.sampling == common_pb2.SamplingParams(top_k=3)
    assert some.stopping == common_pb2.StoppingParams(min_tokens=90)
    assert some.text_params == common_pb2.TextParams(detokenize=False)


FORMS = [
    SamplingParams(
        structured_outputs=StructuredOutputs(json={"type": "integer"}),
        thinking_token_budget=7,
        extra_args={"a": [1]},
    ),
    {
        "structured_outputs": {"json": {"type": "integer"}},
        "thinking_token_budget": 7,
        "extra_args": {"a": [1]},
    },
]


@pytest.mark.parametrize("params", FORMS)
def test_constraints_reach_the_server(server, params):
    with Client(server.address) as client:
        client.generate("hi", params)
        list(client.stream("hi", params))

    async def generate():
        async with AsyncClient(server.address) as client:
            await client.generate("hi", params)

    asyncio.run(generate())
    for request in server.requests:
        expected = common_pb2.StructuredOutputs(json='{"type":"integer"}')
        assert request.sampling.structured_outputs == expected
        assert request.sampling.thinking_token_budget == 7
        assert request.sampling.extra_args_json == '{"a":[1]}'
    assert len(server.requests) == 3


def test_malformed_constraints_are_refused_by_the_client(server):
    message = r"^structured_outputs\.json is not JSON"
    with Client(server.address) as client, pytest.raises(InvalidArgumentError, match=message):
        client.generate("hi", {"structured_outputs": {"json": "{"}})
    assert not server.requests


def test_none_in_a_mapping_leaves_the_value_to_the_server(server):
    unset = {"temperature": None, "stop": None, "logprobs": None, "beam_width": None}
    with Client(server.address) as client:
        client.generate("hi", unset)
        client.generate("hi", {"max_tokens": None})
    nothing, some = server.requests
    assert not nothing.sampling.ListFields()
    assert not nothing.stopping.ListFields()
    assert some.stopping == common_pb2.StoppingParams(max_tokens=2**32 - 1)


def test_an_unset_seed_stays_unset(server):
    with Client(server.address) as client:
        client.generate("hi", SamplingParams())
    assert not server.requests[0].sampling.HasField("seed")


def test_an_empty_token_list_is_sent_as_a_token_list(server):
    with Client(server.address) as client:
        client.generate([])
    assert server.requests[0].WhichOneof("prompt") == "token_ids"


PROMPTS = ["hi", [1, 2], {"prompt": "ho", "cache_salt": ""}]


def test_several_prompts_have_several_results(server):
    with Client(server.address) as client:
        results = client.generate(PROMPTS, {"top_k": 3}, request_id="r")
        (alone,) = client.generate(["hi"])
    assert [result.request_id for result in results] == ["r-0", "r-1", "r-2"]
    assert [result.prompt for result in results] == ["hi", None, "ho"]
    assert results[1].prompt_token_ids == [1, 2]
    assert alone.text == results[0].text == "Hello, world"
    request = server.requests[0]
    assert [prompt.WhichOneof("prompt") for prompt in request.prompts.prompts] == [
        "text",
        "token_ids",
        "text",
    ]
    assert request.sampling.top_k == 3


async def test_several_prompts_have_several_results_asynchronously(server):
    async with AsyncClient(server.address) as client:
        results = await client.generate(PROMPTS)
        assert [result.prompt for result in results] == ["hi", None, "ho"]
        chunks = [chunk async for chunk in client.stream(PROMPTS)]
    assert [(chunk.prompt_index, chunk.text) for chunk in chunks] == [
        (0, "Hello 0"),
        (1, "Hello 1"),
        (2, "Hello 2"),
    ]


def test_a_stream_that_lacks_a_prompts_end_is_an_error(server):
    with Client(server.address) as client:
        assert len(list(client.stream(["a", "b"]))) == 2
        with pytest.raises(InternalError, match="before"):
            list(client.stream(["truncate", "b"]))


def test_prompts_have_one_cache_salt(server):
    salted = {"prompt": "a", "cache_salt": "s"}
    with Client(server.address) as client:
        client.generate([salted, salted])
        client.generate(salted)
        assert [request.cache_salt for request in server.requests] == ["s", "s"]
        with pytest.raises(InvalidArgumentError, match="different cache_salt"):
            client.generate([salted, "b"])


MESSAGES = [{"role": "user", "content": "Grüße"}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def test_a_chat_reaches_the_server(server):
    with Client(server.address) as client:
        result = client.chat(
            MESSAGES,
            {"max_tokens": 7},
            tools=TOOLS,
            chat_template_kwargs={"enable_thinking": False},
            request_id="mine",
            priority=2,
        )
        assert list(client.stream_chat(MESSAGES, continue_final_message=True)) == CHUNKS
    assert (result.text, result.prompt, result.prompt_token_ids) == ("Hello, world", None, None)
    whole, streamed = server.requests
    assert (whole.request_id, whole.priority, whole.stopping.max_tokens) == ("mine", 2, 7)
    assert json.loads(whole.chat.messages_json) == MESSAGES
    assert json.loads(whole.chat.tools_json) == TOOLS
    assert json.loads(whole.chat.chat_template_kwargs_json) == {"enable_thinking": False}
    assert not whole.chat.documents_json
    assert not whole.chat.HasField("add_generation_prompt")
    assert streamed.chat.continue_final_message


async def test_a_chat_reaches_the_server_asynchronously(server):
    async with AsyncClient(server.address) as client:
        result = await client.chat(MESSAGES, add_generation_prompt=False)
        assert [chunk async for chunk in client.stream_chat(MESSAGES)] == CHUNKS
    assert result.text == "Hello, world"
    assert server.requests[0].chat.HasField("add_generation_prompt")
    assert not server.requests[0].chat.add_generation_prompt


async def test_a_router_answers_chats_and_several_prompts():
    script = script_of("an answer")
    decode = FakeDecode(script)
    source = TemplateSource({"default": TemplateText("{{ messages[0].content }}!", "here")}, {})
    async with (
        running_workers(decode),
        running_router(decode, chat_template=ChatTemplate(source)) as router,
        AsyncClient(router.server.address) as client,
    ):
        params = {"max_tokens": len(script)}
        chat = await client.chat([{"role": "user", "content": "Hi"}], params)
        several = await client.generate(["a", [5, 6]], params, request_id="r")
        chunks = [chunk async for chunk in client.stream(["a", "b"], params)]
    assert chat.text == "an answer"
    assert chat.usage.prompt_tokens == len(tokenizer().encode("Hi!", add_special_tokens=False))
    assert [result.text for result in several] == ["an answer"] * 2
    assert [result.request_id for result in several] == ["r-0", "r-1"]
    for index in (0, 1):
        own = [chunk.text for chunk in chunks if chunk.prompt_index == index]
        assert "".join(own) == "an answer"


def test_bad_chats_are_refused_by_the_client(server):
    with Client(server.address) as client:
        with pytest.raises(InvalidArgumentError, match="messages is not JSON data"):
            client.chat([{"content": object()}])
        with pytest.raises(InvalidArgumentError, match="cannot be sent"):
            client.chat([{"content": "\ud800"}])
        with pytest.raises(TypeError, match="temperature"):
            client.chat(MESSAGES, temperature=1)
    assert not server.requests


def test_stream_yields_the_chunks(server):
    with Client(server.address) as client:
        assert list(client.stream("hi")) == CHUNKS


async def test_async_stream_yields_the_chunks(server):
    async with AsyncClient(server.address) as client:
        assert [chunk async for chunk in client.stream("hi")] == CHUNKS


def test_parameters_of_candidates_and_beams_reach_the_server(server):
    with Client(server.address) as client:
        client.generate("hi", SamplingParams(n=2, best_of=3))
        client.generate("hi", SamplingParams(beam_width=4, length_penalty=0, early_stopping=True))
    drawn, searched = (request.sampling for request in server.requests)
    assert (drawn.n, drawn.best_of, drawn.HasField("beam_search")) == (2, 3, False)
    assert not searched.HasField("best_of")
    assert searched.beam_search == common_pb2.BeamSearch(
        beam_width=4,
        length_penalty=0,
        early_stopping=common_pb2.EARLY_STOPPING_FIRST_FINISHED,
    )


def test_a_stream_of_candidates_ends_with_the_last_one(server):
    with Client(server.address) as client:
        chunks = list(client.stream("hi", SamplingParams(n=2)))
    assert [(chunk.index, chunk.text) for chunk in chunks] == [
        (0, "Hello 0"),
        (1, "Hello 1"),
        (0, "!"),
        (1, "!"),
    ]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length", "length"]
    assert [chunk.score for chunk in chunks] == [None, None, -0.5, -1.5]
    assert [chunk.usage for chunk in chunks] == [None, None, None, USAGE]
    assert [chunk.timings for chunk in chunks] == [None, None, None, TIMINGS]


def test_a_stream_that_lacks_a_candidates_end_is_an_error(server):
    with Client(server.address) as client, pytest.raises(InternalError, match="before"):
        list(client.stream("truncate", SamplingParams(n=2)))


def test_leaving_a_stream_cancels_the_request(server):
    with Client(server.address) as client:
        for _ in client.stream("hang"):
            break
        assert server.cancelled.wait(10)


async def test_closing_an_async_stream_cancels_the_request(server):
    async with AsyncClient(server.address) as client:
        async with contextlib.aclosing(client.stream("hang")) as stream:
            await anext(stream)
        assert await asyncio.to_thread(server.cancelled.wait, 10)


def test_a_truncated_stream_is_an_error(server):
    with Client(server.address) as client, pytest.raises(InternalError, match="before"):
        list(client.stream("truncate"))


async def test_a_truncated_async_stream_is_an_error(server):
    async with AsyncClient(server.address) as client:
        with pytest.raises(InternalError, match="before"):
            [chunk async for chunk in client.stream("truncate")]


def test_errors_are_typed(server):
    with Client(server.address) as client:
        with pytest.raises(ResourceExhaustedError, match="the queue is full"):
            client.generate("fail")
        with pytest.raises(UnavailableError, match="no replica is left"):
            list(client.stream("fail"))
        with pytest.raises(DeadlineExceededError):
            list(client.stream("hang", timeout_s=0.3))


async def test_async_errors_are_typed(server):
    async with AsyncClient(server.address) as client:
        with pytest.raises(ResourceExhaustedError, match="the queue is full"):
            await client.generate("fail")
        with pytest.raises(UnavailableError, match="no replica is left"):
            [chunk async for chunk in client.stream("fail")]
        with pytest.raises(DeadlineExceededError):
            [chunk async for chunk in client.stream("hang", timeout_s=0.3)]


def test_an_absent_server_is_unavailable(server):
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError):
        client.generate("hi", timeout_s=10)


@pytest.mark.parametrize("prompt", ["\ud800", [-1], [2**32]])
def test_a_prompt_that_the_protocol_cannot_encode_is_refused(server, prompt):
    with Client(server.address) as client, pytest.raises(InvalidArgumentError):
        client.generate(prompt)


def test_texts_are_tokenized_and_detokenized(server):
    with Client(server.address) as client:
        assert client.tokenize("ab") == [1, 97, 98]
        assert client.tokenize("ab", add_special_tokens=False) == [97, 98]
        assert client.detokenize([97, 98]) == "ab"


async def test_texts_are_tokenized_and_detokenized_asynchronously(server):
    async with AsyncClient(server.address) as client:
        assert await client.tokenize("ab") == [1, 97, 98]
        assert await client.detokenize([97, 98]) == "ab"


async def test_get_model_describes_the_model(server):
    with Client(server.address) as client:
        model = client.get_model()
    assert (model.name, model.max_model_len, model.eos_token_ids) == ("fake", 64, (2,))
    async with AsyncClient(server.address) as client:
        assert await client.get_model() == model
