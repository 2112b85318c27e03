"""`OfflineRequest`: gathers the engine's outputs of one prompt of `LLM` or `AsyncLLM`."""

import time
from collections.abc import Callable, Sequence
from functools import cache

from baton.common.request.request_spec import RequestSpec
from baton.common.request.results import (
    CompletionOutput,
    Logprobs,
    RequestOutput,
    Timings,
    Usage,
    logprobs_of,
)
from engine.batch import TokenLogprobs
from engine.request import EngineOutput, FinishReason, StageTimings
from router.requests.text_stream import TextPiece, TextStream
from router.requests.tokenizer import Tokenizer

__all__ = ["OfflineRequest"]

_STOP = FinishReason.STOP.value


class OfflineRequest:
    """The tokens and texts of one request's candidates.

    Args:
        spec: the request.
        tokenizer: the model's.
        prompt: the prompt's text; None if it was given as token ids.

    Attributes:
        spec: the request.
        arrived_at: `time.monotonic()` when the request was added to the engine.
    """

    def __init__(self, spec: RequestSpec, tokenizer: Tokenizer, prompt: str | None = None) -> None:
        self.spec = spec
        self.arrived_at = 0.0
        self._prompt = prompt
        self._text_of = _token_texts(tokenizer) if spec.params.detokenize else None
        text = TextStream(tokenizer, spec)
        self._candidates = [
            _Candidate(index, text.fork(), spec.stop_token_ids) for index in range(spec.params.n)
        ]
        self._prompt_logprobs: list[Logprobs | None] | None = None
        self._cached_tokens = 0
        self._num_accepted = self._num_rejected = 0  # of draft tokens
        self._stages = StageTimings()
        self._first_token_at: float | None = None
        self._ended_at = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether all candidates have ended."""
        return all(candidate.is_finished for candidate in self._candidates)

    def add(self, output: EngineOutput) -> bool:
        """Adds an output of the engine.

        Returns:
            Whether a stop text, which the engine does not check, ended the output's candidate.

        Raises:
            BatonError: the request failed.
        """
        if output.error is not None:
            self._end_rest(FinishReason.ERROR.value)
            raise output.error
        self._add_usage(output)
        self._add_prompt_logprobs(output)
        candidate = self._candidates[output.index]
        is_new = not candidate.is_finished
        if is_new:
            candidate.add(output)
        if output.is_last:
            assert output.finish_reason is not None, "a request's last output ends a candidate"
            self._end_rest(output.finish_reason.value)
        self._ended_at = time.monotonic()
        return is_new and candidate.is_finished and output.finish_reason is None

    def ignore(self) -> None:
        """Ends a request that can never fit the KV pool: its result is one empty candidate with
        finish reason "ignored".
        """
        del self._candidates[1:]
        self._end_rest("ignored")
        self._ended_at = self._first_token_at = self.arrived_at

    def abort(self) -> None:
        """Ends a request that the engine has not got: its candidates are empty, with finish reason
        "abort".
        """
        self._end_rest(FinishReason.ABORTED.value)
        self.arrived_at = self._ended_at = self._first_token_at = time.monotonic()

    def result(self) -> RequestOutput:
        """Everything so far: all candidates with all their tokens."""
        return self._result([candidate.result(self._details) for candidate in self._candidates])

    def new_result(self) -> RequestOutput | None:
        """The news since the last call: candidates with new tokens or text, or that have
        ended, with these tokens and this text alone. None: nothing is new.
        """
        fresh = [candidate for candidate in self._candidates if candidate.is_fresh]
        if not fresh:
            return None
        return self._result([candidate.new_result(self._details) for candidate in fresh])

    def _result(self, outputs: list[CompletionOutput]) -> RequestOutput:
        prompt_token_ids = list(self.spec.prompt_token_ids)
        num_generated = sum(candidate.num_tokens for candidate in self._candidates)
        return RequestOutput(
            request_id=self.spec.request_id,
            outputs=outputs,
            usage=Usage(
                len(prompt_token_ids),
                self._cached_tokens,
                num_generated,
                self._num_accepted,
                self._num_rejected,
            ),
            timings=self._timings(),
            prompt=self._prompt,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            finished=self.is_finished,
        )

    def _add_prompt_logprobs(self, output: EngineOutput) -> None:
        later = self.spec.prompt_token_ids[1:]
        is_first = self._prompt_logprobs is None and len(output.prompt_logprobs) == len(later)
        if is_first and self.spec.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *self._by_token(later, output.prompt_logprobs)]

    def _details(
        self, token_ids: Sequence[int], details: Sequence[TokenLogprobs]
    ) -> list[Logprobs] | None:
        """The log-probabilities of generated tokens, if the request asks for them."""
        return None if self.spec.params.logprobs is None else self._by_token(token_ids, details)

    def _by_token(
        self, token_ids: Sequence[int], details: Sequence[TokenLogprobs]
    ) -> list[Logprobs]:
        return [
            logprobs_of(token_id, d.logprob, d.rank, d.top_token_ids, d.top_logprobs, self._text_of)
            for token_id, d in zip(token_ids, details, strict=True)
        ]

    def _end_rest(self, reason: str) -> None:
        for candidate in self._candidates:
            if not candidate.is_finished:
                candidate.end(reason)

    def _add_usage(self, output: EngineOutput) -> None:
        self._num_accepted += output.accepted_drafts
        self._num_rejected += output.rejected_drafts
        if output.token_ids and self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self._cached_tokens = output.cached_tokens
        if output.timings is not None:
            self._stages = output.timings

    def _timings(self) -> Timings:
        first_token_at = self._first_token_at or self._ended_at
        return Timings(
            queue_ms=self._stages.queue_ms,
            prefill_ms=self._stages.prefill_ms,
            load_ms=self._stages.load_ms,
            first_token_ms=1000 * (first_token_at - self.arrived_at),
            decode_ms=1000 * (self._ended_at - first_token_at),
            total_ms=1000 * (self._ended_at - self.arrived_at),
        )


_Details = Callable[[Sequence[int], Sequence[TokenLogprobs]], list[Logprobs] | None]


class _Candidate:
    """One candidate's tokens and text.

    Attributes:
        is_finished: whether it needs no more tokens.
        is_fresh: whether `new_result` has something new.
    """

    def __init__(self, index: int, stream: TextStream, stop_token_ids: frozenset[int]) -> None:
        self.is_finished = False
        self.is_fresh = False
        self._index = index
        self._stream = stream
        self._stop_token_ids = stop_token_ids
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._texts: list[str] = []
        self._num_returned = (0, 0)  # tokens and texts of earlier new results
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._score: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    def add(self, output: EngineOutput) -> None:
        """Adds the candidate's next tokens."""
        piece = self._stream.push(output.token_ids)
        self._token_ids += output.token_ids[: piece.num_tokens]
        self._logprobs += output.logprobs[: piece.num_tokens]
        self._score = output.score
        self._add_piece(piece)
        self.is_fresh = self.is_fresh or bool(output.token_ids)
        if output.finish_reason is not None and not self.is_finished:
            self.end(output.finish_reason.value)

    def end(self, reason: str) -> None:
        """Ends the candidate. Releases the text that was held back, which may complete a stop."""
        self._add_piece(self._stream.finish())
        if not self.is_finished:
            last = self._token_ids[-1] if self._token_ids else None
            # A text of a form that is complete ends without a stop token.
            is_stop = reason == _STOP and last in self._stop_token_ids
            self._finish(reason, last if is_stop else None)

    def result(self, details: _Details) -> CompletionOutput:
        """Everything so far; `details` makes the log-probabilities."""
        return self._since((0, 0), details)

    def new_result(self, details: _Details) -> CompletionOutput:
        """The news since the last call."""
        start, self._num_returned = self._num_returned, (self.num_tokens, len(self._texts))
        self.is_fresh = False
        return self._since(start, details)

    def _since(self, start: tuple[int, int], details: _Details) -> CompletionOutput:
        token, text = start
        token_ids = self._token_ids[token:]
        return CompletionOutput(
            index=self._index,
            text="".join(self._texts[text:]),
            token_ids=token_ids,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            score=self._score,
            logprobs=details(token_ids, self._logprobs[token:]),
        )

    def _add_piece(self, piece: TextPiece) -> None:
        self._texts.append(piece.text)
        if piece.matched_stop is not None:
            self._finish(_STOP, piece.matched_stop)

    def _finish(self, reason: str, stop_reason: str | int | None) -> None:
        self.is_finished = self.is_fresh = True
        self._finish_reason, self._stop_reason = reason, stop_reason


def _token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Returns a function that decodes single tokens and keeps their texts."""
    return cache(lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False))
