"""`/v1/chat/completions` through OpenAI's client, over a real router and scripted workers."""

import json
from functools import cache

import openai
import pytest

from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from tests.support.fake_workers import EOS_TOKEN_ID, FakeDecode
from tests.support.running_http import running_http
from tests.support.running_router import script_of, tokenizer

TEXT = "The quick brown fox, naïve café 😀."
MODEL = "scripted"
USER = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}[tools {{ tools | length }}]{% endif %}"
    "{% if mood is defined %}[{{ mood }}]{% endif %}"
    "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@cache
def chat_template() -> ChatTemplate:
    return ChatTemplate(TemplateSource({"default": TemplateText(TEMPLATE, "test")}, {}))


def answering(text: str) -> FakeDecode:
    return FakeDecode([*script_of(text), EOS_TOKEN_ID])


def running_chat(*workers, **config):
    return running_http(*workers, chat_template=chat_template(), **config)


def prompt_text(decode: FakeDecode) -> str:
    return tokenizer().decode(decode.starts[-1].spec.prompt_token_ids, skip_special_tokens=False)


async def joined(stream) -> tuple[dict, list]:
    """The message that a stream's deltas make, and its chunks."""
    message = {"content": "", "reasoning": "", "tool_calls": {}, "finish_reason": None}
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += getattr(delta, "reasoning", None) or ""
            for call in delta.tool_calls or ():
                known = message["tool_calls"].setdefault(call.index, {"arguments": ""})
                if call.id is not None:
                    known |= {"id": call.id, "name": call.function.name, "type": call.type}
                known["arguments"] += call.function.arguments
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
    return message, chunks


async def test_a_chat_is_rendered_and_answered():
    decode = answering(TEXT)
    async with running_chat(decode) as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL,
            messages=USER,
            max_completion_tokens=99,
            reasoning_effort="low",
            extra_body={"chat_template_kwargs": {"mood": "calm"}},
        )
    assert prompt_text(decode) == "[user]Hi[calm][low][assistant]"
    assert decode.starts[0].spec.stopping.max_tokens == 99
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.content == TEXT
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    assert choice.message.reasoning_content is None
    assert choice.finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(script_of("[user]Hi[calm][low][assistant]"))
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    "content", ["the dog", [{"type": "text", "text": "the "}, {"type": "text", "text": "dog"}]]
)
async def test_a_prediction_reaches_the_workers_as_tokens(content):
    decode = answering(TEXT)
    async with running_chat(decode) as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL, messages=USER, prediction={"type": "content", "content": content}
        )
    assert answer.choices[0].message.content == TEXT
    (start,) = decode.starts
    expected = tokenizer().encode("the dog", add_special_tokens=False)
    assert list(start.spec.prediction_token_ids) == expected


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("the dog", "prediction"),
        ({}, "prediction.type is missing"),
        ({"type": "text", "content": "a"}, "prediction.type is 'text'; it must be one of content"),
        ({"type": "content"}, "prediction.content is missing"),
        ({"type": "content", "content": 5}, "prediction.content is 5; it must be a text"),
        (
            {"type": "content", "content": ["a"]},
            r"prediction.content\[0\] is 'a'; it must be a JSON",
        ),
        (
            {"type": "content", "content": [{"type": "image_url", "text": "a"}]},
            r"prediction.content\[0\].type is 'image_url'",
        ),
        (
            {"type": "content", "content": [{"type": "text"}]},
            r"prediction.content\[0\].text is missing",
        ),
        ({"type": "content", "content": "a " * 99999}, "prediction has [0-9]+ "),
    ],
)
async def test_a_malformed_prediction_is_refused_by_name(prediction, message):
    decode = answering(TEXT)
    async with running_chat(decode) as api:
        with pytest.raises(openai.BadRequestError, match=message):
            await api.openai.chat.completions.create(
                model=MODEL, messages=USER, extra_body={"prediction": prediction}
            )
    assert not decode.starts


async def test_a_stream_has_the_role_first_and_joined_equals_the_whole():
    async with running_chat(answering(TEXT)) as api:
        create = api.openai.chat.completions.create
        whole = await create(model=MODEL, messages=USER)
        stream = await create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        message, chunks = await joined(stream)
    assert message["content"] == TEXT
    assert message["finish_reason"] == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(not chunk.choices or not chunk.choices[0].delta.role for chunk in chunks[1:])
    assert chunks[-1].usage == whole.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_tokens_without_text_are_streamed_as_empty_content():
    async with running_chat(answering("")) as api:
        stream = await api.openai.chat.completions.create(model=MODEL, messages=USER, stream=True)
        chunks = [chunk async for chunk in stream]
    role, last = [chunk.choices[0] for chunk in chunks]
    assert (role.delta.role, role.finish_reason) == ("assistant", None)
    # `vllm bench serve` counts a stream without such a delta as a failed request.
    assert last.delta.to_dict() == {"content": ""}
    assert last.finish_reason == "stop"


async def test_an_answer_may_be_as_long_as_fits_unless_the_model_states_a_default():
    decode = answering(TEXT)
    async with running_chat(decode) as api:
        await api.openai.chat.completions.create(model=MODEL, messages=USER)
    assert decode.starts[0].spec.stopping.max_tokens > 4000
    decode = answering("ab")
    async with running_chat(decode, default_params={"max_tokens": 7}) as api:
        await api.openai.chat.completions.create(model=MODEL, messages=USER)
    assert decode.starts[0].spec.stopping.max_tokens == 7


async def test_logprobs_have_texts_and_bytes():
    async with running_chat(answering("abc 😀")) as api:
        create = api.openai.chat.completions.create
        answer = await create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2)
        stream = await create(
            model=MODEL, messages=USER, logprobs=True, top_logprobs=2, stream=True
        )
        _, chunks = await joined(stream)
    content = answer.choices[0].logprobs.content
    *text, end = content
    assert bytes(byte for entry in text for byte in entry.bytes).decode() == "abc 😀"
    assert end.token == "</s>"
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == content


async def test_n_candidates():
    decode = FakeDecode(script_of("abc"), others=[script_of("def")])
    async with running_chat(decode) as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL, messages=USER, n=2, max_tokens=1
        )
    first, second = (tokenizer().decode(script_of(text)[:1]) for text in ("abc", "def"))
    assert [choice.message.content for choice in answer.choices] == [first, second]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def test_calls_of_the_models_format():
    decode = answering(f"Let me see. {CALL}")
    async with running_chat(decode, tool_call_parser="hermes") as api:
        create = api.openai.chat.completions.create
        whole = await create(model=MODEL, messages=USER, tools=[TOOL])
        stream = await create(model=MODEL, messages=USER, tools=[TOOL], stream=True)
        message, _ = await joined(stream)
    assert "[tools 1]" in prompt_text(decode)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 1}
    assert call.id
    assert message["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["name"] == "add"
    assert json.loads(message["tool_calls"][0]["arguments"]) == {"a": 1}
    assert message["content"].strip() == choice.message.content.strip() == "Let me see."


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '[{"name": "add", "parameters": {"a": 1}}]'),
        ({"type": "function", "function": {"name": "add"}}, '{"a": 1}'),
    ],
)
async def test_forced_calls_need_no_parser(choice, text):
    decode = answering(text)
    async with running_chat(decode) as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL, messages=USER, tools=[TOOL], tool_choice=choice
        )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1}
    assert answer.choices[0].finish_reason == "tool_calls"
    assert decode.starts[0].spec.sampling.structured_outputs.json


async def test_no_tools_are_rendered_if_calls_are_forbidden():
    decode = answering(CALL)
    async with running_chat(decode, tool_call_parser="hermes") as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL, messages=USER, tools=[TOOL], tool_choice="none"
        )
    assert "[tools" not in prompt_text(decode)
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].finish_reason == "stop"


async def test_reasoning_is_apart_from_content_and_counted():
    decode = answering("<think>\nHm.\n</think>\n\nYes.")
    async with running_chat(decode, reasoning_parser="qwen3") as api:
        create = api.openai.chat.completions.create
        whole = await create(model=MODEL, messages=USER)
        stream = await create(model=MODEL, messages=USER, stream=True)
        message, _ = await joined(stream)
        hidden = await create(model=MODEL, messages=USER, extra_body={"include_reasoning": False})
    parts = whole.choices[0].message
    assert parts.reasoning.strip() == "Hm."
    assert parts.reasoning_content == parts.reasoning
    assert parts.content.strip() == "Yes."
    assert (message["reasoning"], message["content"]) == (parts.reasoning, parts.content)
    usage = whole.usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert hidden.choices[0].message.reasoning is None
    assert hidden.choices[0].message.content == parts.content


async def test_calls_that_a_template_leaves_out_are_text_of_their_message():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": "I add.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    written = "<|tool_call_start|>[add(a=1), add(a=1)]<|tool_call_end|>"
    for parser, text in (("lfm2", written), ("openai", ""), (None, "")):
        decode = answering("2.")
        async with running_chat(decode, tool_call_parser=parser) as api:
            await api.openai.chat.completions.create(model=MODEL, messages=messages)
        assert prompt_text(decode) == f"[user]Hi[assistant]I add.{text}[tool]2[assistant]"


HARMONY = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
ANALYSIS = "<|channel|>analysis<|message|>Hm."
NEXT = "<|end|><|start|>assistant<|channel|>"


async def test_messages_of_gpt_oss_are_reasoning_content_and_calls():
    call = 'commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    preamble = f"{NEXT}commentary<|message|>I add."
    async with running_chat(answering(f"{ANALYSIS}{preamble}{NEXT}{call}"), **HARMONY) as api:
        create = api.openai.chat.completions.create
        whole = await create(model=MODEL, messages=USER, tools=[TOOL])
        stream = await create(model=MODEL, messages=USER, tools=[TOOL], stream=True)
        message, _ = await joined(stream)
    (choice,) = whole.choices
    (made,) = choice.message.tool_calls
    assert (made.function.name, made.function.arguments) == ("add", '{"a": 1}')
    assert (choice.message.reasoning, choice.message.content) == ("Hm.", "I add.")
    assert choice.finish_reason == message["finish_reason"] == "tool_calls"
    assert (message["reasoning"], message["content"]) == ("Hm.", "I add.")
    assert message["tool_calls"][0]["arguments"] == '{"a": 1}'
    assert whole.usage.completion_tokens_details.reasoning_tokens == len(script_of("Hm."))


@pytest.mark.parametrize("text", [f"{ANALYSIS}{NEXT}final<|message|>{{}}", "{}"])
@pytest.mark.parametrize("is_forced", [True, False])
async def test_forms_of_gpt_oss_are_those_of_the_final_message(text, is_forced):
    form = {"response_format": {"type": "json_object"}}
    call = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}
    async with running_chat(answering(text), **HARMONY) as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL, messages=USER, **(call if is_forced else form)
        )
    message = answer.choices[0].message
    assert message.reasoning == ("Hm." if text != "{}" else None)
    if is_forced:
        assert [each.function.arguments for each in message.tool_calls] == ["{}"]
    else:
        assert message.content == "{}"


async def test_constrained_text_is_content_though_answers_begin_with_reasoning():
    create = {"model": MODEL, "messages": USER}
    form = {"response_format": {"type": "json_object"}}
    call = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}
    async with running_chat(answering('{"a": 1}'), reasoning_parser="deepseek_r1") as api:
        free = await api.openai.chat.completions.create(**create)
        formed = await api.openai.chat.completions.create(**create, **form)
        called = await api.openai.chat.completions.create(**create, **call)
    assert free.choices[0].message.reasoning == '{"a": 1}'
    assert formed.choices[0].message.content == '{"a": 1}'
    (made,) = called.choices[0].message.tool_calls
    assert made.function.arguments == '{"a": 1}'
    async with running_chat(answering("<think>a</think>{}"), reasoning_parser="deepseek_r1") as api:
        formed = await api.openai.chat.completions.create(**create, **form)
    assert (formed.choices[0].message.reasoning, formed.choices[0].message.content) == ("a", "{}")


@pytest.mark.parametrize(
    ("prefill", "text", "reasoning", "content"),
    [
        ("<think>a</think>", "<think>{}", None, "<think>{}"),
        ("<think>a", "b</think>{}", "b", "{}"),
        ("x", "<think>b</think>{}", "b", "{}"),
        ("x", "{}", None, "{}"),
    ],
)
async def test_a_form_begins_where_the_replicas_enforce_it(prefill, text, reasoning, content):
    messages = [*USER, {"role": "assistant", "content": prefill}]
    fields = {"continue_final_message": True, "structured_outputs": {"regex": ".*"}}
    async with running_chat(answering(text), reasoning_parser="deepseek_r1") as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL, messages=messages, extra_body=fields
        )
    message = answer.choices[0].message
    assert (message.reasoning, message.content) == (reasoning, content)


async def test_a_final_message_is_continued_and_echoed():
    decode = answering("def")
    messages = [*USER, {"role": "assistant", "content": "abc"}]
    fields = {"continue_final_message": True, "echo": True}
    async with running_chat(decode) as api:
        create = api.openai.chat.completions.create
        answer = await create(model=MODEL, messages=messages, extra_body=fields)
        stream = await create(model=MODEL, messages=messages, extra_body=fields, stream=True)
        message, _ = await joined(stream)
    assert prompt_text(decode) == "[user]Hi[assistant]abc"
    assert answer.choices[0].message.content == message["content"] == "abcdef"


async def test_response_format_and_token_ids():
    decode = answering("{}")
    async with running_chat(decode) as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL,
            messages=USER,
            response_format={"type": "json_object"},
            extra_body={"return_token_ids": True},
        )
    assert decode.starts[0].spec.sampling.structured_outputs.json_object
    assert answer.choices[0].token_ids == [*script_of("{}"), EOS_TOKEN_ID]
    assert answer.prompt_token_ids == script_of("[user]Hi[assistant]")


async def test_the_first_chunk_has_the_tokens_of_the_prompt():
    async with running_chat(answering("{}")) as api:
        stream = await api.openai.chat.completions.create(
            model=MODEL,
            messages=USER,
            stream=True,
            n=2,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        _, (first, *others) = await joined(stream)
    assert first.prompt_token_ids == script_of("[user]Hi[assistant]")
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in others)
    assert not any(hasattr(c, "prompt_token_ids") for chunk in others for c in chunk.choices)


async def test_only_allowed_tools_are_rendered_and_called():
    other = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    decode = answering('[{"name": "add", "parameters": {"a": 1}}]')
    async with running_chat(decode) as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL,
            messages=USER,
            tools=[other, TOOL],
            tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        )
    assert "[tools 1]" in prompt_text(decode)
    outputs = decode.starts[0].spec.sampling.structured_outputs
    assert '"add"' in outputs.json
    assert '"sub"' not in outputs.json
    assert [part.field for part in outputs.parts] == ["tools[1].function.parameters"]
    assert answer.choices[0].message.tool_calls[0].function.name == "add"


WRONG = {
    "messages": {"messages": []},
    "messages[0].role": {"messages": [{"role": "x", "content": "a"}]},
    "top_logprobs": {"top_logprobs": 1},
    "tool_choice": {"tool_choice": "sometimes"},
    "max_completion_tokens": {"max_completion_tokens": 0},
    "tool_choice.allowed_tools": {"tool_choice": {"type": "allowed_tools"}},
    "tool_choice.allowed_tools.tools[0].function.name": {
        "tools": [TOOL],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"tools": [{"type": "function", "function": {"name": "x"}}]},
        },
    },
    "tools": {"tools": [TOOL]},
    "tool_choice.function": {"tools": [TOOL], "tool_choice": {"type": "function"}},
    "chat_template": {"chat_template": "x"},
    "tools[0].type": {"tools": [{"type": "x"}]},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "chat_template_kwargs": {"chat_template_kwargs": {"messages": []}},
    "functions": {"functions": [{}]},
}


async def test_a_wrong_field_is_named():
    async with running_chat(answering("a")) as api:
        for param, fields in WRONG.items():
            with pytest.raises(openai.BadRequestError) as caught:
                await api.openai.chat.completions.create(
                    model=MODEL, messages=USER, extra_body=fields
                )
            assert caught.value.param == param


async def test_top_logprobs_out_of_range_are_named():
    async with running_chat(answering("a")) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await api.openai.chat.completions.create(
                model=MODEL, messages=USER, logprobs=True, top_logprobs=21
            )
    assert caught.value.param == "top_logprobs"


async def test_a_model_without_a_template_says_which_flag_sets_one():
    async with running_http(answering("a")) as api:
        with pytest.raises(openai.BadRequestError, match="--chat-template"):
            await api.openai.chat.completions.create(model=MODEL, messages=USER)


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.mark.parametrize("text", [CALL, '{"name": "Bob"}'])
async def test_an_answer_with_tools_and_a_form_is_a_call_or_has_the_form(text):
    decode = answering(text)
    async with running_chat(decode, tool_call_parser="hermes") as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL, messages=USER, tools=[TOOL], response_format=FORM
        )
    form = decode.starts[0].spec.sampling.structured_outputs
    assert "<tool_call>" in form.structural_tag
    assert [part.field for part in form.parts if part.is_hint] == ["tools[0].function.parameters"]
    choice = answer.choices[0]
    if text == CALL:
        assert choice.message.tool_calls[0].function.name == "add"
        assert choice.finish_reason == "tool_calls"
    else:
        assert (choice.message.content, choice.finish_reason) == (text, "stop")


async def test_a_forced_call_outweighs_a_form():
    decode = answering('[{"name": "add", "parameters": {"a": 1}}]')
    async with running_chat(decode) as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL, messages=USER, tools=[TOOL], tool_choice="required", response_format=FORM
        )
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    assert '"add"' in decode.starts[0].spec.sampling.structured_outputs.json


async def test_calls_of_strict_tools_are_enforced_under_auto():
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    decode = answering("Hm.")
    async with running_chat(
        decode, tool_call_parser="hermes", reasoning_parser="deepseek_r1"
    ) as api:
        create = api.openai.chat.completions.create
        answer = await create(model=MODEL, messages=USER, tools=[strict])
        await create(model=MODEL, messages=USER, tools=[TOOL])
    form, free = (start.spec.sampling.structured_outputs for start in decode.starts)
    assert json.loads(form.structural_tag)["format"]["type"] == "triggered_tags"
    assert not any(part.is_hint for part in form.parts)
    assert not free.structural_tag
    assert answer.choices[0].message.reasoning == "Hm."  # the text is not all of a form
