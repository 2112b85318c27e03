"""Expected outputs of `tests.support.fake_model`: a decoder without cache or batch."""

from dataclasses import dataclass

from engine.batch import TokenLogprobs
from engine.draw_params import DrawParams
from engine.groups.beam_search import BeamSearch
from engine.request import CandidateProgress, EngineRequest, FinishReason
from tests.support.fake_grammar import allowed_tokens, is_complete
from tests.support.fake_model import (
    VOCAB_SIZE,
    log_probabilities,
    next_token,
    token_logprobs,
    top_tokens,
)

__all__ = ["Expected", "candidates", "expected_results", "first_beams", "progress_of"]


@dataclass(frozen=True)
class Expected:
    """One candidate with all of its tokens, or one returned hypothesis."""

    token_ids: tuple[int, ...]
    reason: FinishReason
    score: float

    def same_as(self, other: "Expected") -> bool:
        """Compares; scores may differ in the last digits, as sums have another order."""
        is_near = abs(self.score - other.score) < 1e-9
        return is_near and (self.token_ids, self.reason) == (other.token_ids, other.reason)


def expected_results(request: EngineRequest, max_model_len: int) -> list[Expected]:
    """Returns the results by candidate; the best first if candidates are ranked."""
    if request.spec.params.beam_width is not None:
        return _beam_search(request, max_model_len)
    every = candidates(request, max_model_len)
    if not request.spec.params.is_ranked:
        return every
    return sorted(every, key=lambda result: -result.score)[: request.spec.params.n]


def candidates(request: EngineRequest, max_model_len: int) -> list[Expected]:
    """Returns what each candidate draws; its score is the mean log-probability."""
    return [
        _candidate(request, index, max_model_len)
        for index in range(request.spec.params.num_candidates)
    ]


def progress_of(
    request: EngineRequest, index: int, token_ids: tuple[int, ...]
) -> CandidateProgress:
    """Returns the progress of a candidate that already has these tokens."""
    prompt, params = request.spec.prompt_token_ids, request.spec.params
    details: tuple[TokenLogprobs, ...] = ()
    if params.logprobs is not None and params.is_ranked:
        details = tuple(
            token_logprobs((*prompt, *token_ids[:end]), token, params.logprobs)
            for end, token in enumerate(token_ids)
        )
    return CandidateProgress(index, token_ids, _logprob(prompt, token_ids), details)


def first_beams(request: EngineRequest) -> tuple[tuple[int, float], ...]:
    """Returns the most likely first tokens, as many as a beam search needs."""
    num_top = request.spec.params.num_candidates + len(request.spec.stop_token_ids)
    return tuple(top_tokens(request.spec.prompt_token_ids, min(num_top, VOCAB_SIZE)))


def _candidate(request: EngineRequest, index: int, max_model_len: int) -> Expected:
    prompt = request.spec.prompt_token_ids
    (draw,) = DrawParams.of_candidates(request.spec, (index,))
    tokens: list[int] = []
    reason = FinishReason.LENGTH
    for _ in range(_max_tokens(request, max_model_len)):
        allowed = _allowed_after(request, tokens)
        tokens.append(next_token((*prompt, *tokens), draw, allowed=allowed))
        if tokens[-1] in request.spec.stop_token_ids or _cannot_go_on(request, tokens):
            reason = FinishReason.STOP
            break
    return Expected(tuple(tokens), reason, _logprob(prompt, tokens) / len(tokens))


def _allowed_after(request: EngineRequest, generated: list[int]) -> frozenset[int] | None:
    """Returns the tokens that the request's constraint allows; None if it has none."""
    outputs = request.spec.params.structured_outputs
    if outputs is None:
        return None
    stops = request.spec.stop_token_ids if is_complete(outputs, generated) else frozenset()
    return allowed_tokens(outputs, generated) | stops


def _cannot_go_on(request: EngineRequest, generated: list[int]) -> bool:
    outputs = request.spec.params.structured_outputs
    return outputs is not None and not allowed_tokens(outputs, generated)


def _beam_search(request: EngineRequest, max_model_len: int) -> list[Expected]:
    search = BeamSearch(
        request.spec.params,
        stop_token_ids=request.spec.stop_token_ids,
        max_tokens=_max_tokens(request, max_model_len),
    )
    beams = [request.spec.prompt_token_ids]
    steps = search.start(top_tokens(beams[0], search.num_top))
    while not search.is_done:
        beams = [(*beams[step.parent], step.token_id) for step in steps]
        steps = search.advance([top_tokens(beam, search.num_top) for beam in beams])
    return [
        Expected(
            result.token_ids,
            FinishReason.STOP if result.is_stopped else FinishReason.LENGTH,
            result.score,
        )
        for result in search.results()
    ]


def _max_tokens(request: EngineRequest, max_model_len: int) -> int:
    return min(request.spec.params.max_tokens, max_model_len - len(request.spec.prompt_token_ids))


def _logprob(prompt: tuple[int, ...], token_ids: tuple[int, ...] | list[int]) -> float:
    return sum(
        log_probabilities((*prompt, *token_ids[:end]))[token] for end, token in enumerate(token_ids)
    )
