"""Probabilities of sampling in float64, and the chi-square test of counts against them."""

import torch

__all__ = ["assert_follows", "filtered_probabilities"]

# A draw that follows its probabilities fails once in a million tests. Seeds are fixed, so a test
# that passes once passes always.
_MIN_TAIL = 1e-6
_MIN_EXPECTED = 5  # fewer expected counts are summed: chi-square is an approximation


def filtered_probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Returns the probabilities `[vocab]` of tokens, in float64, by the definition.

    Top-k keeps the likeliest tokens, top-p the fewest of these whose probabilities reach its
    share, min-p those whose probability reaches its share of the largest.
    """
    probabilities = (logits.double() / temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    shares = probabilities[kept] / probabilities[kept].sum()
    before = shares.cumsum(0) - shares
    kept = kept[before < top_p]
    kept = kept[probabilities[kept] >= min_p * probabilities.max()]
    filtered = torch.zeros_like(probabilities)
    filtered[kept] = probabilities[kept]
    return filtered / filtered.sum()


def assert_follows(counts, probabilities):
    """Checks counts against `[vocab]` probabilities by chi-square; probability 0 must not occur."""
    expected = probabilities.double() * counts.sum()
    assert counts[expected == 0].sum() == 0
    likely = expected >= _MIN_EXPECTED
    rest = (counts[~likely].sum(), expected[~likely].sum())
    observed_all = torch.cat([counts[likely], rest[0][None]]).double()
    expected_all = torch.cat([expected[likely], rest[1][None]]).clamp(min=1e-9)
    if rest[1] < _MIN_EXPECTED:
        assert rest[0] < 40
        observed_all, expected_all = observed_all[:-1], expected_all[:-1]
    if len(expected_all) == 1:
        return  # nothing but one token occurs
    statistic = float(((observed_all - expected_all) ** 2 / expected_all).sum())
    degrees = torch.tensor((len(expected_all) - 1) / 2, dtype=torch.float64)
    tail = torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64))
    assert tail > _MIN_TAIL, f"chi-square {statistic:.1f} of {len(expected_all) - 1} degrees"
