"""`OfflineRequest`: gathers the engine's outputs of one prompt of `LLM` or `AsyncLLM`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from baton.common.request.answer import CandidateOutput, TokenLogprobs
from baton.common.request.request_spec import RequestSpec
from baton.common.request.results import (
    CompletionOutput,
    Logprobs,
    RequestOutput,
    Timings,
    Usage,
    logprobs_of,
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
        self._candidates = [_Candidate(index) for index in range(spec.params.n)]
        self._prompt_logprobs: list[Logprobs | None] | None = None
        self._timings: Timings | None = None  # None until the end

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
        has_ended = self._take(_answer(output))
        return has_ended and output.finish_reason is None

    def ignore(self) -> None:
        """Ends a request that can never fit the KV pool: its result is one empty candidate with
        finish reason "ignored".
        """
        self._end("ignored")
        del self._candidates[1:]

    def abort(self) -> None:
        """Ends a request that the engine has not got: its candidates are empty, with finish reason
        "abort".
        """
        self._end("abort")

    def result(self) -> RequestOutput:
        """Everything since the last call of `new_result`: all candidates with their tokens."""
        return self._result(self._candidates)

    def new_result(self) -> RequestOutput | None:
        """The news since the last call: candidates with new tokens or text, or that have
        ended, with these tokens and this text alone. None: nothing is new.
        """
        changed = [candidate for candidate in self._candidates if candidate.texts]
        if not changed:
            return None
        self._candidates = [_Candidate(index) for index in range(len(self._candidates))]
        return self._result(changed)

    def _end(self, reason: str) -> None:
        self._take(CandidateOutput(finish_reason=reason, is_last=True))
        self._timings = Timings()

    def _take(self, output: CandidateOutput) -> bool:
        """Adds an output; returns whether a candidate ended with it."""
        has_ended = False
        for completed in self._completion.add(output):
            self._candidates[completed.index].add(completed)
            has_ended = has_ended or completed.finish_reason is not None
            if completed.prompt_token_ids:
                self._add_prompt(completed)
            self._timings = completed.timings
        return has_ended

    def _add_prompt(self, output: CandidateOutput) -> None:
        later = output.prompt_token_ids[1:]
        if len(output.prompt_logprobs) == len(later):  # else it ended before they were computed
            self._prompt_logprobs = [None, *self._by_token(later, output.prompt_logprobs)]

    def _result(self, candidates: Sequence["_Candidate"]) -> RequestOutput:
        counts = self._record.usage
        return RequestOutput(
            request_id=self.spec.request_id,
            outputs=[self._completion_output(candidate) for candidate in candidates],
            usage=Usage(
                counts.prompt_tokens,
                counts.cached_tokens,
                counts.completion_tokens,
                counts.accepted_prediction_tokens,
                counts.rejected_prediction_tokens,
            ),
            timings=self._timings or self._completion.timings(),
            prompt=self._prompt,
            prompt_token_ids=list(self.spec.prompt_token_ids),
            prompt_logprobs=self._prompt_logprobs,
            finished=self.is_finished,
        )

    def _completion_output(self, candidate: "_Candidate") -> CompletionOutput:
        asks = self.spec.params.logprobs is not None
        token_ids, last = candidate.token_ids, candidate.last
        return CompletionOutput(
            index=candidate.index,
            text="".join(candidate.texts),
            token_ids=token_ids[:],
            finish_reason=last.finish_reason,
            stop_reason=last.matched_stop,
            score=last.score,
            logprobs=self._by_token(token_ids, candidate.logprobs) if asks else None,
        )

    def _by_token(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> list[Logprobs]:
        return [
            logprobs_of(token_id, e.logprob, e.rank, e.top_token_ids, e.top_logprobs, self._text_of)
            for token_id, e in zip(token_ids, entries, strict=True)
        ]


@dataclass(slots=True)
class _Candidate:
    """Outputs of one candidate, joined.

    Attributes:
        index: its number.
        token_ids: their tokens.
        logprobs: the log-probabilities of these.
        texts: their texts, one per output.
        last: the last of them.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    last: CandidateOutput = field(default_factory=CandidateOutput)

    def add(self, output: CandidateOutput) -> None:
        """Adds the next output."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.texts.append(output.text)
        self.last = output


def _answer(output: EngineOutput) -> CandidateOutput:
    """The form that an engine's output takes in the router."""
    reason, times = output.finish_reason, output.timings
    answer = CandidateOutput(
        index=output.index,
        token_ids=output.token_ids,
        finish_reason=None if reason is None else reason.value,
        is_last=output.is_last,
        logprobs=output.logprobs,
        score=output.score,
        accepted_drafts=output.accepted_drafts,
        rejected_drafts=output.rejected_drafts,
        cached_tokens=output.cached_tokens,
        prompt_logprobs=output.prompt_logprobs,
    )
    if times is not None:
        answer.stages = Timings(
            queue_ms=times.queue_ms,
            prefill_ms=times.prefill_ms,
            transfer_ms=times.transfer_ms,
            load_ms=times.load_ms,
        )
    return answer


def _token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Returns a function that decodes single tokens and keeps their texts."""
    return cache(lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False))
