"""Tokens drawn on the CPU occur as often as their probabilities in float64 say: chi-square."""

import pytest
import torch

import kernels
from engine.draw_params import LogitRules
from kernels import reference
from tests.support.distributions import assert_follows, filtered_probabilities
from tests.support.draw_cases import draw_table, make_logits
from tests.support.rule_cases import RuleCase, expected_logits

NUM_DRAWS = 12_000
MODULES = [kernels, reference]
each_module = pytest.mark.parametrize("module", MODULES, ids=["native", "reference"])
# Sampling parameters by the names of `filtered_probabilities`.
WAYS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 6},
    "top-k of one": {"top_k": 1},
    "top-k of all": {"top_k": 10_000},
    "top-p": {"top_p": 0.7},
    "narrow top-p": {"top_p": 1e-9},
    "min-p": {"min_p": 0.08},
    "min-p of the largest": {"min_p": 1.0},
    "hot top-k and top-p": {"temperature": 1.6, "top_k": 12, "top_p": 0.85},
    "cold top-p and min-p": {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 15, "top_p": 0.9, "min_p": 0.02},
}
HISTORY = [1, 4, 4, 2, 7, 2, 2, 9, 4]
RULES = {
    "repetition": LogitRules(4, repetition_penalty=1.4),
    "encouraged repetition": LogitRules(4, repetition_penalty=0.7),
    "presence": LogitRules(4, presence_penalty=0.9),
    "frequency": LogitRules(4, frequency_penalty=-0.5),
    "bias": LogitRules(4, bias=((0, 1.5), (4, -2.0), (8, 0.25))),
    "all": LogitRules(
        4,
        repetition_penalty=1.2,
        presence_penalty=-0.3,
        frequency_penalty=0.4,
        bias=((3, 1.0),),
        allowed=tuple(range(15)),
        bad_words=((9, 4, 5), (6,)),
        min_length=20,
        stop_token_ids=(0,),
    ),
}


def draw_counts(module, logits, table, *, seeds=False, scores=None):
    """Counts the tokens of NUM_DRAWS draws from one row of logits: `[vocab]`.

    With `seeds`, each draw has its row of the table and all have one position; else the other
    way round.
    """
    ids, zeros = torch.arange(NUM_DRAWS), torch.zeros(NUM_DRAWS, dtype=torch.int64)
    maxima, likeliest = reference.row_maxima(logits) if scores is None else scores
    tokens = module.draw_tokens(
        logits,
        maxima,
        likeliest,
        table,
        draw_ids=ids if seeds else zeros,
        positions=zeros + 41 if seeds else ids,
        logit_rows=zeros,
    )
    return torch.bincount(tokens, minlength=logits.shape[1])


def record(seed, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return (temperature, top_k, top_p, seed, min_p)


@each_module
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vocab_size", [7, 45])
def test_draws_of_many_positions_follow_the_probabilities(module, way, vocab_size):
    logits = make_logits("normal", 1, vocab_size, seed=3) / 2
    seed = sum(way.encode()) * 2**52 + vocab_size
    counts = draw_counts(module, logits, draw_table(record(seed, **WAYS[way])))
    assert_follows(counts, filtered_probabilities(logits[0], **WAYS[way]))


@each_module
@pytest.mark.parametrize("way", ["plain", "top-p", "all"])
@pytest.mark.parametrize("stride", [1, 2**32 + 1], ids=["neighbours", "both words"])
def test_draws_of_many_seeds_follow_the_probabilities(module, way, stride):
    logits = make_logits("normal", 1, 45, seed=4) / 2
    table = draw_table(*(record(i * stride, **WAYS[way]) for i in range(NUM_DRAWS)))
    counts = draw_counts(module, logits, table, seeds=True)
    assert_follows(counts, filtered_probabilities(logits[0], **WAYS[way]))


@each_module
@pytest.mark.parametrize("kind", ["equal", "masked", "peaked", "negative"])
def test_draws_from_logits_of_other_shapes_follow_the_probabilities(module, kind):
    logits = make_logits(kind, 1, 60, seed=5)
    if kind == "peaked":
        logits = logits.clamp(max=9.0)  # else all other tokens together are never drawn
    counts = draw_counts(module, logits, draw_table(record(99)))
    assert_follows(counts, filtered_probabilities(logits[0]))


@each_module
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("way", ["plain", "all"])
def test_draws_under_rules_follow_the_probabilities(module, rules, way):
    """Penalties change the logits first; temperature and filters apply to what they left."""
    plain = make_logits("normal", 1, 20, seed=6) / 2
    case = RuleCase(plain, [(RULES[rules], HISTORY)], rows=[0], ids=[0])
    logits, *scores, _ = case.apply(module)
    counts = draw_counts(module, logits, draw_table(record(7, **WAYS[way])), scores=scores)
    expected = expected_logits(plain[0], RULES[rules], HISTORY)
    assert_follows(counts, filtered_probabilities(expected, **WAYS[way]))


def test_the_test_finds_a_bias_of_five_percent():
    logits = make_logits("normal", 1, 7, seed=3) / 2
    counts = draw_counts(kernels, logits, draw_table(record(1, temperature=1.1)))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_follows(counts, filtered_probabilities(logits[0]))
