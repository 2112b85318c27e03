"""The sets of flags that `baton tune` varies, and the steps between neighbours. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["AXES", "Axis", "Candidate"]

_MIN_SEQS, _MAX_SEQS = 1, 4096
_MIN_TOKENS, _MAX_TOKENS = 64, 1 << 17


@dataclass(frozen=True, slots=True)
class Candidate:
    """Flags of `baton serve`.

    Attributes:
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step.
        long_prefill_token_threshold: most tokens of one prompt in one step; None for all.
        num_prefill: prefill workers; with 0, decode workers compute prompts.
        num_decode: decode workers.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int | None
    num_prefill: int
    num_decode: int

    def __str__(self) -> str:
        return (
            f"{self.num_prefill}:{self.num_decode}, seqs {self.max_num_seqs}, tokens "
            f"{self.max_num_batched_tokens}, chunk {self.long_prefill_token_threshold or 'any'}"
        )


Axis = Callable[[Candidate, int], Candidate | None]
"""Returns the neighbour one step up (+1) or down (-1); None at the end of the axis."""


def _step_seqs(candidate: Candidate, direction: int) -> Candidate | None:
    seqs = _scaled(candidate.max_num_seqs, direction)
    is_useful = _MIN_SEQS <= seqs <= min(_MAX_SEQS, candidate.max_num_batched_tokens)
    return replace(candidate, max_num_seqs=seqs) if is_useful else None


def _step_tokens(candidate: Candidate, direction: int) -> Candidate | None:
    tokens = _scaled(candidate.max_num_batched_tokens, direction)
    threshold = candidate.long_prefill_token_threshold
    is_useful = max(_MIN_TOKENS, candidate.max_num_seqs, (threshold or 0) + 1) <= tokens
    if not is_useful or tokens > _MAX_TOKENS:
        return None
    return replace(candidate, max_num_batched_tokens=tokens)


def _step_threshold(candidate: Candidate, direction: int) -> Candidate | None:
    """Steps over powers of two below the step's budget; the highest value is no threshold."""
    budget, now = candidate.max_num_batched_tokens, candidate.long_prefill_token_threshold
    if now is None and direction > 0:
        return None
    threshold: int | None = _scaled(budget if now is None else now, direction)
    assert threshold is not None
    if threshold < _MIN_TOKENS:
        return None
    if threshold >= budget:
        threshold = None
    return replace(candidate, long_prefill_token_threshold=threshold)


def _step_ratio(candidate: Candidate, direction: int) -> Candidate | None:
    """Moves one worker from a tier to the other."""
    prefill, decode = candidate.num_prefill + direction, candidate.num_decode - direction
    if prefill < 0 or decode < 1:
        return None
    return replace(candidate, num_prefill=prefill, num_decode=decode)


def _scaled(value: int, direction: int) -> int:
    return value * 2 if direction > 0 else value // 2


AXES: tuple[Axis, ...] = (_step_ratio, _step_seqs, _step_tokens, _step_threshold)
