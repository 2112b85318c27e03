"""`apply_logit_rules` in Triton, compared with an oracle in float64 and with the reference."""

import pytest
import torch

from engine.draw_params import LogitRules
from kernels import reference
from kernels.triton import logit_rules
from tests.support.devices import DEVICE
from tests.support.rule_cases import RuleCase

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def _check(case):
    case.check(logit_rules, DEVICE)
    for found, expected in zip(case.apply(logit_rules, DEVICE), case.apply(reference), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("vocab_size", [1, 33, 700])
def test_logits_equal_those_of_the_oracle_and_the_reference(vocab_size):
    for seed in range(4):
        _check(RuleCase.make(vocab_size, num_rows=5, num_sequences=4, seed=seed))


def test_a_vocabulary_of_several_parts_and_histories_of_several_blocks():
    case = RuleCase.make(9001, num_rows=3, num_sequences=2, max_len=40_000, seed=1)
    rules = LogitRules(200, 1.5, 0.5, 0.25, bad_words=((8, 3),))
    tokens = [index * index % 9001 for index in range(20_000)]
    case.sequences[0] = (rules, [*tokens, 8])
    _check(case)


def test_rows_without_a_token_and_rows_that_are_not_finite():
    case = RuleCase.make(300, num_rows=4, num_sequences=3, seed=2)
    case.sequences[0] = (LogitRules(1, allowed=(7,), bad_words=((7,),)), [1, 2])
    case.logits[case.rows[1], 5] = torch.nan
    likeliest = case.apply(logit_rules, DEVICE)[2]
    assert likeliest[case.rows[0]] == -2
    assert likeliest[case.rows[1]] == -1
    assert torch.equal(likeliest, case.apply(reference)[2])


def test_no_rows():
    _check(RuleCase(torch.zeros(2, 5), [], rows=[], ids=[]))
