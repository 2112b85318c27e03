"""Tokens of `kernels.draw_tokens` on the CPU equal those of the engine's sampler."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

import kernels
from engine.runtime import sampler
from kernels import INVALID_TOKEN, DrawTable
from tests.support.draw_cases import LOGIT_KINDS, DrawCase, draw_table, make_draws, make_logits

CPU = torch.device("cpu")


def _sampled(case):
    """Samples with `engine.runtime.sampler`, which separates greedy, filtered and other draws."""
    records = np.zeros(len(case.draw_ids), sampler.DRAW_RECORD)
    chosen = case.draws.take(case.draw_ids)
    for field in fields(DrawTable):
        records[field.name] = getattr(chosen, field.name).numpy().astype(records[field.name].dtype)
    rows = None if case.logit_rows is None else case.logit_rows.tolist()
    scores = sampler.Scores(case.logits, *kernels.row_maxima(case.logits))
    prepared = sampler.prepare_draws(records, CPU, rows)
    return sampler.sample(scores, prepared, case.positions.numpy()).tolist()


@pytest.mark.parametrize("kind", LOGIT_KINDS)
@pytest.mark.parametrize("vocab_size", [1, 6, 901])
def test_tokens_equal_those_of_the_sampler(kind, vocab_size):
    ids = torch.arange(40)
    logits, draws = make_logits(kind, 40, vocab_size), make_draws(40, vocab_size)
    case = DrawCase(logits, draws, ids, ids * 1000)
    assert case.draw(kernels, CPU).tolist() == _sampled(case)


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
    assert tokens == _sampled(case)
    assert [token == INVALID_TOKEN for token in tokens] == [False, False, True, False, True, False]


def test_tokens_are_written_to_out():
    case = DrawCase(
        make_logits("normal", 2, 50),
        draw_table((0.0, 0, 1.0, 0), (1.0, 0, 1.0, 2**64 - 1)),
        draw_ids=torch.tensor([0, 1]),
        positions=torch.tensor([0, 1]),
    )
    out = torch.full((4,), -7)
    assert case.draw(kernels, CPU, out=out[1:3]).tolist() == _sampled(case)
    assert out.tolist() == [-7, *_sampled(case), -7]


def test_tokens_of_a_tiny_vocabulary_follow_the_softmax():
    """Chi-square of 20,000 draws, 8 degrees of freedom: above 50 once in ten million times."""
    logits = make_logits("normal", 1, 9) / 3
    ids = torch.arange(20_000)
    case = DrawCase(
        logits,
        draw_table((1.0, 0, 1.0, 17)),
        draw_ids=torch.zeros_like(ids),
        positions=ids,
        logit_rows=torch.zeros_like(ids),
    )
    counts = torch.bincount(case.draw(kernels, CPU), minlength=9)
    expected = logits[0].double().softmax(-1) * len(ids)
    assert float(((counts - expected) ** 2 / expected).sum()) < 50


def test_logprobs_are_those_of_the_softmax():
    logits = make_logits("normal", 4, 300)
    logits[3, 5] = math.inf
    rows, tokens = torch.tensor([2, 0, 0, 3, 1]), torch.tensor([7, 0, 299, 5, -1])
    found = kernels.token_logprobs(logits, kernels.row_maxima(logits)[0], tokens, rows)
    exact = logits.double().log_softmax(dim=-1)[rows, tokens.clamp(min=0)]
    torch.testing.assert_close(found[:3].double(), exact[:3], rtol=1e-6, atol=2e-6)
    assert found[3:].isnan().all()
