"""Validation accepts what the contract allows and refuses the rest with a reason."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import InvalidArgumentError
from baton.common.request.generation import GenerationRequest
from baton.common.request.sampling_params import MAX_STOP_BYTES, MAX_STOPS, SamplingParams
from baton.v1 import common_pb2, generation_pb2
from router.fleet.served_model import RequestLimits
from router.generation_wire import request_from_proto
from router.requests.validation import (
    MAX_CACHE_SALT_CHARS,
    MAX_PROMPTS,
    MAX_REQUEST_ID_CHARS,
    check_prompt_length,
    check_token_ids,
    check_vocabulary,
    fitting_params,
    validate_request,
)

UINT32 = st.integers(0, 2**32 - 1)
LIMITS = st.builds(
    RequestLimits, st.just(100), st.integers(2, 500), st.integers(2, 500), st.integers(1, 64)
)


def message(**fields):
    return generation_pb2.GenerateRequest(**({"text": "hello"} | fields))


async def validated(message):
    return validate_request(await request_from_proto(message), {})


@given(
    sampling=st.builds(
        common_pb2.SamplingParams,
        temperature=st.floats(0, 100, width=32),
        top_k=UINT32,
        top_p=st.floats(0.015625, 1, width=32),
        seed=st.integers(0, 2**64 - 1),
    ),
    stopping=st.builds(
        common_pb2.StoppingParams,
        max_tokens=st.integers(1, 2**32 - 1),
        stop=st.lists(st.text("aé\n", min_size=1, max_size=20), max_size=MAX_STOPS),
        stop_token_ids=st.lists(UINT32, max_size=MAX_STOPS),
        ignore_eos=st.booleans(),
    ),
    token_ids=st.lists(UINT32, min_size=1, max_size=20),
    priority=st.integers(-(2**31), 2**31 - 1),
)
async def test_valid_requests_are_parsed_unchanged(sampling, stopping, token_ids, priority):
    request = generation_pb2.GenerateRequest(
        request_id="r",
        model="m",
        token_ids=common_pb2.TokenIds(ids=token_ids),
        sampling=sampling,
        stopping=stopping,
        priority=priority,
        cache_salt="s",
    )
    params = await validated(request)
    (prompt,) = (await request_from_proto(request)).prompts
    assert list(prompt) == token_ids
    for field in ("temperature", "top_k", "top_p", "seed"):
        assert getattr(params, field) == getattr(sampling, field)
    for field in ("max_tokens", "ignore_eos"):
        assert getattr(params, field) == getattr(stopping, field)
    assert params.stop == tuple(stopping.stop)
    assert params.stop_token_ids == tuple(stopping.stop_token_ids)


async def test_unset_fields_take_defaults_and_explicit_zeros_stay_zeros():
    assert await validated(message()) == SamplingParams()
    zeros = common_pb2.SamplingParams(temperature=0, top_k=0, seed=0)
    params = await validated(message(sampling=zeros))
    assert (params.temperature, params.top_k, params.seed) == (0.0, 0, 0)


def sampling(**fields):
    return {"sampling": common_pb2.SamplingParams(**fields)}


def prompts(*texts):
    return generation_pb2.Prompts(prompts=[generation_pb2.Prompt(text=text) for text in texts])


def stopping(**fields):
    return {"stopping": common_pb2.StoppingParams(**fields)}


BAD_REQUESTS = [
    ("request_id", {"request_id": "x" * (MAX_REQUEST_ID_CHARS + 1)}),
    ("cache_salt", {"cache_salt": "x" * (MAX_CACHE_SALT_CHARS + 1)}),
    ("text", {"text": ""}),
    ("prompt", {"text": None}),
    ("token_ids", {"text": None, "token_ids": common_pb2.TokenIds()}),
    ("prompts has 0 entries", {"text": None, "prompts": prompts()}),
    ("prompts has 257 entries", {"text": None, "prompts": prompts(*["a"] * (MAX_PROMPTS + 1))}),
    (r"prompts\[1\]\.text", {"text": None, "prompts": prompts("a", "")}),
    (r"prompts\[1\]\.prompt", {"text": None, "prompts": prompts("a", None)}),
    ("max_tokens", stopping(max_tokens=0)),
    ("temperature", sampling(temperature=-0.5)),
    ("temperature", sampling(temperature=math.nan)),
    ("temperature", sampling(temperature=math.inf)),
    ("top_p", sampling(top_p=0)),
    ("top_p", sampling(top_p=1.5)),
    ("top_p", sampling(top_p=math.nan)),
    ("stop", stopping(stop=["x"] * (MAX_STOPS + 1))),
    ("stop", stopping(stop=["x" * (MAX_STOP_BYTES + 1)])),
    ("stop", stopping(stop=[""])),
    ("stop_token_ids", stopping(stop_token_ids=range(MAX_STOPS + 1))),
    ("min_tokens", stopping(max_tokens=4, min_tokens=5)),
    ("min_p", sampling(min_p=1.5)),
    ("repetition_penalty", sampling(repetition_penalty=0)),
    ("logit_bias", sampling(logit_bias={3: math.nan})),
    ("bad_words", sampling(bad_words=[""])),
    ("logprobs", sampling(logprobs=21)),
    ("min_p", sampling(min_p=0.5, beam_search={"beam_width": 2})),
    ("stop", stopping(stop=["x"]) | {"text_params": common_pb2.TextParams(detokenize=False)}),
    (
        "truncate_prompt_tokens",
        {"text_params": common_pb2.TextParams(truncate_prompt_tokens=-2)},
    ),
]


@pytest.mark.parametrize(("field", "fields"), BAD_REQUESTS)
async def test_bad_requests_are_refused_by_the_name_of_their_field(field, fields):
    with pytest.raises(InvalidArgumentError, match=rf"^{field}\b"):
        await validated(message(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompts": ["a", "a\ud800"]},
        {"request_id": "\ud800"},
        {"cache_salt": "\ud800"},
        *({"stated": {name: ["\ud800"]}} for name in ("stop", "bad_words")),
        {"stated": {"prediction": "\ud800"}},
    ],
)
def test_lone_surrogates_are_refused(fields):
    request = GenerationRequest(**({"prompts": ["a"]} | fields))
    with pytest.raises(InvalidArgumentError, match=r"^the request cannot be sent: .* surrogates"):
        validate_request(request, {})


@given(st.lists(UINT32, max_size=20), st.integers(1, 2**32 - 1))
def test_token_ids_must_be_in_the_vocabulary(token_ids, vocab_size):
    bad = [token_id for token_id in token_ids if token_id >= vocab_size]
    if not bad:
        check_token_ids("ids", token_ids, vocab_size)
        return
    with pytest.raises(InvalidArgumentError, match=f"^ids is {max(bad)}; .* {vocab_size}$"):
        check_token_ids("ids", token_ids, vocab_size)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=[3, 9]),
        SamplingParams(allowed_token_ids=[9, 3]),
        SamplingParams(logit_bias={9: 1.0, 3: 2.0}),
    ],
)
def test_parameters_name_tokens_of_the_vocabulary(params):
    check_vocabulary(params, 10)
    field = next(
        name
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias")
        if getattr(params, name)
    )
    with pytest.raises(InvalidArgumentError, match=f"^{field} is 9; .* vocabulary size 9$"):
        check_vocabulary(params, 9)


@given(st.integers(0, 600), st.integers(1, 600), LIMITS)
def test_accepted_prompts_leave_room_for_at_least_one_token(num_tokens, max_tokens, limits):
    room = min(limits.max_model_len, limits.max_pool_tokens) - num_tokens
    if num_tokens == 0 or room < 1:
        with pytest.raises(InvalidArgumentError, match=r"^prompt (has|is empty)"):
            check_prompt_length(num_tokens, limits)
        return
    check_prompt_length(num_tokens, limits)
    params = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens)
    fitting = fitting_params(params, num_tokens, limits)
    assert fitting.max_tokens == fitting.min_tokens == min(max_tokens, room)
    assert fitting_params(SamplingParams(max_tokens=None), num_tokens, limits).max_tokens == room
