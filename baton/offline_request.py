"""`OfflineRequest`: one prompt of `LLM.generate` on its way through the engine."""

import time
from collections.abc import Iterable, Sequence

from baton.errors import BatonError
from baton.results import Completion, Generation, Timings, Usage
from baton.sampling_params import SamplingParams
from engine.batch import DrawParams
from engine.request import EngineRequest, FinishReason, RequestOutput, StageTimings
from engine.wire import beam_search_params
from router.text_stream import TextPiece, TextStream
from router.tokenizer import Tokenizer

__all__ = ["OfflineRequest"]


class OfflineRequest:
    """Gathers the engine's outputs of one request, as text and as tokens.

    Args:
        request_id: unique among the engine's requests.
        prompt_token_ids: the prompt.
        params: how tokens are drawn, and when to stop.
        seed: in place of `params.seed`, which may be unset.
        eos_token_ids: the model's own stops.
        tokenizer: the model's.

    Attributes:
        engine_request: for the engine.
        arrived_at: `time.monotonic()` when the engine got it.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        eos_token_ids: Iterable[int],
        tokenizer: Tokenizer,
    ) -> None:
        own_stops = () if params.ignore_eos else eos_token_ids
        self.engine_request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            draw=DrawParams(params.temperature, params.top_k, params.top_p, seed),
            max_tokens=params.max_tokens,
            num_candidates=params.num_candidates,
            num_returned=params.n,
            beam_search=beam_search_params(params),
            stop_token_ids=frozenset((*params.stop_token_ids, *own_stops)),
        )
        self.arrived_at = 0.0
        prompt = self.engine_request.prompt_token_ids
        text = TextStream(tokenizer, prompt, params.stop)
        self._candidates = [_Candidate(index, text.fork()) for index in range(params.n)]
        self._cached_tokens = 0
        self._stages = StageTimings()
        self._first_token_at: float | None = None
        self._ended_at = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether `result` may be asked for."""
        return all(candidate.is_finished for candidate in self._candidates)

    def take(self, output: RequestOutput) -> bool:
        """Takes in an output of the engine.

        Returns:
            Whether a stop text ended the output's candidate, which the engine cannot see.

        Raises:
            BatonError: the request failed.
        """
        if output.error is not None:
            self._fail(output.error)
        self._take_facts(output)
        candidate = self._candidates[output.index]
        is_new = not candidate.is_finished
        if is_new:
            candidate.take(output)
        if output.is_last:
            self._end_rest(output.finish_reason)
        self._ended_at = time.monotonic()
        return is_new and candidate.is_finished and output.finish_reason is None

    def ignore(self) -> None:
        """The request can never fit the KV pool: its result is one empty candidate."""
        del self._candidates[1:]
        self._end_rest(FinishReason.IGNORED)
        self._ended_at = self._first_token_at = self.arrived_at

    def result(self) -> Generation:
        """The finished request."""
        prompt = self.engine_request.prompt_token_ids
        outputs = tuple(candidate.result() for candidate in self._candidates)
        num_generated = sum(len(completion.token_ids) for completion in outputs)
        return Generation(
            request_id=self.engine_request.request_id,
            outputs=outputs,
            usage=Usage(len(prompt), self._cached_tokens, num_generated),
            timings=self._timings(),
            prompt_token_ids=prompt,
        )

    def _fail(self, error: BatonError) -> None:
        self._end_rest(FinishReason.ERROR)
        raise error

    def _end_rest(self, reason: FinishReason | None) -> None:
        for candidate in self._candidates:
            if not candidate.is_finished:
                candidate.end(reason or FinishReason.STOP)

    def _take_facts(self, output: RequestOutput) -> None:
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

    def __init__(self, index: int, stream: TextStream) -> None:
        self.is_finished = False
        self._index = index
        self._stream = stream
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._finish_reason = FinishReason.STOP
        self._matched_stop: str | int | None = None
        self._score: float | None = None

    def take(self, output: RequestOutput) -> None:
        """Takes in its next tokens."""
        piece = self._stream.push(output.token_ids)
        self._token_ids += output.token_ids[: piece.num_tokens]
        self._score = output.score
        self._take_piece(piece)
        if output.finish_reason is not None and not self.is_finished:
            self.end(output.finish_reason)

    def end(self, reason: FinishReason) -> None:
        """Nothing more comes; text held back comes out, and may complete a stop."""
        self._take_piece(self._stream.finish())
        if not self.is_finished:
            is_stop = reason is FinishReason.STOP and self._token_ids
            self._finish(reason, self._token_ids[-1] if is_stop else None)

    def result(self) -> Completion:
        """The finished candidate."""
        return Completion(
            index=self._index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason.value,
            matched_stop=self._matched_stop,
            score=self._score,
        )

    def _take_piece(self, piece: TextPiece) -> None:
        self._texts.append(piece.text)
        if piece.matched_stop is not None:
            self._finish(FinishReason.STOP, piece.matched_stop)

    def _finish(self, reason: FinishReason, matched_stop: str | int | None) -> None:
        self.is_finished = True
        self._finish_reason, self._matched_stop = reason, matched_stop
