"""Several models behind one router, and several prompts in one request."""

import json

import grpc
import pytest

from baton.common.request.request_spec import ReasoningStart
from baton.v1 import generation_pb2
from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from router.config.served_model import ServedModelConfig
from router.requests import validation
from tests.support.fake_workers import FakeDecode, running_workers
from tests.support.running_router import (
    request,
    running_router,
    script_of,
    text_of,
    tokenizer,
)

ONE, OTHER = "text of one model", "another text"


async def test_requests_go_to_the_replicas_of_the_model_that_they_name():
    one, other = FakeDecode(script_of(ONE)), FakeDecode(script_of(OTHER), model="org-other")
    async with running_workers(one, other):
        more = ServedModelConfig(
            model="x", served_model_name=("org-other", "alias"), decode=(other.address,)
        )
        async with running_router(one, decode=(one.address,), more_models=[more]) as router:
            *_, second = router.service.models
            await router.until(lambda: second.fleet.can_serve)
            for name, text in ("", ONE), ("scripted", ONE), ("org-other", OTHER), ("alias", OTHER):
                message = request([5], max_tokens=len(script_of(text)))
                message.model = name
                assert text_of(await router.generate(message)) == text
            model = await router.stub.GetModel(generation_pb2.GetModelRequest(model="alias"))
            assert model.model == "org-other"
            message = request([5])
            message.model = "unknown"
            with pytest.raises(grpc.aio.AioRpcError, match="serves 'scripted', 'org-other'"):
                await router.generate(message)


def prompts(*texts: str, **stopping: int) -> generation_pb2.GenerateRequest:
    message = request([5], **stopping)
    message.request_id = "r"
    message.prompts.prompts.extend(generation_pb2.Prompt(text=text) for text in texts)
    return message


async def test_several_prompts_share_the_limit_of_log_probabilities(monkeypatch):
    monkeypatch.setattr(validation, "MAX_RETURNED_LOGPROBS", 2 * 22)
    one, two = prompts("a", max_tokens=2), prompts("a", "b", max_tokens=2)
    one.sampling.logprobs = two.sampling.logprobs = 20
    decode = FakeDecode(script_of(ONE))
    async with running_workers(decode), running_router(decode) as router:
        await router.generate(one)
        message = r"prompts\[0\]: logprobs is 20, .* at most 1 tokens .* for each of 2 prompts"
        with pytest.raises(grpc.aio.AioRpcError, match=message):
            await router.generate(two)


async def test_several_prompts_stream_beside_each_other():
    texts = "a", "bcd efg", "ef"
    decode = FakeDecode(script_of(ONE))
    async with running_workers(decode), running_router(decode) as router:
        responses = await router.generate(prompts(*texts, max_tokens=len(script_of(ONE))))
    assert {response.prompt_index for response in responses} == {0, 1, 2}
    assert {client_id(start) for start in decode.starts} == {"r-0", "r-1", "r-2"}
    for index, text in enumerate(texts):
        own = [response for response in responses if response.prompt_index == index]
        assert text_of(own) == ONE
        assert own[-1].usage.prompt_tokens == len(tokenizer().encode(text))
        assert own[-1].usage.completion_tokens == len(script_of(ONE))


def client_id(start) -> str:
    return start.spec.request_id.partition("/")[0]


async def test_a_whole_response_has_one_response_per_prompt():
    decode = FakeDecode(script_of(ONE), others=[script_of(OTHER)])
    message = prompts("a", "bcd efg", max_tokens=1)
    message.sampling.n = 2
    async with running_workers(decode), running_router(decode) as router:
        response = await router.stub.Generate(message)
    assert response.request_id == "r"
    assert not response.completions
    for own, text in zip(response.responses, ("a", "bcd efg"), strict=True):
        tokens = [list(completion.token_ids) for completion in own.completions]
        assert tokens == [script_of(ONE)[:1], script_of(OTHER)[:1]]
        assert own.usage.prompt_tokens == len(tokenizer().encode(text))


async def test_a_bad_prompt_ends_all_and_is_named():
    decode = FakeDecode(script_of(ONE), pause_after=1)
    message = prompts("a", "b", max_tokens=5)
    message.prompts.prompts[1].token_ids.ids.append(2**31)
    async with running_workers(decode), running_router(decode) as router:
        with pytest.raises(grpc.aio.AioRpcError, match=r"prompts\[1\]: prompt token_ids") as caught:
            await router.generate(message)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await decode.changes.until(lambda: not decode.running)


async def test_special_tokens_are_left_out_of_a_prompt_on_request():
    decode = FakeDecode(script_of(ONE))
    async with running_workers(decode), running_router(decode) as router:
        for adds in (True, False):
            message = request("ab", max_tokens=1)
            message.add_special_tokens = adds
            await router.generate(message)
        lengths = [len(start.spec.prompt_token_ids) for start in decode.starts]
        expected = [
            len(router.model.tokenizer.encode("ab", add_special_tokens=adds))
            for adds in (True, False)
        ]
    assert lengths == expected


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}"


async def test_a_chat_becomes_a_prompt_by_the_template():
    decode = FakeDecode(script_of(ONE))
    template = ChatTemplate(TemplateSource({"default": TemplateText(TEMPLATE, "inline")}, {}))
    message = request("", max_tokens=1)
    message.chat.messages_json = '[{"role": "user", "content": "Hi"}]'
    message.chat.chat_template_kwargs_json = '{"mood": "glad"}'
    async with running_workers(decode), running_router(decode, chat_template=template) as router:
        await router.generate(message)
        (start,) = decode.starts
        expected = tokenizer().encode("<user>Higlad", add_special_tokens=False)
        assert list(start.spec.prompt_token_ids) == expected
        for text, error in ("[", "messages_json is not JSON"), ("[{}]", r"messages\[0\].role"):
            message.chat.messages_json = text
            with pytest.raises(grpc.aio.AioRpcError, match=error):
                await router.generate(message)


async def test_a_chat_needs_a_template():
    decode = FakeDecode(script_of(ONE))
    message = generation_pb2.GenerateRequest()
    message.chat.messages_json = '[{"role": "user", "content": "Hi"}]'
    async with running_workers(decode), running_router(decode) as router:
        with pytest.raises(grpc.aio.AioRpcError, match="no chat template") as caught:
            await router.generate(message)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_reasoning_parser_states_the_marks_of_the_reasoning_part():
    decode = FakeDecode(script_of(ONE))
    message = request("ab", max_tokens=1)
    message.sampling.thinking_token_budget = 4
    async with running_workers(decode), running_router(decode, reasoning_parser="qwen3") as router:
        await router.generate(message)
        (start,) = decode.starts
        marks = start.spec.reasoning
        encoded = [list(tokenizer().encode(text, False)) for text in ("<think>", "</think>")]
        assert [list(marks.start_token_ids), list(marks.end_token_ids)] == encoded


THINKING = "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ end }}"


@pytest.mark.parametrize(
    ("message", "end", "start"),
    [
        ("Say <think> to me", "", ReasoningStart.BEFORE),
        ("Say <think></think> to me", "", ReasoningStart.BEFORE),
        ("Hi", "<think>\n", ReasoningStart.INSIDE),
        ("Hi", "<think>\n\n</think>\n\n", ReasoningStart.AFTER),
    ],
)
async def test_only_the_end_of_a_chats_prompt_says_where_the_answer_begins(message, end, start):
    decode = FakeDecode(script_of(ONE))
    template = ChatTemplate(TemplateSource({"default": TemplateText(THINKING, "inline")}, {}))
    chat = request("", max_tokens=1)
    chat.chat.messages_json = json.dumps([{"role": "user", "content": message}])
    chat.chat.chat_template_kwargs_json = json.dumps({"end": end})
    chat.sampling.structured_outputs.regex = "a"
    options = {"chat_template": template, "reasoning_parser": "qwen3"}
    async with running_workers(decode), running_router(decode, **options) as router:
        await router.generate(chat)
        (started,) = decode.starts
        assert started.spec.reasoning.start == start.value
        chat.reasoning_start = 9
        chat.text = "a"
        with pytest.raises(grpc.aio.AioRpcError, match="reasoning_start is 9"):
            await router.generate(chat)
