"""`OfflineRequest`: gathers the engine's outputs of one prompt of `LLM` or `AsyncLLM`."""

import time
from collections.abc import Callable, Sequence
from functools import cache

from baton.common.request.answer import (
    CandidateOutput,
    JoinedAnswer,
    JoinedCandidate,
    logprobs_by_token,
    prompt_logprobs_by_token,
)
from baton.common.request.request_spec import RequestSpec
from baton.common.request.results import (
    CompletionOutput,
    Logprobs,
    RequestOutput,
    Timings,
    Usage,
)
from engine.request import EngineOutput
from router.observe.request_record import RequestRecord
from router.requests.tokenizer import Tokenizer
from router.stages.completion import Completion

__all__ = ["OfflineRequest"]


class OfflineRequest:
    """The tokens and texts of one request's candidates.

    Args:
        spec: the request.
        tokenizer: the model's.
        prompt: the prompt's text; None if it was given as token ids.

    Attributes:
        spec: the request.
    """

    def __init__(self, spec: RequestSpec, tokenizer: Tokenizer, prompt: str | None = None) -> None:
        self.spec = spec
        self._prompt = prompt
        self._text_of = _token_texts(tokenizer) if spec.params.detokenize else None
        self._record = RequestRecord()
        self._completion = Completion(spec, tokenizer, self._record)
        self._answer = JoinedAnswer(spec.params.n)
        self._prompt_logprobs: list[Logprobs | None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all candidates have ended."""
        return self._completion.is_over

    def start(self) -> None:
        """Notes that the engine gets the request now."""
        self._record.arrived_at = time.monotonic()

    def add(self, output: EngineOutput) -> bool:
        """Adds an output of the engine.

        Returns:
            Whether a stop text, which the engine does not check, ended the output's candidate.

        Raises:
            BatonError: the request failed.
        """
        if output.error is not None:
            raise output.error
        return self._take(_candidate_output(output)) and output.finish_reason is None

    def ignore(self) -> None:
        """Ends a request that can never fit the KV pool: its result is one empty candidate with
        finish reason "ignored".
        """
        self._take(CandidateOutput(finish_reason="ignored", is_last=True))
        self._answer = JoinedAnswer()
        self._answer.add(CandidateOutput(finish_reason="ignored", timings=Timings()))

    def abort(self) -> None:
        """Ends a request that the engine has not got: its candidates are empty, with finish reason
        "abort".
        """
        self._take(CandidateOutput(finish_reason="abort", is_last=True))

    def result(self) -> RequestOutput:
        """Everything so far: all candidates with all their tokens."""
        return self._result(self._answer.candidates)

    def new_result(self) -> RequestOutput | None:
        """The news since the last call: candidates with new tokens or text, or that have
        ended, with these tokens and this text alone. None: nothing is new. Later calls of `result`
        lack them.
        """
        changed = [candidate for candidate in self._answer.candidates if candidate.texts]
        if not changed:
            return None
        result = self._result(changed)
        self._answer = JoinedAnswer()
        return result

    def _take(self, output: CandidateOutput) -> bool:
        """Adds an output; returns whether a candidate ended with it."""
        has_ended = False
        for completed in self._completion.add(output):
            self._answer.add(completed)
            has_ended = has_ended or completed.finish_reason is not None
            if completed.prompt_token_ids:
                self._prompt_logprobs = prompt_logprobs_by_token(
                    completed.prompt_token_ids, completed.prompt_logprobs, self._text_of
                )
        return has_ended

    def _result(self, candidates: Sequence[JoinedCandidate]) -> RequestOutput:
        counts = self._record.usage
        return RequestOutput(
            request_id=self.spec.request_id,
            outputs=[self._completion_output(candidate) for candidate in candidates],
            usage=Usage(**{count: getattr(counts, count) for count in Usage.__slots__}),
            timings=self._answer.last.timings or self._completion.timings(),
            prompt=self._prompt,
            prompt_token_ids=list(self.spec.prompt_token_ids),
            prompt_logprobs=self._prompt_logprobs,
            finished=self.is_finished,
        )

    def _completion_output(self, candidate: JoinedCandidate) -> CompletionOutput:
        token_ids, last, logprobs = candidate.token_ids, candidate.last, None
        if self.spec.params.logprobs is not None:
            logprobs = logprobs_by_token(token_ids, candidate.logprobs, self._text_of)
        return CompletionOutput(
            index=candidate.index,
            text="".join(candidate.texts),
            token_ids=token_ids[:],
            finish_reason=last.finish_reason,
            stop_reason=last.matched_stop,
            score=last.score,
            logprobs=logprobs,
        )


def _candidate_output(output: EngineOutput) -> CandidateOutput:
    """The form that an engine's output takes in the router."""
    reason, times = output.finish_reason, output.timings
    candidate = CandidateOutput(output.index, output.token_ids)
    candidate.logprobs, candidate.prompt_logprobs = output.logprobs, output.prompt_logprobs
    if reason is not None:
        candidate.finish_reason = reason.value
        candidate.is_last, candidate.score = output.is_last, output.score
    if output.accepted_drafts or output.rejected_drafts:
        candidate.accepted_drafts = output.accepted_drafts
        candidate.rejected_drafts = output.rejected_drafts
    if times is not None:
        candidate.cached_tokens = output.cached_tokens
        candidate.stages = Timings(
            queue_ms=times.queue_ms,
            prefill_ms=times.prefill_ms,
            transfer_ms=times.transfer_ms,
            load_ms=times.load_ms,
        )
    return candidate


def _token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Returns a function that decodes single tokens and keeps their texts."""
    return cache(lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False))
