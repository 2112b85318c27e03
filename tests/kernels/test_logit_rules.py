"""`kernels.apply_logit_rules` on the CPU, compared with an oracle in float64."""

import math
from dataclasses import replace

import pytest
import torch

import kernels
from engine.draw_params import LogitRules
from kernels import INVALID_TOKEN, NO_TOKEN, reference
from tests.support.kernel_checks import native_only, on_threads
from tests.support.rule_cases import RuleCase, expected_logits

MODULES = [kernels, reference]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("vocab_size", [1, 2, 31, 32, 33, 97, 1000])
def test_logits_equal_those_of_the_oracle(module, vocab_size):
    for seed in range(12):
        RuleCase.make(vocab_size, num_rows=9, num_sequences=5, seed=seed).check(module)


@pytest.mark.parametrize("vocab_size", [33, 1000])
def test_the_kernel_equals_the_reference_to_the_last_bit(vocab_size):
    for seed in range(20):
        case = RuleCase.make(vocab_size, num_rows=6, num_sequences=6, seed=seed)
        for found, expected in zip(case.apply(kernels), case.apply(reference), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_the_number_of_threads_changes_nothing():
    case = RuleCase.make(3001, num_rows=40, num_sequences=33, max_len=700)
    one, several = on_threads([1, 3], lambda: case.apply(kernels))
    assert all(torch.equal(*pair) for pair in zip(one, several, strict=True))


def _case(rules, tokens, vocab_size=40, **changes):
    logits = torch.linspace(-3, 5, vocab_size).flip(0).unsqueeze(0).clone()
    return replace(RuleCase(logits, [(rules, tokens)], rows=[0], ids=[0]), **changes)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("repetition", [1.0, 1.7])
def test_a_long_history(module, repetition):
    tokens = [index * index % 37 for index in range(5000)]
    rules = LogitRules(4000, repetition, 0.25, 0.125)
    _case(rules, tokens).check(module)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("tokens", "banned"),
    [
        ([5], {9}),
        ([7], {9, 8}),
        ([6, 7], {9, 8, 3}),
        ([6, 7, 1], {9}),
        ([7, 6], {9}),
    ],
)
def test_bad_words_end_where_their_other_tokens_are_the_latest(module, tokens, banned):
    rules = LogitRules(1, bad_words=((9,), (7, 8), (6, 7, 3), (2, 6, 7, 4)))
    case = _case(rules, tokens)
    case.check(module)
    logits = case.apply(module)[0][0]
    assert set((logits == -math.inf).nonzero().flatten().tolist()) == banned


@pytest.mark.parametrize("module", MODULES)
def test_stop_tokens_are_banned_below_the_least_length(module):
    rules = LogitRules(2, min_length=4, stop_token_ids=(0, 3))
    for length, likeliest in ((2, 1), (3, 1), (4, 0), (5, 0)):
        case = _case(rules, [11] * length)
        case.check(module)
        assert case.apply(module)[2].tolist() == [likeliest]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "rules",
    [
        LogitRules(1, allowed=(3, 4), bad_words=((3,), (4,))),
        LogitRules(1, allowed=(0,), min_length=9, stop_token_ids=(0,)),
        LogitRules(1, repetition_penalty=1e-45),
    ],
    ids=["bad words", "stop tokens", "an infinite logit"],
)
def test_a_row_without_a_token_to_draw(module, rules):
    case = _case(rules, [0, 1])
    logits, _, likeliest, _ = case.apply(module)
    assert likeliest.tolist() == [NO_TOKEN]
    if rules.allowed:
        assert (logits == -math.inf).all()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_so(module, bad):
    """Rules must not hide it, although they ban the token whose logit it is."""
    case = RuleCase.make(50, num_rows=3, num_sequences=2, seed=4)
    case.logits[case.rows[0], 7] = bad
    bans = LogitRules(1, bad_words=((7,),))
    sequences = [(bans, case.sequences[0][1]), case.sequences[1]]
    logits, _, likeliest, _ = replace(case, sequences=sequences).apply(module)
    assert likeliest[case.rows[0]] == INVALID_TOKEN
    assert torch.allclose(logits[case.rows[0]], case.logits[case.rows[0]], equal_nan=True)
    rules, tokens = sequences[1]
    expected = expected_logits(case.logits[case.rows[1]], rules, tokens)
    torch.testing.assert_close(logits[case.rows[1]].double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("module", MODULES)
def test_rules_that_are_off_change_no_bit(module):
    case = RuleCase.make(77, num_rows=4, num_sequences=3)
    plain = [(LogitRules(1), tokens) for _, tokens in case.sequences]
    logits, *_ = replace(case, sequences=plain).apply(module)
    assert torch.equal(logits, case.logits)


@native_only("torch refuses such numbers itself")
@pytest.mark.parametrize("number", [-1, 40, 2**31 - 1, -(2**31)])
def test_a_history_with_numbers_that_are_no_tokens_is_ignored(number):
    """The native kernel counts tokens in memory, which such numbers would be outside of."""
    rules = LogitRules(1, 1.5, 0.5, 0.5, bias=((2, 1.0),), bad_words=((7, 9),))
    case = _case(rules, [5, 7, number, 7])
    logits, *_ = case.apply(kernels)
    expected = case.logits[0].clone()
    expected[2] += 1.0
    expected[9] = -math.inf
    assert torch.equal(logits[0], expected)


@pytest.mark.parametrize("module", MODULES)
def test_no_rows(module):
    RuleCase(torch.zeros(2, 5), [], rows=[], ids=[]).check(module)
