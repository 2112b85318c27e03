"""`Completion`: turns workers' outputs into those that the client receives."""

from collections.abc import Sequence
from dataclasses import replace

from baton.common.request.answer import CandidateOutput, TokenCounts, TokenLogprobs
from baton.common.request.request_spec import RequestSpec
from baton.common.request.results import Timings
from router.observe.request_record import RequestRecord
from router.requests.text_stream import TextStream
from router.requests.tokenizer import Tokenizer

__all__ = ["Completion"]


class Completion:
    """Text, stops, token counts and timings of one request's candidates.

    Args:
        spec: the request.
        tokenizer: the model's.
        record: gets the request's times and counts.
    """

    def __init__(self, spec: RequestSpec, tokenizer: Tokenizer, record: RequestRecord) -> None:
        self._request_id = spec.client_id
        text = TextStream(tokenizer, spec)
        texts = (text, *(text.fork() for _ in range(1, spec.params.n)))
        asks = spec.params.logprobs is not None
        self._running = {
            index: _Candidate(text, spec.stop_token_ids, asks) for index, text in enumerate(texts)
        }
        self._record = record
        self._usage = record.usage
        self._usage.prompt_tokens = len(spec.prompt_token_ids)
        self._stages: Timings | None = None
        self._is_first = True
        self._returns_prompt = spec.params.prompt_logprobs is not None
        self._prompt_token_ids = spec.prompt_token_ids
        self._prompt_logprobs: Sequence[TokenLogprobs] = ()

    @property
    def is_over(self) -> bool:
        """Whether every candidate has ended; the last output then had usage and timings."""
        return not self._running

    def add(self, output: CandidateOutput) -> Sequence[CandidateOutput]:
        """Returns what the client receives for an output: nothing or the output itself, or, if the
        request ends with it, an end of each candidate that had not ended. Outputs of candidates
        that have ended are dropped.
        """
        if output.stages is not None:
            self._add_stages(output.stages, output.cached_tokens)
        if output.prompt_logprobs:
            if self._is_first:
                self._prompt_logprobs = output.prompt_logprobs
            output.prompt_logprobs = ()
        finish_reason = output.finish_reason
        outputs = []
        if (output.token_ids or finish_reason) and output.index in self._running:
            outputs.append(self._completed(output))
        if output.is_last:
            outputs += [
                self._completed(CandidateOutput(index, finish_reason=finish_reason))
                for index in list(self._running)
            ]
        if outputs and not self._running:
            outputs[-1].usage, outputs[-1].timings = self._usage, self.timings()
        return outputs

    def timings(self) -> Timings:
        """The time of each stage until now."""
        record = self._record
        total_ms = decode_ms = record.ms_since_arrival()
        first_token_ms = route_ms = 0.0
        if record.routed_at is not None:
            route_ms = record.ms_since_arrival(record.routed_at)
        if record.first_token_at is not None:
            first_token_ms = record.ms_since_arrival(record.first_token_at)
            decode_ms -= first_token_ms
        return replace(
            self._stages or Timings(),
            route_ms=route_ms,
            first_token_ms=first_token_ms,
            decode_ms=decode_ms,
            total_ms=total_ms,
            wait_ms=record.wait_s * 1000,
        )

    def _completed(self, output: CandidateOutput) -> CandidateOutput:
        if output.token_ids:
            self._record.mark_first_token()
        self._running[output.index].complete(output)
        output.request_id = self._request_id
        if self._is_first:
            self._add_prompt(output)
        usage = self._usage
        usage.completion_tokens += len(output.token_ids)
        if output.accepted_drafts or output.rejected_drafts:
            usage.accepted_prediction_tokens += output.accepted_drafts
            usage.rejected_prediction_tokens += output.rejected_drafts
        if output.finish_reason:
            del self._running[output.index]
            self._record.add_end(output.finish_reason, is_over=self.is_over)
        return output

    def _add_prompt(self, output: CandidateOutput) -> None:
        """Adds what the first output has of the prompt."""
        self._is_first = False
        usage = self._usage
        output.prompt_usage = TokenCounts(usage.prompt_tokens, usage.cached_tokens)
        if self._returns_prompt:
            output.prompt_token_ids = self._prompt_token_ids
            output.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()

    def _add_stages(self, stages: Timings, cached_tokens: int) -> None:
        """Takes all times and the cached tokens of the first output that has times. From later
        ones it takes only the times of the handoff: the time in which a resumed request computes
        its prompt again counts as decoding.
        """
        known = self._stages
        if known is None:
            self._stages = stages
            self._usage.cached_tokens = cached_tokens
        else:
            self._stages = replace(
                known,
                transfer_ms=known.transfer_ms or stages.transfer_ms,
                load_ms=known.load_ms or stages.load_ms,
            )


class _Candidate:
    """One candidate's text, and its last token, which a later output may declare a stop token.

    Args:
        text: makes its text.
        stop_token_ids: the request's. A text of a form that is complete ends without one.
        asks_for_logprobs: whether outputs have its tokens' log-probabilities.
    """

    def __init__(
        self, text: TextStream, stop_token_ids: frozenset[int], asks_for_logprobs: bool
    ) -> None:
        self._text = text
        self._stop_token_ids = stop_token_ids
        self._asks_for_logprobs = asks_for_logprobs
        self._last_token_id: int | None = None

    def complete(self, output: CandidateOutput) -> None:
        """Adds the text and the stop to the candidate's next output, and cuts what a stop text
        leaves out.
        """
        piece = self._text.push(output.token_ids)
        output.text, output.matched_stop = piece.text, piece.matched_stop
        if output.finish_reason and piece.matched_stop is None:
            end = self._text.finish()
            output.text, output.matched_stop = piece.text + end.text, end.matched_stop
        if piece.num_tokens < len(output.token_ids):
            output.token_ids = output.token_ids[: piece.num_tokens]
            output.logprobs = output.logprobs[: piece.num_tokens]
        if not self._asks_for_logprobs:
            output.logprobs = ()
        if output.token_ids:
            self._last_token_id = output.token_ids[-1]
        if output.matched_stop is not None:
            output.finish_reason = "stop"
        elif output.finish_reason == "stop" and self._last_token_id in self._stop_token_ids:
            output.matched_stop = self._last_token_id
