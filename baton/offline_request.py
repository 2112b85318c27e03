"""`OfflineRequest`: one prompt of `LLM.generate` on its way through the engine."""

import time
from collections.abc import Iterable, Sequence

from baton.results import Completion, Generation, Timings, Usage
from baton.sampling_params import SamplingParams
from engine.batch import DrawParams
from engine.request import EngineRequest, FinishReason, RequestOutput, StageTimings
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
        is_finished: whether `result` may be asked for.
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
            stop_token_ids=frozenset((*params.stop_token_ids, *own_stops)),
        )
        self.arrived_at = 0.0
        self.is_finished = False
        self._stream = TextStream(tokenizer, self.engine_request.prompt_token_ids, params.stop)
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._finish_reason = FinishReason.STOP
        self._matched_stop: str | int | None = None
        self._cached_tokens = 0
        self._stages = StageTimings()
        self._first_token_at = 0.0
        self._ended_at = 0.0

    def take(self, output: RequestOutput) -> None:
        """Takes in an output of the engine.

        Raises:
            BatonError: the request failed.
        """
        if output.error is not None:
            self.is_finished = True
            raise output.error
        self._take_facts(output)
        piece = self._stream.push(output.token_ids)
        self._token_ids += output.token_ids[: piece.num_tokens]
        self._take_piece(piece)
        if output.finish_reason is not None and not self.is_finished:
            self._take_end(output.finish_reason)

    def result(self) -> Generation:
        """The finished request."""
        completion = Completion(
            index=0,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason.value,
            matched_stop=self._matched_stop,
        )
        prompt_token_ids = self.engine_request.prompt_token_ids
        return Generation(
            request_id=self.engine_request.request_id,
            outputs=(completion,),
            usage=Usage(len(prompt_token_ids), self._cached_tokens, len(self._token_ids)),
            timings=self._timings(),
            prompt_token_ids=prompt_token_ids,
        )

    def _take_piece(self, piece: TextPiece) -> None:
        self._texts.append(piece.text)
        if piece.matched_stop is not None:
            self._finish(FinishReason.STOP, piece.matched_stop)

    def _take_end(self, reason: FinishReason) -> None:
        """The engine is done; text held back comes out, and may complete a stop."""
        self._take_piece(self._stream.finish())
        if not self.is_finished:
            self._finish(reason, self._token_ids[-1] if reason is FinishReason.STOP else None)

    def _take_facts(self, output: RequestOutput) -> None:
        if output.token_ids and not self._token_ids:
            self._first_token_at = time.monotonic()
            self._cached_tokens = output.cached_tokens
        if output.timings is not None:
            self._stages = output.timings

    def _finish(self, reason: FinishReason, matched_stop: str | int | None) -> None:
        self.is_finished = True
        self._finish_reason, self._matched_stop = reason, matched_stop
        self._ended_at = time.monotonic()

    def _timings(self) -> Timings:
        return Timings(
            queue_ms=self._stages.queue_ms,
            prefill_ms=self._stages.prefill_ms,
            load_ms=self._stages.load_ms,
            first_token_ms=1000 * (self._first_token_at - self.arrived_at),
            decode_ms=1000 * (self._ended_at - self._first_token_at),
            total_ms=1000 * (self._ended_at - self.arrived_at),
        )
