"""Checks of a request before the engine queues it."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest

from baton.common.errors import BatonError, InvalidArgumentError, ResourceExhaustedError
from baton.common.request.request_spec import ReasoningMarks
from engine import validation
from engine.batch import TokenLogprobs
from engine.request import CandidateProgress
from engine.validation import check_request, num_blocks_needed
from kvstore.block_key import BlockKeyChain
from kvstore.codec import DIGEST_SCHEME
from kvstore.handoff import KvHandoff
from tests.support.fake_runner import fake_config, fake_info
from tests.support.requests import changed, engine_request

INFO = fake_info(block_size=4, max_model_len=64)
REQUEST = engine_request("r", (0, 1) * 5, max_tokens=7)
BEAMS = {"beam_width": 2}


def check(request=REQUEST, *, num_blocks=100, **config):
    check_request(
        request, config=fake_config(**config), info=INFO, num_blocks=num_blocks, namespace=b"n"
    )


def test_candidates_of_a_model_with_states_need_a_slot_each():
    info = fake_info(block_size=4, max_model_len=64, has_states=True)
    request, config = changed(REQUEST, n=3), fake_config()

    def check_with(num_slots: int) -> None:
        check_request(
            request, config=config, info=info, num_blocks=99, num_slots=num_slots, namespace=b"n"
        )

    check_with(3)
    with pytest.raises(ResourceExhaustedError, match=r"needs 3 slots .* has 2 \(--num-state-slots"):
        check_with(2)


def progress(*candidates):
    return tuple(CandidateProgress(index, tuple(tokens)) for index, tokens in candidates)


def test_more_candidates_than_can_run_at_once_are_refused():
    several = changed(REQUEST, n=4)
    check(several)
    with pytest.raises(InvalidArgumentError, match=r"number of candidates is 4; .* at most 3"):
        check(several, max_num_seqs=3)
    with pytest.raises(InvalidArgumentError, match="at most 2"):
        check(several, max_num_batched_tokens=2)


@pytest.mark.parametrize("priority", ["x", 1.5, True, 2**31, -(2**31) - 1, 10**400])
def test_a_priority_that_cannot_be_ordered_is_refused(priority):
    refused = replace(REQUEST, spec=replace(REQUEST.spec, priority=priority))
    with pytest.raises(InvalidArgumentError, match=r"priority is .* an integer in"):
        check(refused)


def test_candidates_share_the_prompts_full_blocks():
    # 10 + 7 - 1 tokens take 4 blocks, 2 of which hold prompt tokens alone.
    for num_candidates, needed in ((1, 4), (2, 6), (4, 10)):
        request = changed(REQUEST, n=num_candidates)
        assert num_blocks_needed(request, fake_config(), INFO) == needed
        check(request, num_blocks=needed)
        with pytest.raises(ResourceExhaustedError, match=f"needs {needed} KV blocks"):
            check(request, num_blocks=needed - 1)


def test_prefill_needs_blocks_for_the_prompt_alone():
    request = replace(changed(REQUEST, n=4), hands_over=True)
    prefill = {"kv_connector": "memory://x"}
    assert num_blocks_needed(request, fake_config(**prefill), INFO) == 3
    check(request, num_blocks=3, **prefill)
    # One sequence draws the first tokens of all candidates.
    check(request, num_blocks=3, max_num_seqs=1, **prefill)
    with pytest.raises(ResourceExhaustedError, match="for 10 tokens; the pool has 2"):
        check(request, num_blocks=2, **prefill)


def test_long_requests_need_fewer_blocks_with_windows():
    info = replace(INFO, windows=(4,))
    request = changed(REQUEST, prompt_token_ids=(0,) * 40)
    config = fake_config(max_num_batched_tokens=4)
    assert num_blocks_needed(request, config, info) < num_blocks_needed(request, config, INFO)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"progress": progress((1, [0]))}, "candidates.index is 1; it must be below 1"),
        (
            {"best_of": 2, "progress": progress((1, [0]), (1, [0]))},
            "candidates.index is 1; .* unique",
        ),
        ({"progress": progress((0, []))}, "output_token_ids is empty"),
        ({"progress": progress((0, [2]))}, r"output_token_ids is 2; .* in \[0, 2\)"),
        ({"progress": progress((0, [0] * 7))}, "max_tokens is 7; .* above the 7 tokens"),
        ({"progress": (CandidateProgress(0, (1,), math.nan),)}, "logprob is nan"),
        ({"max_tokens": 60, "progress": progress((0, [0] * 54))}, "prompt tokens is 64"),
        ({**BEAMS, "progress": progress((0, [0]))}, "candidates is set together with beam"),
        ({"first_beams": ((0, -1.0),)}, "first_beams is set without beam_search"),
        ({**BEAMS, "first_beams": ((0, -1.0), (0, -2.0))}, "a token twice"),
        ({**BEAMS, "first_beams": ((2, -1.0),)}, "first_beams is 2"),
        ({**BEAMS, "first_beams": ((1, math.nan),)}, "logprob is nan"),
        ({**BEAMS, "first_beams": ((1, -1.0),), "max_tokens": 1}, "above the 1 tokens"),
    ],
)
def test_progress_that_no_replica_can_have_made_is_refused(fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check(changed(REQUEST, **fields))


def test_progress_that_another_replica_may_have_made_is_accepted():
    check(replace(REQUEST, progress=progress((0, [0] * 6))))
    check(changed(REQUEST, n=4, progress=progress((3, [0]), (1, [1]))))
    check(changed(REQUEST, **BEAMS, first_beams=((1, -1.0), (0, -2.0))))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": [2]}, r"allowed_token_ids is 2; it must be in \[0, 2\)"),
        ({"logit_bias": {2: 1.0}}, "logit_bias is 2"),
        ({"bad_words_token_ids": ((0, 1), (1, 2))}, "bad_words_token_ids is 2"),
        ({"reasoning": ReasoningMarks((0,), (1, 2))}, "reasoning is 2"),
        ({"prediction_token_ids": (0, 2)}, "prediction_token_ids is 2"),
        ({"prediction_token_ids": (0,) * 1000}, "prediction_token_ids has 1000 tokens; .* at most"),
        ({"bad_words_token_ids": ((0, 1), ())}, "bad_words_token_ids has an empty word"),
        (
            {"bad_words_token_ids": ((0, 1),) * 513},
            "bad_words_token_ids has 513 words; it may have at most 512",
        ),
        (
            {"bad_words_token_ids": ((1, 0), (1,) * 65)},
            "bad_words_token_ids has a word of 65 tokens; each may have at most 64",
        ),
        ({"min_tokens": 1, "stop_token_ids": frozenset({2})}, "stop_token_ids is 2"),
        (
            {"min_tokens": 1, "stop_token_ids": frozenset({1}), "allowed_token_ids": [1]},
            "leave no token to draw",
        ),
        ({"bad_words_token_ids": ((0,),), "allowed_token_ids": [0]}, "leave no token to draw"),
        ({"bad_words_token_ids": ((0,), (1,))}, "leave no token to draw"),
    ],
)
def test_rules_that_cannot_be_obeyed_are_refused(fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check(changed(REQUEST, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": frozenset({1}), "allowed_token_ids": [1]},
        {"min_tokens": 1, "stop_token_ids": frozenset({1}), "allowed_token_ids": [0, 1]},
        {"bad_words_token_ids": ((0,), (1, 0)), "logit_bias": {0: 1.0}},
        {"bad_words_token_ids": ((1,) * 64,) * 512},
    ],
)
def test_rules_that_leave_a_token_are_accepted(fields):
    check(changed(REQUEST, **fields))


def test_log_probabilities_must_fit_into_one_message(monkeypatch):
    monkeypatch.setattr(validation, "_MAX_LOGPROB_VALUES", 70)
    check(changed(REQUEST, prompt_logprobs=5))
    with pytest.raises(
        InvalidArgumentError, match=r"prompt_logprobs is 6.* at most 8 prompt tokens; .* has 10"
    ):
        check(changed(REQUEST, prompt_logprobs=6))
    ranked = changed(REQUEST, n=2, best_of=3)
    check(changed(ranked, logprobs=3))
    with pytest.raises(InvalidArgumentError, match=r"logprobs is 4.* at most 11 tokens in all"):
        check(changed(ranked, logprobs=4))
    check(changed(REQUEST, logprobs=20))  # returned as the tokens are drawn


def test_ranked_candidates_bring_their_log_probabilities():
    details = (TokenLogprobs(-1.0, 1),)
    given = CandidateProgress(0, (1,), token_logprobs=details)
    ranked = changed(REQUEST, best_of=2, logprobs=0)
    check(replace(ranked, progress=(given,)))
    with pytest.raises(InvalidArgumentError, match="token_logprobs has 0 entries; it must have 1"):
        check(replace(ranked, progress=progress((0, (1,)))))
    with pytest.raises(InvalidArgumentError, match="token_logprobs has 1 entries; it must have 0"):
        check(replace(changed(REQUEST, logprobs=0), progress=(given,)))


def lent(num_tokens, prompt, handoff_id="lent"):
    keys = BlockKeyChain(b"namespace", 4).extend(prompt[:num_tokens])
    return KvHandoff(
        handoff_id, b"namespace", tuple(keys), num_tokens, "fake", DIGEST_SCHEME, lease_ms=1000
    )


@pytest.mark.parametrize(
    ("num_tokens", "fields", "message"),
    [
        (8, {}, None),
        (12, {}, "prefix.num_tokens"),  # the last token is to be computed
        (6, {}, "prefix.num_tokens"),
        (8, {"prompt_logprobs": 1}, "prefix is set together with prompt_logprobs"),
        (8, {"cache_salt": "other"}, "prefix.block_keys"),
    ],
)
def test_a_lent_prefix_must_be_a_beginning_of_the_prompt(num_tokens, fields, message):
    prompt = (1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0)
    request = changed(
        engine_request("r", prompt, max_tokens=2), prefix=lent(num_tokens, prompt), **fields
    )
    with pytest.raises(BatonError, match=message) if message else nullcontext():
        check_request(
            request,
            config=fake_config(kv_connector="fake://"),
            info=fake_info(4, 64),
            num_blocks=100,
            namespace=b"namespace",
        )
