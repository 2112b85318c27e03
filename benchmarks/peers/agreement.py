"""How far an engine's greedy tokens are those of transformers in float32: a sanity check.

Rounding to bfloat16 moves near-ties, and random weights have many: engines
that compute rightly part from the reference sooner or later, and from there on
say something else. One that parts at once on most prompts computes wrongly. Pure.
"""

from collections.abc import Sequence

from benchmarks.peers.peer_messages import PeerAnswer

__all__ = ["first_difference", "summarize_agreement"]


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens agree before the first that differs."""
    pairs = zip(tokens, expected, strict=True)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), len(tokens))


def summarize_agreement(
    answers: Sequence[PeerAnswer], expected: Sequence[PeerAnswer]
) -> dict[str, object]:
    """Of several prompts: tokens until the first difference, and tokens in all, of each."""
    agreeing = [
        first_difference(answer.token_ids, other.token_ids)
        for answer, other in zip(answers, expected, strict=True)
    ]
    return {"agreeing": agreeing, "of": [len(answer.token_ids) for answer in answers]}
