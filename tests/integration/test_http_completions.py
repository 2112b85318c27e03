"""`/v1/completions` through OpenAI's client, over a real router and scripted workers."""

import json

import openai
import pytest

from tests.support.fake_workers import EOS_TOKEN_ID, FakeDecode, FakePrefill
from tests.support.running_http import running_http
from tests.support.running_router import PROMPT_IDS, script_of, tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, naïve café 😀 and so on."
OTHER = "def add(left, right): return left + right"
MODEL = "scripted"


async def text_of_stream(stream) -> tuple[dict[int, str], list]:
    texts: dict[int, str] = {}
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts, chunks


async def test_a_whole_completion_has_text_usage_and_reason():
    script = script_of(TEXT)
    async with running_http(FakePrefill(script), FakeDecode(script)) as api:
        answer = await api.openai.completions.create(
            model=MODEL, prompt=list(PROMPT_IDS), max_tokens=len(script)
        )
    (choice,) = answer.choices
    assert choice.text == TEXT
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == len(PROMPT_IDS)
    assert answer.usage.completion_tokens == len(script)
    assert answer.usage.total_tokens == len(PROMPT_IDS) + len(script)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("options", [{}, {"logprobs": 1}])
async def test_a_stream_joined_equals_the_whole(options):
    script = script_of(TEXT)
    request = {"model": MODEL, "prompt": "one two three", "max_tokens": len(script), **options}
    async with running_http(FakeDecode(script)) as api:
        whole = await api.openai.completions.create(**request)
        stream = await api.openai.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
        texts, chunks = await text_of_stream(stream)
    assert texts == {0: whole.choices[0].text}
    *parts, last = chunks
    assert [chunk.choices[0].finish_reason for chunk in parts][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in parts[:-1])
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == []
    assert last.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


async def test_several_prompts_have_choices_in_their_order():
    script, other = script_of(TEXT)[:5], script_of(OTHER)[:5]
    request = {"model": MODEL, "n": 2, "max_tokens": 5}
    prompts = [list(PROMPT_IDS), [7, 8, 9]]
    async with running_http(FakeDecode(script, others=[other])) as api:
        whole = await api.openai.completions.create(prompt=prompts, **request)
        stream = await api.openai.completions.create(prompt=prompts, stream=True, **request)
        texts, _ = await text_of_stream(stream)
        of_texts = await api.openai.completions.create(prompt=["a b", "c"], **request)
    first, second = tokenizer().decode(script), tokenizer().decode(other)
    assert [(choice.index, choice.text) for choice in whole.choices] == [
        (0, first),
        (1, second),
        (2, first),
        (3, second),
    ]
    assert whole.usage.prompt_tokens == len(PROMPT_IDS) + 3
    assert whole.usage.completion_tokens == 20
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert len(of_texts.choices) == 4


async def test_stops_end_the_text():
    script = script_of("abc quick brown")
    async with running_http(FakeDecode(script + [300] * 50)) as api:
        by_text = await api.openai.completions.create(
            model=MODEL, prompt="x", stop=["ck br"], max_tokens=50
        )
        by_token = await api.openai.completions.create(
            model=MODEL, prompt="x", max_tokens=50, extra_body={"stop_token_ids": [300]}
        )
    assert by_text.choices[0].text == "abc qui"
    assert by_text.choices[0].finish_reason == "stop"
    assert by_text.choices[0].stop_reason == "ck br"
    assert by_token.choices[0].text == "abc quick brown"
    assert by_token.choices[0].stop_reason == 300


async def test_an_end_of_sequence_is_no_stop_reason():
    async with running_http(FakeDecode([50, EOS_TOKEN_ID])) as api:
        answer = await api.openai.completions.create(model=MODEL, prompt="x")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason is None


async def test_parameters_reach_the_workers_and_nulls_state_nothing():
    decode = FakeDecode([50] * 9)
    async with running_http(decode, default_params={"top_k": 7}) as api:
        await api.openai.completions.create(
            model=MODEL,
            prompt="x",
            max_tokens=3,
            temperature=0.5,
            top_p=0.25,
            seed=11,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias={"60": -5},
            user="someone",
            extra_body={
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "min_tokens": 2,
                "ignore_eos": True,
                "bad_words": ["fox"],
                "allowed_token_ids": [50, 60],
                "priority": 3,
                "cache_salt": "tenant",
                "logprobs": None,
                "top_k": None,
                "stop": None,
                "a_name_of_another_server": 1,
                "vllm_xargs": {"name": 1},
                "request_id": "mine",
            },
        )
    (start,) = decode.starts
    sampling, stopping = start.spec.sampling, start.spec.stopping
    assert sampling.temperature == 0.5
    assert sampling.top_p == 0.25
    assert sampling.seed == 11
    assert sampling.presence_penalty == 0.5
    assert sampling.frequency_penalty == 0.25
    assert dict(sampling.logit_bias) == {60: -5.0}
    assert sampling.min_p == 0.125
    assert sampling.repetition_penalty == 1.5
    assert list(sampling.allowed_token_ids) == [50, 60]
    assert json.loads(sampling.extra_args_json) == {"name": 1}
    assert sampling.top_k == 7
    assert not sampling.HasField("logprobs")
    assert (stopping.max_tokens, stopping.min_tokens) == (3, 2)
    assert stopping.ignore_eos
    assert start.spec.priority == 3
    assert start.spec.cache_salt == "tenant"
    assert start.spec.bad_words_token_ids
    assert start.spec.request_id.startswith("mine")


FORMS = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
    ({"guided_json": {"type": "object"}}, {"json": '{"type":"object"}'}),
    ({"structured_outputs": {"regex": "b", "json": None}}, {"regex": "b"}),
    ({"response_format": {"type": "text"}}, {}),
]


async def test_structured_outputs_reach_the_workers():
    decode = FakeDecode([50] * 9)
    async with running_http(decode) as api:
        for fields, form in FORMS:
            await api.openai.completions.create(
                model=MODEL, prompt="x", max_tokens=3, extra_body=fields
            )
            outputs = decode.starts[-1].spec.sampling.structured_outputs
            assert {field.name: value for field, value in outputs.ListFields()} == form


async def test_logprobs_in_the_legacy_shape():
    script = script_of("abc 😀")
    async with running_http(FakeDecode(script)) as api:
        answer = await api.openai.completions.create(
            model=MODEL, prompt="x", max_tokens=len(script), logprobs=2
        )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(script)
    assert len(logprobs.token_logprobs) == len(script)
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for token, own, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert token in top
        assert own <= 0


async def test_echo_begins_with_the_prompt_and_its_logprobs():
    script = script_of(TEXT)[:4]
    prompt = "The quick fox"
    num_prompt_tokens = 1 + len(script_of(prompt))
    async with running_http(FakeDecode(script)) as api:
        create = api.openai.completions.create
        plain = await create(model=MODEL, prompt=prompt, max_tokens=4, echo=True)
        scored = await create(model=MODEL, prompt=prompt, max_tokens=4, echo=True, logprobs=1)
        alone = await create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
        of_ids = await create(model=MODEL, prompt=script_of(prompt), max_tokens=4, echo=True)
        stream = await create(
            model=MODEL, prompt=prompt, max_tokens=4, echo=True, logprobs=1, stream=True
        )
        texts, _ = await text_of_stream(stream)
    whole = prompt + tokenizer().decode(script)
    assert plain.choices[0].text == whole
    assert of_ids.choices[0].text == whole
    assert scored.choices[0].text == whole
    assert texts == {0: whole}
    logprobs = scored.choices[0].logprobs
    assert len(logprobs.tokens) == num_prompt_tokens + 4
    assert logprobs.token_logprobs[0] is None
    places = zip(logprobs.tokens[1:], logprobs.text_offset[1:], strict=True)
    assert all(whole.startswith(token, offset) for token, offset in places)
    assert alone.choices[0].text == prompt
    assert len(alone.choices[0].logprobs.tokens) == num_prompt_tokens
    assert alone.usage.completion_tokens == 0


async def test_offsets_count_special_tokens_that_the_text_has():
    script = [*script_of("c"), EOS_TOKEN_ID, *script_of("d")]
    fields = {"model": MODEL, "prompt": "<s>a</s>b", "max_tokens": 3, "logprobs": 0}
    async with running_http(FakeDecode(script)) as api:
        create = api.openai.completions.create
        echoed = await create(**fields, echo=True, extra_body={"ignore_eos": True})
        extra = {"ignore_eos": True, "skip_special_tokens": False}
        written = await create(**fields, extra_body=extra)
    (choice,) = echoed.choices
    assert choice.text == "<s>a</s>bcd"
    assert choice.logprobs.tokens == ["<s>", "<s>", "a", "</s>", "b", "c", "</s>", "d"]
    assert choice.logprobs.text_offset == [0, 3, 3, 4, 8, 9, 10, 10]
    assert written.choices[0].text == "c</s>d"
    assert written.choices[0].logprobs.text_offset == [0, 1, 5]


async def test_a_request_has_no_more_prompts_than_can_run():
    async with running_http(FakeDecode(script_of(TEXT)), max_concurrent_requests=2) as api:
        with pytest.raises(openai.BadRequestError, match="prompts has 3 entries"):
            await api.openai.completions.create(model=MODEL, prompt=["a", "b", "c"])


async def test_token_ids_prompt_logprobs_and_running_counts():
    script = script_of(TEXT)[:4]
    async with running_http(FakeDecode(script)) as api:
        answer = await api.openai.completions.create(
            model=MODEL,
            prompt=[7, 8, 9],
            max_tokens=4,
            extra_body={"return_token_ids": True, "prompt_logprobs": 1},
        )
        stream = await api.openai.completions.create(
            model=MODEL,
            prompt="a b c",
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
        _, chunks = await text_of_stream(stream)
    (choice,) = answer.choices
    assert choice.token_ids == script
    assert choice.prompt_token_ids == [7, 8, 9]
    assert [
        entry if entry is None else set(entry) >= {str(i)}
        for i, entry in zip([7, 8, 9], choice.prompt_logprobs, strict=True)
    ] == [None, True, True]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [4, 4]
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


async def test_beam_search_takes_n_as_its_width():
    decode = FakeDecode([50] * 9)
    async with running_http(decode) as api:
        await api.openai.completions.create(
            model=MODEL, prompt="x", n=3, max_tokens=3, extra_body={"use_beam_search": True}
        )
    sampling = decode.starts[0].spec.sampling
    assert sampling.beam_search.beam_width == 3
    assert sampling.n == 3


WRONG: dict[str, dict] = {
    "top_p": {"top_p": 1.5},
    "temperature": {"temperature": "hot"},
    "logprobs": {"logprobs": 21},
    "suffix": {"suffix": "x"},
    "n": {"n": 65},
    "response_format": {"guided_regex": "a", "response_format": {"type": "json_object"}},
    "max_tokens": {"max_tokens": 0},
    "stop": {"stop": [""]},
    "logit_bias": {"logit_bias": {"x": 1}},
}
WRONG_PROMPTS = ["", [1, -1], [5000], ["a", [1]], [0] * 5000, {"a": 1}]


async def test_a_wrong_field_is_named():
    async with running_http(FakeDecode([50])) as api:

        async def param_of(**fields):
            with pytest.raises(openai.BadRequestError) as caught:
                await api.openai.completions.create(model=MODEL, prompt="x", extra_body=fields)
            assert caught.value.body["type"] == "invalid_request_error"
            return caught.value.param

        assert {name: await param_of(**fields) for name, fields in WRONG.items()} == {
            name: name for name in WRONG
        }
        for prompt in WRONG_PROMPTS:
            assert await param_of(prompt=prompt) == "prompt", prompt


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"temperature": 1e39}, "temperature is inf"), ({"top_p": 1e-46}, "top_p is 0.0")],
)
async def test_a_number_that_no_message_can_hold_reaches_no_worker(fields, message):
    decode = FakeDecode([50])
    async with running_http(decode) as api:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            await api.openai.completions.create(model=MODEL, prompt="x", **fields)
    assert caught.value.param in fields
    assert not decode.starts


async def test_an_unknown_model_is_404():
    async with running_http(FakeDecode([50])) as api:
        with pytest.raises(openai.NotFoundError) as caught:
            await api.openai.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "'scripted'" in caught.value.message
