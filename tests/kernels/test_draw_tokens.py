"""Tokens of `kernels.draw_tokens` on the CPU equal those of the reference."""

import math

import pytest
import torch

import kernels
from kernels import INVALID_TOKEN
from tests.support.draw_cases import LOGIT_KINDS, DrawCase, draw_table, make_draws, make_logits
from tests.support.kernel_checks import on_threads

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", LOGIT_KINDS)
@pytest.mark.parametrize("vocab_size", [1, 6, 901])
def test_tokens_equal_those_of_the_reference(kind, vocab_size):
    ids = torch.arange(60)
    for seed in range(5):
        logits, draws = make_logits(kind, 60, vocab_size, seed), make_draws(60, vocab_size, seed)
        case = DrawCase(logits, draws, ids, ids * 1000)
        assert case.draw(kernels, CPU).tolist() == case.expected().tolist()


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_tokens_of_a_large_vocabulary_equal_those_of_the_reference(scale):
    """A spread of logits like a model's, and one so small that most noise decides."""
    logits, draws = make_logits("normal", 24, 40_003) * scale, make_draws(24, 40_003, seed=1)
    draws.temperature.fill_(1.0)
    ids = torch.arange(24)
    case = DrawCase(logits, draws, ids, ids)
    assert case.draw(kernels, CPU).tolist() == case.expected().tolist()


def test_the_number_of_threads_changes_no_token():
    ids = torch.arange(70)
    case = DrawCase(make_logits("normal", 70, 999), make_draws(70, 999), ids, ids)
    one, several = on_threads([1, 3], lambda: case.draw(kernels, CPU))
    assert torch.equal(one, several)


def test_rows_may_be_strided():
    wide = torch.full((4, 900), math.nan)
    wide[:, :333] = make_logits("normal", 4, 333)
    draws = draw_table(*((1.0, 20, 0.9, seed) for seed in range(4)))
    case = DrawCase(wide[:, :333], draws, torch.arange(4), torch.arange(4))
    assert case.draw(kernels, CPU).tolist() == case.expected().tolist()


def test_draws_of_rows_follow_entries_of_the_table():
    logits, draws = make_logits("normal", 5, 60), make_draws(7, 60)
    logits[3, 7] = math.nan
    case = DrawCase(
        logits,
        draws,
        draw_ids=torch.tensor([6, 6, 0, 2, 5, 5]),
        positions=torch.tensor([4, 5, 4, 2**31, 0, 9]),
        logit_rows=torch.tensor([0, 0, 3, 4, 3, 1]),
    )
    tokens = case.draw(kernels, CPU).tolist()
    assert tokens == case.expected().tolist()
    assert [token == INVALID_TOKEN for token in tokens] == [False, False, True, False, True, False]


def test_tokens_are_written_to_out():
    case = DrawCase(
        make_logits("normal", 2, 50),
        draw_table((0.0, 0, 1.0, 0), (1.0, 0, 1.0, 2**64 - 1)),
        draw_ids=torch.tensor([0, 1]),
        positions=torch.tensor([0, 1]),
    )
    out = torch.full((4,), -7)
    assert case.draw(kernels, CPU, out=out[1:3]).tolist() == case.expected().tolist()
    assert out.tolist() == [-7, *case.expected().tolist(), -7]


def test_logprobs_are_those_of_the_softmax():
    logits = make_logits("normal", 4, 300)
    logits[3, 5] = math.inf
    rows, tokens = torch.tensor([2, 0, 0, 3, 1]), torch.tensor([7, 0, 299, 5, -1])
    found = kernels.token_logprobs(logits, kernels.row_maxima(logits)[0], tokens, rows)
    exact = logits.double().log_softmax(dim=-1)[rows, tokens.clamp(min=0)]
    torch.testing.assert_close(found[:3].double(), exact[:3], rtol=1e-6, atol=2e-6)
    assert found[3:].isnan().all()
