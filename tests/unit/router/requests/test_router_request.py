"""`prepare_request` and `tokenize_prompt`: specs of client requests, prompts that are too long."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.common.errors import FailedPreconditionError, InvalidArgumentError
from baton.common.request.generation import GenerationRequest
from baton.common.request.request_spec import ReasoningMarks, client_id_of
from baton.common.request.sampling_params import SamplingParams
from baton.v1 import common_pb2, generation_pb2, worker_pb2
from router.fleet.served_model import RequestLimits, ServedModel
from router.observe.request_record import RequestRecord
from router.requests.request import SpecMaker, prepare_request, tokenize_prompt
from router.requests.tokenizer import Tokenizer
from router.requests.validation import MAX_RETURNED_LOGPROBS, check_logprobs
from rpc.channels import MAX_MESSAGE_BYTES
from tests.support.running_router import tokenizer

MODEL = ServedModel.from_info(
    worker_pb2.GetInfoResponse(
        model="m", namespace=b"n", block_size=4, vocab_size=1000, eos_token_ids=[2]
    )
)
LIMITS = RequestLimits(vocab_size=1000, max_model_len=8, max_pool_tokens=16, max_candidates=4)


class UnreadableIds(Sequence):
    """Token ids that can be counted but not read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index):
        raise AssertionError("a token id was read")


async def test_too_many_token_ids_are_refused_without_reading_them():
    with pytest.raises(InvalidArgumentError, match="prompt has 8 tokens"):
        await tokenize_prompt(UnreadableIds(), tokenizer(), LIMITS)


async def test_text_too_long_for_any_tokens_is_refused_without_tokenizing(monkeypatch):
    strict = tokenizer()
    limit = 8 * strict.longest_token_chars
    with monkeypatch.context() as patch:
        patch.setattr(type(strict), "encode", None)
        with pytest.raises(InvalidArgumentError, match=f"text has {limit + 1} .* most {limit}$"):
            await tokenize_prompt("a" * (limit + 1), strict, LIMITS)


async def test_a_prompt_that_fits_is_accepted():
    assert await tokenize_prompt([5] * 7, tokenizer(), LIMITS) == (5,) * 7


async def test_a_text_to_truncate_may_be_longer_than_what_fits():
    few = tokenizer()
    text = "the dog sleeps " * 1000
    assert len(text) > 8 * few.longest_token_chars
    token_ids = few.encode(text)
    for truncate, kept in ((3, 3), (-1, 7)):
        expected = (token_ids[0], *token_ids[1 - kept :])  # the first is <s>
        assert await tokenize_prompt(text, few, LIMITS, truncate) == expected
    assert await tokenize_prompt(text, few, LIMITS, 1) == (token_ids[0],)
    with pytest.raises(InvalidArgumentError, match=r"text has 1048577 .* most 1048576$"):
        await tokenize_prompt("a" * (2**20 + 1), few, LIMITS, 3)


async def test_a_truncated_prompt_must_still_fit():
    with pytest.raises(InvalidArgumentError, match="prompt has 8 tokens"):
        await tokenize_prompt([5] * 20, tokenizer(), LIMITS, 8)
    assert await tokenize_prompt([1, 2, 3], tokenizer(), LIMITS, 8) == (1, 2, 3)
    assert await tokenize_prompt(range(20), tokenizer(), LIMITS, 2) == (18, 19)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [1000]}, "stop_token_ids is 1000; .* vocabulary size 1000"),
        ({"allowed_token_ids": [3, 1001]}, "allowed_token_ids is 1001"),
        ({"logit_bias": {1002: 1.0}}, "logit_bias is 1002"),
        ({"bad_words": ["fine", " "]}, "bad_words is ' '"),
    ],
)
async def test_tokens_outside_the_vocabulary_are_refused(params, message):
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        await prepare(SamplingParams(**params))


async def test_as_many_tokens_as_fit_are_generated():
    spec = (await prepare(SamplingParams(max_tokens=None, min_tokens=50))).spec
    assert (spec.params.max_tokens, spec.params.min_tokens) == (3, 3)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 20}, "logprobs is 20, which allows at most 47662 tokens .* is 47663"),
        ({"logprobs": 20, "n": 2}, "logprobs is 20, which allows at most 47662 .* is 95326"),
        (
            {"logprobs": 20, "prompt_logprobs": 20},
            "logprobs is 20, which allows at most 47657 tokens .* beside prompt_logprobs 20;",
        ),
    ],
)
async def test_log_probabilities_that_no_message_can_hold_are_refused(params, message):
    long = replace(LIMITS, max_model_len=47663 + 5, max_pool_tokens=2**20)
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        await prepare(SamplingParams(max_tokens=2**17, **params), limits=long)
    await prepare(SamplingParams(max_tokens=47662 // 4, **params), limits=long)
    await prepare(SamplingParams(max_tokens=None, logprobs=19), limits=long)


async def test_the_prompts_of_a_request_share_its_log_probabilities():
    await prepare(SamplingParams(logprobs=5, max_tokens=256), limits=LARGE, num_prompts=64)
    most = 2**20 // 256 // 22
    await prepare(SamplingParams(logprobs=20, max_tokens=most), limits=LARGE, num_prompts=256)
    message = f"^logprobs is 20, which allows at most {most} tokens .* for each of 256 prompts; "
    with pytest.raises(InvalidArgumentError, match=message):
        await prepare(
            SamplingParams(logprobs=20, max_tokens=most + 1), limits=LARGE, num_prompts=256
        )
    message = f"^prompt_logprobs is 20, which allows at most {most} tokens of the prompt for each"
    with pytest.raises(InvalidArgumentError, match=message):
        await prepare(
            SamplingParams(prompt_logprobs=20, max_tokens=1), most + 1, LARGE, num_prompts=256
        )
    open_answer = await prepare(
        SamplingParams(logprobs=20, max_tokens=None), limits=LARGE, num_prompts=256
    )
    assert open_answer.spec.params.max_tokens == most


LARGE = RequestLimits(
    vocab_size=1000, max_model_len=2**18, max_pool_tokens=2**18, max_candidates=64
)


@pytest.mark.parametrize(
    ("params", "most"),
    [
        ({"n": 16}, 2**16),
        ({"logprobs": 20}, 2**20 // 22),
        ({"logprobs": 20, "n": 2}, 2**20 // 22 // 2),
        ({"logprobs": 0, "prompt_logprobs": 18}, (2**20 - 20 * 5) // 2),
        ({}, 2**18),
    ],
)
async def test_open_answers_are_as_long_as_one_response_can_hold(params, most):
    routed = await prepare(SamplingParams(**params, max_tokens=None), limits=LARGE)
    assert routed.spec.params.max_tokens == min(most, 2**18 - 5)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_the_most_log_probabilities_fit_in_a_message(num_top):
    num_tokens = MAX_RETURNED_LOGPROBS // (num_top + 2)
    check_logprobs(SamplingParams(logprobs=num_top, max_tokens=num_tokens), 5)
    ids = [2**18] * num_top
    details = common_pb2.TokenLogprobs(
        logprob=-1.0, rank=2**18, top_token_ids=ids, top_logprobs=[-1.0] * num_top
    )
    completion = generation_pb2.Completion(
        text="token " * num_tokens,
        token_ids=[2**18] * num_tokens,
        logprobs=[details] * num_tokens,
    )
    response = generation_pb2.GenerateResponse(completions=[completion])
    assert response.ByteSize() < MAX_MESSAGE_BYTES * 3 // 4


@pytest.mark.parametrize(
    ("params", "most"),
    [({"n": 16}, 2**16), ({"logprobs": 20, "n": 2}, 2**20 // 22 // 2), ({"logprobs": 0}, 2**17)],
)
async def test_a_default_length_is_at_most_what_one_response_can_hold(params, most):
    """The client did not ask for it, so it is no reason to refuse the request."""
    default = SamplingParams(**params, max_tokens=2**17, min_tokens=1)
    routed = await prepare(default, limits=LARGE, states_length=False)
    assert routed.spec.params == replace(default, max_tokens=most, seed=routed.spec.params.seed)


async def prepare(params, num_tokens=5, limits=LIMITS, num_prompts=1, *, states_length=True):
    prompt = [5] * num_tokens
    request = GenerationRequest(
        prompts=[prompt] * num_prompts,
        stated={"max_tokens": params.max_tokens} if states_length else {},
        request_id="r",
        priority=-3,
        cache_salt="s",
    )
    deadline = time.monotonic() + 10
    record = RequestRecord(request_id="r")
    maker = SpecMaker(tokenizer(), limits, MODEL.eos_token_ids)
    routed = await prepare_request(request, prompt, params, maker, MODEL, deadline, record)
    assert routed.spec.deadline == deadline
    return routed


async def test_the_spec_has_every_field_of_the_request():
    request = await prepare(SamplingParams(seed=7, max_tokens=2, stop_token_ids=[9]))
    spec = request.spec
    assert spec.prompt_token_ids == (5,) * 5
    assert spec.params == SamplingParams(seed=7, max_tokens=2, stop_token_ids=[9])
    assert spec.stop_token_ids == {2, 9}
    assert (spec.priority, spec.cache_salt) == (-3, "s")
    assert (spec.client_id, client_id_of(spec.for_attempt(2).request_id)) == ("r", "r")
    assert len({spec.request_id, spec.for_attempt(1).request_id, "r"}) == 3
    assert (len(request.block_keys), request.num_prompt_blocks) == (1, 2)


async def test_missing_parameters_are_filled_in():
    warm = (await prepare(SamplingParams(max_tokens=100, ignore_eos=True))).spec
    assert warm.params.seed is not None
    assert warm.params.max_tokens == 3  # the tokens that fit after the prompt
    assert not warm.stop_token_ids
    other = (await prepare(SamplingParams())).spec
    assert other.params.seed != warm.params.seed
    assert (await prepare(SamplingParams(temperature=0))).spec.params.seed == 0


async def prepare_text(params, marks=None):
    request = GenerationRequest(prompts=["ab"])
    deadline = time.monotonic() + 9
    maker = SpecMaker(tokenizer(), LIMITS, MODEL.eos_token_ids, marks)
    return await prepare_request(request, "ab", params, maker, MODEL, deadline, RequestRecord())


async def test_a_prediction_becomes_tokens_without_special_ones():
    request = await prepare_text(SamplingParams(prediction="the dog"))
    expected = tokenizer().encode("the dog", add_special_tokens=False)
    assert request.spec.prediction_token_ids == tuple(expected)
    assert request.spec.for_attempt(1).prediction_token_ids == tuple(expected)
    assert (await prepare_text(SamplingParams())).spec.prediction_token_ids == ()


@pytest.mark.parametrize(
    ("text", "num_prompts", "message"),
    [
        ("the dog " * 9, 1, "prediction has [0-9]+ tokens; it must have at most 8"),
        ("the dog " * 2, 4, "prediction has [0-9]+ tokens; it must have at most 2"),
        ("x" * 1000, 1, "prediction has 1000 characters; it must have at most"),
        ("a\ud800", 1, "prediction is not valid Unicode: lone surrogate at character 1"),
    ],
)
async def test_predictions_that_do_not_fit_are_refused_by_name(text, num_prompts, message):
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        await prepare(SamplingParams(prediction=text), num_prompts=num_prompts)


MARKS = ReasoningMarks(start_token_ids=(5,), end_token_ids=(6, 7))


@pytest.mark.parametrize(
    ("params", "marks", "expected"),
    [
        ({}, MARKS, None),
        ({}, None, None),
        ({"structured_outputs": {"regex": "a"}}, None, None),
        ({"structured_outputs": {"regex": "a"}}, MARKS, MARKS),
        ({"thinking_token_budget": 0}, MARKS, MARKS),
        ({"extra_args": {"a": 1}}, MARKS, None),
    ],
)
async def test_requests_that_depend_on_the_reasoning_part_get_its_marks(params, marks, expected):
    request = await prepare_text(SamplingParams(**params), marks)
    assert request.spec.reasoning == expected


async def test_a_thinking_budget_without_marks_is_refused():
    params = SamplingParams(thinking_token_budget=5)
    with pytest.raises(
        FailedPreconditionError,
        match=r"^thinking_token_budget is 5, .* must set --reasoning-start-str and",
    ):
        await prepare_text(params)


async def test_marks_that_the_model_has_no_logits_for_are_refused():
    params = SamplingParams(thinking_token_budget=5)
    marks = ReasoningMarks(start_token_ids=(5,), end_token_ids=(1000,))
    with pytest.raises(FailedPreconditionError, match="have the token 1000, which the model"):
        await prepare_text(params, marks)


@pytest.mark.parametrize("params", [{"bad_words": ["dog" * 20] * 100}, {"prediction": "a" * 5000}])
async def test_long_texts_of_parameters_are_encoded_in_a_thread(params, monkeypatch):
    threads = []
    encode = Tokenizer._encode_batch
    monkeypatch.setattr(
        Tokenizer,
        "_encode_batch",
        lambda *args: threads.append(threading.current_thread()) or encode(*args),
    )
    await prepare(SamplingParams(bad_words=["dog"], prediction="a"), limits=LARGE)
    assert set(threads) == {threading.current_thread()}
    threads.clear()
    await prepare(SamplingParams(**params), limits=LARGE)
    assert threads
    assert threading.current_thread() not in threads
