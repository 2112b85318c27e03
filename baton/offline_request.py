"""`OfflineRequest`: gathers the engine's outputs of one prompt of `LLM.generate`."""

import time
from collections.abc import Sequence

from baton.request_spec import RequestSpec
from baton.results import Completion, Generation, Logprobs, Timings, Usage, logprobs_of
from engine.batch import TokenLogprobs
from engine.request import EngineOutput, FinishReason, StageTimings
from router.text_stream import TextPiece, TextStream
from router.tokenizer import Tokenizer

__all__ = ["OfflineRequest"]

_STOP = FinishReason.STOP.value


class OfflineRequest:
    """The tokens and texts of one request's candidates.

    Args:
        spec: the request.
        tokenizer: the model's.

    Attributes:
        spec: the request.
        arrived_at: `time.monotonic()` when the request was added to the engine.
    """

    def __init__(self, spec: RequestSpec, tokenizer: Tokenizer) -> None:
        self.spec = spec
        self.arrived_at = 0.0
        text = TextStream(tokenizer, spec)
        self._candidates = [
            _Candidate(index, text.fork(), spec.stop_token_ids) for index in range(spec.params.n)
        ]
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._cached_tokens = 0
        self._stages = StageTimings()
        self._first_token_at: float | None = None
        self._ended_at = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether `result` may be called."""
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
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
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

    def result(self) -> Generation:
        """The finished request."""
        prompt = self.spec.prompt_token_ids
        asks = self.spec.params.logprobs is not None
        outputs = tuple(candidate.result(with_logprobs=asks) for candidate in self._candidates)
        num_generated = sum(len(completion.token_ids) for completion in outputs)
        return Generation(
            request_id=self.spec.request_id,
            outputs=outputs,
            usage=Usage(len(prompt), self._cached_tokens, num_generated),
            timings=self._timings(),
            prompt_token_ids=prompt,
            prompt_logprobs=self._prompt_result(),
        )

    def _prompt_result(self) -> tuple[Logprobs | None, ...] | None:
        later = self.spec.prompt_token_ids[1:]
        is_ignored = len(self._prompt_logprobs) != len(later)
        if self.spec.params.prompt_logprobs is None or is_ignored:
            return None
        return (None, *_by_token(later, self._prompt_logprobs))

    def _end_rest(self, reason: str) -> None:
        for candidate in self._candidates:
            if not candidate.is_finished:
                candidate.end(reason)

    def _add_usage(self, output: EngineOutput) -> None:
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


class _Candidate:
    """One candidate's tokens and text.

    Attributes:
        is_finished: whether it needs no more tokens.
    """

    def __init__(self, index: int, stream: TextStream, stop_token_ids: frozenset[int]) -> None:
        self.is_finished = False
        self._index = index
        self._stream = stream
        self._stop_token_ids = stop_token_ids
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._texts: list[str] = []
        self._finish_reason = _STOP
        self._matched_stop: str | int | None = None
        self._score: float | None = None

    def add(self, output: EngineOutput) -> None:
        """Adds the candidate's next tokens."""
        piece = self._stream.push(output.token_ids)
        self._token_ids += output.token_ids[: piece.num_tokens]
        self._logprobs += output.logprobs[: piece.num_tokens]
        self._score = output.score
        self._add_piece(piece)
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

    def result(self, *, with_logprobs: bool) -> Completion:
        """The finished candidate."""
        return Completion(
            index=self._index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            matched_stop=self._matched_stop,
            score=self._score,
            logprobs=_by_token(self._token_ids, self._logprobs) if with_logprobs else None,
        )

    def _add_piece(self, piece: TextPiece) -> None:
        self._texts.append(piece.text)
        if piece.matched_stop is not None:
            self._finish(_STOP, piece.matched_stop)

    def _finish(self, reason: str, matched_stop: str | int | None) -> None:
        self.is_finished = True
        self._finish_reason, self._matched_stop = reason, matched_stop


def _by_token(token_ids: Sequence[int], details: Sequence[TokenLogprobs]) -> tuple[Logprobs, ...]:
    return tuple(
        logprobs_of(token_id, found.logprob, found.rank, found.top_token_ids, found.top_logprobs)
        for token_id, found in zip(token_ids, details, strict=True)
    )
