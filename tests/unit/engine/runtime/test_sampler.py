"""Sampling of tokens: distribution, filters, independence of other rows."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import kernels
from engine.batch import INVALID_TOKEN
from engine.runtime.draws import sampler
from kernels.reference import sampling
from kernels.reference.sampling import philox4x32
from tests.support.distributions import assert_follows
from tests.support.draw_params import draw_params

_CPU = torch.device("cpu")


def _records(draws):
    return np.array([sampler.draw_record(draw) for draw in draws], kernels.DRAW_RECORD)


def _draw_tokens(logits, draws, positions, rows=None):
    logits = logits.contiguous()
    scores = sampler.Scores(logits, *kernels.row_maxima(logits))
    rows = range(len(draws)) if rows is None else rows
    return sampler.draw_tokens(scores, _records(draws), rows, np.array(positions)).tolist()


def _noise(draws, positions, vocab_size):
    table = sampler.draw_table(_records(draws), _CPU)
    return sampling._gumbel_noise(table.seed, torch.tensor(positions), vocab_size)


def _random_logits(rows, vocab, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def _counts(logits, draw, num_draws):
    """Counts how often each token is drawn over `num_draws` positions: `[vocab]`."""
    rows = logits.expand(num_draws, -1)
    tokens = _draw_tokens(rows, [draw] * num_draws, list(range(num_draws)))
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def _warped_logits(logits, draw):
    """Returns logits `[1, vocab]` after the warpers of transformers, in its order."""
    scores = TemperatureLogitsWarper(draw.params.temperature)(None, logits)
    if draw.params.top_k:
        scores = TopKLogitsWarper(draw.params.top_k)(None, scores)
    if draw.params.top_p < 1:
        scores = TopPLogitsWarper(draw.params.top_p)(None, scores)
    if draw.params.min_p > 0:
        scores = MinPLogitsWarper(draw.params.min_p)(None, scores)
    return scores


def test_greedy_sampling_draws_the_largest_logit_and_the_lowest_token_of_ties():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 1.0, 5.0], [-math.inf, -3.0, -3.0]])
    assert _draw_tokens(logits, [draw_params(temperature=0.0)] * 3, [4, 4, 4]) == [1, 0, 1]


@pytest.mark.parametrize(
    "draw",
    [
        draw_params(seed=1),
        draw_params(temperature=0.3, seed=2**64 - 1),
        draw_params(temperature=2.5, seed=3),
        draw_params(top_k=5, seed=4),
        draw_params(top_p=0.7, seed=2**32),
        draw_params(temperature=1.5, top_k=10, top_p=0.8, seed=6),
        draw_params(temperature=1.5, min_p=0.15, seed=7),
    ],
)
def test_draws_follow_the_warped_softmax(draw):
    logits = _random_logits(1, 23, scale=1.5)
    counts = _counts(logits, draw, 20_000)
    assert_follows(counts, _warped_logits(logits, draw).softmax(-1)[0])


def test_draws_of_many_seeds_at_one_position_follow_the_softmax():
    logits = _random_logits(1, 11, scale=1.0)
    draws = [draw_params(seed=seed * 2**29) for seed in range(20_000)]
    tokens = _draw_tokens(logits.expand(len(draws), -1), draws, [7] * len(draws))
    counts = torch.bincount(torch.tensor(tokens), minlength=11)
    assert_follows(counts, logits.softmax(-1)[0])


def test_draws_at_neighbouring_positions_are_independent():
    logits = torch.zeros(1, 3)
    tokens = _draw_tokens(logits.expand(9000, -1), [draw_params(seed=8)] * 9000, list(range(9000)))
    pairs = torch.tensor(tokens[::2]) * 3 + torch.tensor(tokens[1::2])
    assert_follows(torch.bincount(pairs, minlength=9), torch.full((9,), 1 / 9))


@pytest.mark.parametrize("top_k", [0, 1, 7, 64, 200])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.9999, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_filters_keep_the_same_tokens_as_transformers(top_k, top_p, temperature):
    draw = draw_params(temperature, top_k, top_p)
    logits = _random_logits(8, 100, seed=top_k)
    kept = _kept(logits, [draw] * 8)
    assert torch.equal(kept, _warped_logits(logits, draw).isfinite())


@pytest.mark.parametrize("min_p", [1e-6, 0.02, 0.4, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (30, 0.95)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_kept_by_min_p_are_those_of_transformers(min_p, top_k, top_p, temperature):
    draw = draw_params(temperature, top_k, top_p, min_p=min_p)
    logits = _random_logits(8, 100, seed=top_k)
    kept = _kept(logits, [draw] * 8)
    assert torch.equal(kept, _warped_logits(logits, draw).isfinite())


def test_tokens_that_tie_with_the_last_kept_are_kept():
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, -9.0]])
    assert _kept(logits, [draw_params(top_k=3)]).tolist() == [[True, True, True, True, False]]
    assert _kept(torch.zeros(1, 4), [draw_params(top_p=0.1)]).all()
    assert _kept(torch.zeros(1, 4), [draw_params(min_p=1.0)]).all()


def _kept(logits, draws):
    """Returns which tokens remain after the filters: `[rows, vocab]` bool."""
    table = sampler.draw_table(_records(draws), _CPU)
    distance = (logits - logits.amax(-1, keepdim=True)).double()
    scaled = distance / table.temperature.unsqueeze(-1)
    return scaled >= sampling._thresholds(scaled, table)


def test_draws_stay_within_the_tokens_that_filters_keep():
    logits = _random_logits(1, 300)
    draw = draw_params(temperature=2.0, top_k=9, top_p=0.95, seed=11)
    counts = _counts(logits, draw, 3000)
    assert torch.equal(counts > 0, _warped_logits(logits, draw).isfinite()[0])


@pytest.mark.parametrize("vocab", [1, 5, 259, 33_001])
def test_a_row_draws_the_same_token_alone_and_in_any_batch(vocab, monkeypatch):
    monkeypatch.setattr(sampling, "_PART_ELEMENTS", 3 * vocab)
    logits = _random_logits(24, vocab, seed=5)
    draws = [
        draw_params((0.0, 0.7, 1.3)[row % 3], (0, 4, 0, 50)[row % 4], (1.0, 0.9)[row % 2], row)
        for row in range(24)
    ]
    positions = [row * 1000 for row in range(24)]
    alone = [
        _draw_tokens(logits[row : row + 1].clone(), [draws[row]], [positions[row]])[0]
        for row in range(24)
    ]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = _draw_tokens(
        logits[order], [draws[row] for row in order], [positions[row] for row in order]
    )
    assert _draw_tokens(logits, draws, positions) == alone
    assert shuffled == [alone[row] for row in order]


def test_draws_that_share_a_row_equal_draws_from_copies_of_it():
    logits = _random_logits(3, 40)
    draws = [draw_params((0.0, 1.0, 0.8)[i % 3], (0, 5)[i % 2], seed=i) for i in range(9)]
    rows, positions = [0, 0, 0, 2, 2, 1, 0, 1, 2], [7] * 9
    expected = _draw_tokens(logits[rows], draws, positions)
    assert _draw_tokens(logits, draws, positions, rows) == expected
    logits[2] = math.nan
    for index in (3, 4, 8):
        expected[index] = INVALID_TOKEN
    assert _draw_tokens(logits, draws, positions, rows) == expected


def test_noise_is_bitwise_the_same_in_any_batch():
    draws = [draw_params(seed=seed) for seed in (3, 2**40, 2**64 - 1)]
    positions = [5, 2**20, 0]
    together = _noise(draws, positions, 1001)
    for row, (draw, position) in enumerate(zip(draws, positions, strict=True)):
        assert torch.equal(_noise([draw], [position], 1001)[0], together[row])


def test_noise_follows_the_documented_counter_and_lane():
    seed, position = 0x0123456789ABCDEF, 4321
    noise = _noise([draw_params(seed=seed)], [position], 4003)[0]
    key = (torch.tensor(seed % 2**32), torch.tensor(seed >> 32))
    for token_id in (0, 1, 2, 3, 4, 1030, 4002):
        counter = tuple(torch.tensor(word) for word in (token_id // 4, position, 0, 0))
        uniform = (int(philox4x32(counter, key)[token_id % 4]) + 0.5) / 2**32
        assert float(noise[token_id]) == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


def test_noise_depends_on_seed_and_position_but_not_on_the_vocabulary_size():
    draws = [draw_params(seed=seed) for seed in (1, 1, 2, 1 + 2**32)]
    noise = _noise(draws, [9, 10, 9, 9], 4000)
    assert noise.isfinite().all()
    assert len({tuple(row) for row in noise.tolist()}) == 4
    assert torch.equal(_noise(draws, [9, 10, 9, 9], 17), noise[:, :17])


def test_extreme_words_give_finite_noise(monkeypatch):
    extremes = (torch.tensor([[0]]), torch.tensor([[2**32 - 1]])) * 2
    monkeypatch.setattr(sampling, "philox4x32", lambda _counter, _key: extremes)
    noise = _noise([draw_params()], [0], 4)
    assert noise.isfinite().all()
    assert noise[0, 0] < 0 < noise[0, 1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 5e-324])
def test_a_tiny_temperature_draws_the_largest_logit(temperature):
    logits = torch.tensor([[-3e38, 1.0, 3e38, 2.0]])
    draws = [draw_params(temperature, top_k, top_p) for top_k, top_p in ((0, 1.0), (3, 0.9))]
    assert _draw_tokens(logits.expand(2, -1), draws, [0, 0]) == [2, 2]


def test_minus_infinity_is_never_drawn():
    logits = torch.full((1, 40), -math.inf)
    logits[0, [3, 17]] = 0.0
    for draw in (draw_params(), draw_params(top_k=30), draw_params(top_p=0.99)):
        counts = _counts(logits, draw, 400)
        assert counts.nonzero().flatten().tolist() == [3, 17]


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
def test_a_row_that_is_not_finite_is_invalid_and_does_not_affect_others(bad):
    logits = _random_logits(6, 50)
    draws = [draw_params(0.0), draw_params(), draw_params(top_k=5, top_p=0.5)] * 2
    expected = _draw_tokens(logits, draws, list(range(6)))
    logits[:3] = -math.inf
    if bad != "all -inf":
        logits[:3, 20] = bad
    assert _draw_tokens(logits, draws, list(range(6))) == [INVALID_TOKEN] * 3 + expected[3:]
