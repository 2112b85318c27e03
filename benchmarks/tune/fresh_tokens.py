"""The same requests in other tokens: for engines new, in all that costs time alike. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.request import BenchRequest

__all__ = ["with_fresh_tokens"]

_STRIDE = 7919  # a prime, so that shifts of a few numbers differ whatever the vocabulary


def with_fresh_tokens(
    requests: Sequence[BenchRequest], number: int, vocab_size: int
) -> list[BenchRequest]:
    """Shifts every token id by the same amount, another one for each `number`.

    Prompts keep their lengths and share with each other what they shared, but
    begin otherwise than those of another number: no cache finds them.
    """
    shift = number * _STRIDE % vocab_size
    return [
        replace(
            request,
            prompt_token_ids=tuple((t + shift) % vocab_size for t in request.prompt_token_ids),
        )
        for request in requests
    ]
