"""`BeamSearch`: the beams of one request, running and finished, and when the search ends.

The search is that of `transformers` 5 (`GenerationMixin._beam_search` with
`do_sample=False`), in sequences and in scores. Each step ranks the running
beams' continuations by their summed log-probability:

- of the `width` likeliest, those that end with a stop token are hypotheses,
  as are all of them at `max_tokens`. The `width` hypotheses with the best
  scores are kept;
- the `width` likeliest that do not end with a stop token keep running.

A hypothesis scores its summed log-probability over its number of generated
tokens, stop token included, to the power of `length_penalty`.

With a vocabulary smaller than `width` there are fewer beams at first, and perhaps
fewer results; `transformers` adds copies that score -1e9.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice

from baton.common.request.sampling_params import SamplingParams

__all__ = ["BeamResult", "BeamSearch", "BeamStep"]

_MAX_EXPONENT = 700.0  # exp() of more overflows


@dataclass(frozen=True, slots=True)
class BeamStep:
    """A running beam's newest token.

    Attributes:
        parent: index, among the previous running beams, of the beam that it continues.
        token_id: the token.
    """

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class BeamResult:
    """A finished hypothesis.

    Attributes:
        token_ids: generated tokens, the stop token included.
        score: the score that hypotheses are ranked by.
        is_stopped: whether a stop token ended it; otherwise `max_tokens` did.
    """

    token_ids: tuple[int, ...]
    score: float
    is_stopped: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Beam:
    """A prefix and one more token. Beams share their prefixes, so none is ever copied."""

    prefix: "_Beam | None"
    step: BeamStep
    logprob: float  # summed over its tokens


class BeamSearch:
    """Takes the running beams' most likely next tokens and chooses the beams that run next.

    Call `start`, then `advance` until `is_done`, then `results`. Tokens are
    reported as (token id, log-probability), the likeliest first; a report has
    `num_top` of them, or the whole vocabulary if that is smaller. Among equally
    likely continuations the one of the earlier beam comes first, then the one that
    was reported first.

    Args:
        params: the request's. `beam_width` is the most beams that run and the most
            hypotheses that are kept; `n` of these are returned. A search of width 1
            is greedy and ends with its first hypothesis.
        stop_token_ids: tokens that end a hypothesis.
        max_tokens: the most tokens to generate, one or more.

    Attributes:
        num_top: how many tokens to report for each running beam, so that at least
            `beam_width` of them are no stop tokens.
        is_done: whether the search has ended.
    """

    def __init__(
        self, params: SamplingParams, *, stop_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        assert params.beam_width is not None
        assert max_tokens >= 1
        self.num_top = params.beam_width + len(stop_token_ids)
        self.is_done = False
        self._width = params.beam_width
        self._stop_token_ids = stop_token_ids
        self._max_tokens = max_tokens
        self._params = params
        self._num_tokens = 0  # in each running beam
        self._running: list[_Beam] = []
        self._finished: list[tuple[_Beam, float]] = []  # with their scores, the best first

    def start(self, top: Sequence[tuple[int, float]]) -> list[BeamStep]:
        """Makes the first beams from the tokens reported for the end of the prompt.

        Returns the running beams, none if `is_done`. Their parent is 0, the prompt.
        """
        assert self._num_tokens == 0
        return self._advance(_continuations(None, 0, top))

    def advance(self, tops: Sequence[Sequence[tuple[int, float]]]) -> list[BeamStep]:
        """Takes one report per running beam, in the order in which the beams were returned.

        Returns the beams that run now, none if `is_done`.
        """
        assert self._num_tokens > 0
        assert not self.is_done
        reports = zip(self._running, tops, strict=True)
        continuations = [_continuations(beam, i, top) for i, (beam, top) in enumerate(reports)]
        return self._advance(merge(*continuations, key=_logprob, reverse=True))

    def results(self) -> list[BeamResult]:
        """The `n` hypotheses with the best scores, the best first."""
        assert self.is_done
        return [
            BeamResult(_token_ids(beam), score, self._is_stopped(beam))
            for beam, score in self._finished[: self._params.n]
        ]

    def _advance(self, ranked: Iterator[_Beam]) -> list[BeamStep]:
        self._num_tokens += 1
        likeliest = list(islice(ranked, self._width))
        if self._num_tokens == self._max_tokens:
            self._finish(likeliest)
            self._running = []
        else:
            self._finish([beam for beam in likeliest if self._is_stopped(beam)])
            unstopped = (b for b in chain(likeliest, ranked) if not self._is_stopped(b))
            self._running = list(islice(unstopped, self._width))
        if not self._goes_on():
            self.is_done = True
            self._running = []
        return [beam.step for beam in self._running]

    def _finish(self, beams: Sequence[_Beam]) -> None:
        if beams:
            scored = ((beam, self._score(beam.logprob, self._num_tokens)) for beam in beams)
            ranked = sorted([*self._finished, *scored], key=lambda scored: -scored[1])
            self._finished = ranked[: self._width]

    def _goes_on(self) -> bool:
        if not self._running:
            return False
        if len(self._finished) < self._width:
            return True
        if self._width == 1 or self._params.early_stopping is True:
            return False
        return self._best_hoped_for() > self._finished[-1][1]

    def _best_hoped_for(self) -> float:
        """The score that the likeliest running beam may still reach.

        A sum of log-probabilities only sinks. If length is rewarded, the present sum
        over the longest length is a bound; else the present sum over the present
        length is. Without "never" the present length is used either way.
        """
        rewards_length = self._params.length_penalty > 0
        is_never = self._params.early_stopping == "never"
        num_tokens = self._max_tokens if is_never and rewards_length else self._num_tokens
        return self._score(self._running[0].logprob, num_tokens)

    def _score(self, logprob: float, num_tokens: int) -> float:
        """Returns `logprob / num_tokens**length_penalty`; the power saturates, never overflows."""
        exponent = -self._params.length_penalty * math.log(num_tokens)
        return logprob * math.exp(min(max(exponent, -_MAX_EXPONENT), _MAX_EXPONENT))

    def _is_stopped(self, beam: _Beam) -> bool:
        return beam.step.token_id in self._stop_token_ids


def _continuations(
    prefix: _Beam | None, index: int, top: Sequence[tuple[int, float]]
) -> Iterator[_Beam]:
    """Yields the running beam `index` extended by each of its most likely next tokens."""
    before = prefix.logprob if prefix else 0.0
    for token_id, logprob in top:
        yield _Beam(prefix, BeamStep(index, token_id), before + logprob)


def _logprob(beam: _Beam) -> float:
    return beam.logprob


def _token_ids(beam: _Beam) -> tuple[int, ...]:
    token_ids = []
    node: _Beam | None = beam
    while node:
        token_ids.append(node.step.token_id)
        node = node.prefix
    return tuple(reversed(token_ids))
