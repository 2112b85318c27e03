"""A request's tokens as messages for its client.

`Completion` turns replicas' outputs into the messages of a stream; `WholeGeneration`
joins such messages into one response.
"""

from collections.abc import Sequence

from baton.common.request.request_spec import RequestSpec
from baton.v1 import common_pb2, generation_pb2, request_pb2
from router.observe.request_record import RequestRecord
from router.requests.text_stream import TextStream
from router.requests.tokenizer import Tokenizer

__all__ = ["Completion", "WholeGeneration"]

_Response = generation_pb2.GenerateStreamResponse


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
        asks = spec.params.logprobs is not None
        self._running = {
            index: _Candidate(text.fork(), spec.stop_token_ids, asks)
            for index in range(spec.params.n)
        }
        self._record = record
        self._usage = record.usage
        self._usage.prompt_tokens = len(spec.prompt_token_ids)
        self._timings = common_pb2.Timings()
        self._has_prompt_timings = False
        self._returns_prompt = spec.params.prompt_logprobs is not None
        self._prompt: _Response | None = _Response()  # until the first message, which has it
        if self._returns_prompt:
            self._prompt.prompt_token_ids.extend(spec.prompt_token_ids)

    @property
    def is_over(self) -> bool:
        """Whether every candidate has ended; the last message then had usage and timings."""
        return not self._running

    def add(self, output: request_pb2.CandidateOutput) -> Sequence[_Response]:
        """Returns the messages for an output: none or one, or, if the request ends with it, one
        per candidate that had not ended. Outputs of candidates that have ended are dropped.
        """
        if output.HasField("timings"):
            self._add_timings(output)
        if self._returns_prompt and self._prompt is not None and output.prompt_logprobs:
            del self._prompt.prompt_logprobs[:]
            self._prompt.prompt_logprobs.extend(output.prompt_logprobs)
        is_for_client = bool(output.token_ids or output.finish_reason)
        responses = []
        if is_for_client and output.index in self._running:
            responses.append(self._response(output))
        if output.is_last:
            responses += [
                self._response(
                    request_pb2.CandidateOutput(index=index, finish_reason=output.finish_reason)
                )
                for index in list(self._running)
            ]
        if responses and self.is_over:
            self._add_totals(responses[-1])
        return responses

    def _response(self, output: request_pb2.CandidateOutput) -> _Response:
        if output.token_ids:
            self._record.mark_first_token()
        response = self._running[output.index].response_to(output)
        response.request_id = self._request_id
        if self._prompt is not None:
            response.MergeFrom(self._prompt)
            response.prompt_usage.prompt_tokens = self._usage.prompt_tokens
            response.prompt_usage.cached_tokens = self._usage.cached_tokens
            self._prompt = None
        usage = self._usage
        usage.completion_tokens += len(response.token_ids)
        if output.accepted_drafts or output.rejected_drafts:
            usage.accepted_prediction_tokens += output.accepted_drafts
            usage.rejected_prediction_tokens += output.rejected_drafts
        if response.finish_reason:
            del self._running[output.index]
            self._record.add_end(response.finish_reason, is_over=self.is_over)
        return response

    def _add_timings(self, output: request_pb2.CandidateOutput) -> None:
        """Takes all timings and the cached tokens of the first output that has timings. From
        later ones it takes only the times of the handoff: the time in which a resumed request
        computes its prompt again counts as decoding.
        """
        if not self._has_prompt_timings:
            self._has_prompt_timings = True
            self._timings.MergeFrom(output.timings)
            self._usage.cached_tokens = output.cached_tokens
        else:
            ours, theirs = self._timings, output.timings
            ours.transfer_ms = ours.transfer_ms or theirs.transfer_ms
            ours.load_ms = ours.load_ms or theirs.load_ms

    def _add_totals(self, response: _Response) -> None:
        """Adds usage and timings to the last message."""
        record, timings = self._record, self._timings
        timings.total_ms = record.ms_since_arrival()
        timings.decode_ms = timings.total_ms
        if record.routed_at is not None:
            timings.route_ms = record.ms_since_arrival(record.routed_at)
        timings.wait_ms = record.wait_s * 1000
        if record.first_token_at is not None:
            timings.first_token_ms = record.ms_since_arrival(record.first_token_at)
            timings.decode_ms -= timings.first_token_ms
        response.usage.CopyFrom(self._usage)
        response.timings.CopyFrom(timings)


class _Candidate:
    """One candidate's text, and its last token, which a later output may declare a stop token.

    Args:
        text: makes its text.
        stop_token_ids: the request's. A text of a form that is complete ends without one.
        asks_for_logprobs: whether messages have its tokens' log-probabilities.
    """

    def __init__(
        self, text: TextStream, stop_token_ids: frozenset[int], asks_for_logprobs: bool
    ) -> None:
        self._text = text
        self._stop_token_ids = stop_token_ids
        self._asks_for_logprobs = asks_for_logprobs
        self._last_token_id: int | None = None

    def response_to(self, output: request_pb2.CandidateOutput) -> _Response:
        """The message for the candidate's next tokens, or its end."""
        piece = self._text.push(output.token_ids)
        text, matched_stop = piece.text, piece.matched_stop
        if output.finish_reason and matched_stop is None:
            end = self._text.finish()
            text, matched_stop = text + end.text, end.matched_stop
        token_ids = output.token_ids[: piece.num_tokens]
        if token_ids:
            self._last_token_id = token_ids[-1]
        response = _Response(index=output.index, token_ids=token_ids, text=text)
        if self._asks_for_logprobs:
            response.logprobs.extend(output.logprobs[: piece.num_tokens])
        if matched_stop is not None:
            response.finish_reason = common_pb2.FINISH_REASON_STOP
            response.matched_stop.text = matched_stop
        elif output.finish_reason:
            self._add_end(response, output)
        return response

    def _add_end(self, response: _Response, output: request_pb2.CandidateOutput) -> None:
        response.finish_reason = output.finish_reason
        is_stop = output.finish_reason == common_pb2.FINISH_REASON_STOP
        if is_stop and self._last_token_id in self._stop_token_ids:
            response.matched_stop.token_id = self._last_token_id
        if output.HasField("score"):
            response.score = output.score


class WholeGeneration:
    """Joins the messages of a stream into one response.

    Attributes:
        num_bytes: about how many bytes the response has so far; it has no fewer.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._completions: dict[int, generation_pb2.Completion] = {}
        self._texts: dict[int, list[str]] = {}
        self._first: _Response | None = None
        self._last = _Response()

    def add(self, message: _Response) -> None:
        """Adds the next message."""
        if message.index not in self._completions:
            self._completions[message.index] = generation_pb2.Completion(index=message.index)
            self._texts[message.index] = []
        if self._first is None:
            self._first = message
        self._completions[message.index].token_ids.extend(message.token_ids)
        self._completions[message.index].logprobs.extend(message.logprobs)
        self._texts[message.index].append(message.text)
        self.num_bytes += len(message.token_ids) + len(message.text)
        if message.finish_reason:
            self._add_end(self._completions[message.index], message)
        self._last = message

    def response(self) -> generation_pb2.GenerateResponse:
        """The candidates by index. Called once the stream has ended."""
        first = self._first or self._last
        return generation_pb2.GenerateResponse(
            request_id=self._last.request_id,
            completions=[self._completions[index] for index in sorted(self._completions)],
            usage=self._last.usage,
            timings=self._last.timings,
            prompt_logprobs=first.prompt_logprobs,
            prompt_token_ids=first.prompt_token_ids,
        )

    def _add_end(self, completion: generation_pb2.Completion, message: _Response) -> None:
        completion.text = "".join(self._texts.pop(message.index))
        completion.finish_reason = message.finish_reason
        if message.HasField("matched_stop"):
            completion.matched_stop.CopyFrom(message.matched_stop)
        if message.HasField("score"):
            completion.score = message.score
