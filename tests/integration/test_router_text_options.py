"""Options of text and defaults, through a real router and scripted workers."""

import grpc
import pytest

from baton.v1 import common_pb2, generation_pb2
from router.requests.tokenizer import Tokenizer
from tests.support.fake_workers import EOS_TOKEN_ID, FakeDecode, FakePrefill, running_workers
from tests.support.running_router import (
    PROMPT_IDS,
    request,
    running_router,
    script_of,
    text_of,
    token_ids_of,
    tokenizer,
)

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


async def generated(message, script, **router_options):
    """Returns the responses, the requests that prefill got, and those that decode got."""
    prefill, decode = FakePrefill(script), FakeDecode(script)
    async with (
        running_workers(prefill, decode),
        running_router(prefill, decode, **router_options) as router,
    ):
        responses = await router.generate(message)
        whole = await router.stub.Generate(message)
    assert whole.completions[0].text == text_of(responses)
    assert list(whole.completions[0].token_ids) == token_ids_of(responses)
    return responses, prefill.requests, [start.spec for start in decode.starts]


async def test_the_text_may_include_the_stop_text():
    message = request(stop=["ck br", "never"], max_tokens=100, include_stop_str_in_output=True)
    responses, _, _ = await generated(message, script_of("abc quick brown fox ") * 9)
    assert text_of(responses) == "abc quick br"
    assert responses[-1].matched_stop.text == "ck br"


async def test_a_stop_text_counts_only_after_min_tokens():
    script = script_of("a.b.c.d.e.f.g.h")
    assert len(script) == 15
    for min_tokens, text in ((0, "a"), (1, "a"), (2, "a.b"), (4, "a.b.c"), (5, "a.b.c")):
        message = request(stop=["."], max_tokens=15, min_tokens=min_tokens)
        responses, (first, *_), _ = await generated(message, script)
        assert text_of(responses) == text
        assert responses[-1].finish_reason == STOP
        assert len(token_ids_of(responses)) > min_tokens
        assert first.stopping.min_tokens == min_tokens


@pytest.mark.parametrize(("skip", "include"), [(True, True), (False, True), (False, False)])
async def test_special_tokens_have_text_if_asked_for(skip, include):
    bos = tokenizer().encode("<s>", add_special_tokens=False)
    script = [*script_of("one"), *bos, *script_of(" two"), EOS_TOKEN_ID]
    message = request(max_tokens=50, include_stop_str_in_output=include)
    message.text_params.skip_special_tokens = skip
    responses, _, _ = await generated(message, script)
    ending = tokenizer().decode([EOS_TOKEN_ID], skip) if include else ""
    assert text_of(responses) == ("one two" if skip else "one<s> two") + ending
    assert responses[-1].matched_stop.token_id == EOS_TOKEN_ID


async def test_without_detokenization_the_router_decodes_nothing(monkeypatch):
    message = request(max_tokens=6)
    message.text_params.detokenize = False
    monkeypatch.setattr(Tokenizer, "decode", None)
    responses, _, _ = await generated(message, [300] * 9)
    assert text_of(responses) == ""
    assert token_ids_of(responses) == [300] * 6
    assert responses[-1].finish_reason == LENGTH


@pytest.mark.parametrize(("truncate", "kept"), [(7, 7), (100, 40), (None, 40)])
async def test_a_prompt_is_truncated_to_its_last_tokens(truncate, kept):
    message = request(max_tokens=2)
    if truncate is not None:
        message.text_params.truncate_prompt_tokens = truncate
    responses, _, (start, *_) = await generated(message, [300] * 9)
    assert tuple(start.prompt_token_ids) == PROMPT_IDS[-kept:]
    assert responses[-1].usage.prompt_tokens == kept


async def test_a_long_text_is_truncated_to_what_leaves_room_for_a_token():
    decode = FakeDecode([300] * 9, max_model_len=60)
    text = "the quick brown fox " * 5000
    message = request(text, max_tokens=None)
    message.text_params.truncate_prompt_tokens = -1
    async with running_workers(decode), running_router(decode) as router:
        responses = await router.generate(message)
    (start,) = decode.starts
    bos, *others = tokenizer().encode(text)
    assert list(start.spec.prompt_token_ids) == [bos, *others[-58:]]
    assert start.spec.stopping.max_tokens == 1
    assert len(token_ids_of(responses)) == 1


async def test_bad_words_go_to_the_workers_as_tokens():
    message = request(max_tokens=3)
    message.sampling.bad_words.extend(["dog", "the dog"])
    _, (first, *_), (start, *_) = await generated(message, [300] * 9)
    expected = tokenizer().encode_bad_words(["dog", "the dog"])
    for spec in (first, start):
        assert tuple(tuple(each.ids) for each in spec.bad_words_token_ids) == expected


async def test_all_rules_reach_both_tiers():
    message = request(max_tokens=3, min_tokens=2, stop_token_ids=[9])
    message.sampling.MergeFrom(
        common_pb2.SamplingParams(
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias={300: 4.5},
            allowed_token_ids=[300, 9],
        )
    )
    _, (first, *_), (start, *_) = await generated(message, [300] * 9)
    for spec in (first, start):
        sampling = common_pb2.SamplingParams()
        sampling.CopyFrom(spec.sampling)
        for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            assert getattr(sampling, name) == getattr(message.sampling, name)
        assert dict(sampling.logit_bias) == {300: 4.5}
        assert list(sampling.allowed_token_ids) == [300, 9]
        assert spec.stopping.min_tokens == 2


MARKS = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}


async def test_constraints_and_marks_of_the_reasoning_part_reach_both_tiers():
    message = request(max_tokens=3)
    outputs = common_pb2.StructuredOutputs(json='{"type":"integer"}', disable_any_whitespace=True)
    message.sampling.MergeFrom(
        common_pb2.SamplingParams(
            structured_outputs=outputs, thinking_token_budget=0, extra_args_json='{"a": [1, null]}'
        )
    )
    _, (first, *_), (start, *_) = await generated(message, [300] * 9, **MARKS)
    for spec in (first, start):
        assert spec.sampling.structured_outputs == outputs
        assert spec.sampling.HasField("thinking_token_budget")
        assert spec.sampling.extra_args_json == '{"a":[1,null]}'
        assert list(spec.reasoning.start_token_ids) == script_of("<think>")
        assert list(spec.reasoning.end_token_ids) == script_of("</think>")


async def test_requests_without_constraints_have_no_marks():
    _, (first, *_), (start, *_) = await generated(request(max_tokens=3), [300] * 9, **MARKS)
    assert not first.HasField("reasoning")
    assert not start.HasField("reasoning")


async def test_a_thinking_budget_needs_marks():
    decode = FakeDecode([300] * 9)
    message = request(max_tokens=3)
    message.sampling.thinking_token_budget = 5
    async with running_workers(decode), running_router(decode) as router:
        with pytest.raises(
            grpc.aio.AioRpcError, match="--reasoning-start-str and --reasoning-end"
        ) as info:
            await router.generate(message)
    assert info.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert not decode.starts


DEFAULTS = {"temperature": 0.5, "top_p": 0.75, "max_tokens": 5}


async def test_defaults_of_the_checkpoint_hold_for_unset_fields():
    message = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=PROMPT_IDS),
        sampling=common_pb2.SamplingParams(top_p=1.0),
    )
    responses, _, (start, *_) = await generated(message, [300] * 99, default_params=DEFAULTS)
    assert len(token_ids_of(responses)) == 5
    assert start.sampling.temperature == 0.5
    assert not start.sampling.HasField("top_p")  # stated as 1.0, which workers assume if unset


async def test_fewer_tokens_than_min_tokens_may_fit():
    decode = FakeDecode([300] * 99, max_model_len=50)
    message = request(PROMPT_IDS, max_tokens=40, min_tokens=30)
    async with running_workers(decode), running_router(decode) as router:
        responses = await router.generate(message)
    assert len(token_ids_of(responses)) == 10
    assert responses[-1].finish_reason == LENGTH
