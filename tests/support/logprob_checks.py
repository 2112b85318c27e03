"""Checks of log-probabilities against `transformers`: one forward pass over all tokens."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.batch import TokenLogprobs
from tests.support.checkpoints import reference_model

__all__ = ["TOLERANCE", "check_details", "check_tokens", "reference_logprobs"]

TOLERANCE = 1e-5


def reference_logprobs(path: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Returns the log-softmax after each token, `[num_tokens, vocab]` float32."""
    return _reference_logprobs(path, tuple(token_ids))


@cache
def _reference_logprobs(path: Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits = reference_model(path)(torch.tensor([token_ids])).logits[0]
    return logits.float().log_softmax(dim=-1)


def check_tokens(
    path: Path,
    token_ids: Sequence[int],
    details: Sequence[TokenLogprobs],
    num_top: int,
) -> None:
    """Checks the log-probabilities of the last `len(details)` of `token_ids`."""
    reference = reference_logprobs(path, token_ids)
    first = len(token_ids) - len(details)
    for position, detail in enumerate(details, first):
        check_details(reference[position - 1], token_ids[position], detail, num_top)


def check_details(
    expected: torch.Tensor, token_id: int, detail: TokenLogprobs, num_top: int
) -> None:
    """Checks one token's log-probabilities.

    Args:
        expected: `[vocab]`; those of all tokens.
        token_id: the token.
        detail: what was reported of it.
        num_top: the number of likeliest tokens that were asked for.
    """
    assert detail.logprob == near(expected[token_id])
    # Tokens that are almost as likely may come before or after it.
    slack = 2 * TOLERANCE * max(1.0, abs(detail.logprob))
    num_likelier = int((expected > detail.logprob + slack).sum())
    num_as_likely = int((expected >= detail.logprob - slack).sum())
    assert num_likelier < detail.rank <= num_as_likely
    assert len(detail.top_token_ids) == len(detail.top_logprobs) == num_top
    assert len(set(detail.top_token_ids)) == num_top
    assert list(detail.top_logprobs) == near(expected.topk(num_top).values)
    assert list(detail.top_logprobs) == near(expected[list(detail.top_token_ids)])


def near(values: torch.Tensor) -> object:
    return pytest.approx(values.tolist(), abs=TOLERANCE, rel=TOLERANCE)
