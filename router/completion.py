"""`Completion`: one request's tokens as the messages that its client gets.

`WholeGeneration`: a stream's messages as one response.
"""

import asyncio
from collections.abc import Callable, Sequence

from baton.v1 import common_pb2, decode_pb2, generation_pb2
from router.request import RoutedRequest
from router.text_stream import TextStream
from router.tokenizer import Tokenizer

__all__ = ["Completion", "WholeGeneration"]

_Response = generation_pb2.GenerateStreamResponse


class Completion:
    """Text, stops, token counts and timings of one request's candidates.

    Args:
        request: the request.
        tokenizer: the model's.
        arrival: event loop time at which the request came.
    """

    def __init__(self, request: RoutedRequest, tokenizer: Tokenizer, arrival: float) -> None:
        self._request_id = request.request_id
        params, prompt = request.params, request.prompt_token_ids
        text = TextStream(tokenizer, prompt, params.stop)
        self._running = {index: _Candidate(text.fork()) for index in range(params.n)}
        self._usage = common_pb2.Usage(prompt_tokens=len(prompt))
        self._timings = common_pb2.Timings()
        self._arrival = arrival
        self._has_prompt_timings = False
        self._first_token: float | None = None
        self._now: Callable[[], float] = asyncio.get_running_loop().time

    @property
    def is_over(self) -> bool:
        """Whether every candidate has ended; the last message told so."""
        return not self._running

    def mark_routed(self) -> None:
        """The request leaves for the tiers."""
        self._timings.route_ms = self._elapsed_ms(self._arrival)

    def add(self, output: decode_pb2.DecodeOutput) -> Sequence[_Response]:
        """The messages for a candidate's next tokens: none where there is nothing to tell,
        one, or, where the request ends with it, one per candidate that had not ended.
        What comes for a candidate that has ended is dropped.
        """
        if output.HasField("timings"):
            self._take_timings(output)
        has_news = bool(output.token_ids or output.finish_reason)
        responses = [self._response(output)] if has_news and output.index in self._running else []
        if output.is_last:
            responses += [
                self._response(
                    decode_pb2.DecodeOutput(index=index, finish_reason=output.finish_reason)
                )
                for index in list(self._running)
            ]
        if responses and self.is_over:
            self._close(responses[-1])
        return responses

    def _response(self, output: decode_pb2.DecodeOutput) -> _Response:
        if self._first_token is None and output.token_ids:
            self._first_token = self._now()
            self._timings.first_token_ms = self._elapsed_ms(self._arrival)
        response = self._running[output.index].take(output)
        response.request_id = self._request_id
        self._usage.completion_tokens += len(response.token_ids)
        if response.finish_reason:
            del self._running[output.index]
        return response

    def _take_timings(self, output: decode_pb2.DecodeOutput) -> None:
        """The first output with timings tells of the prompt. Later ones tell only of its
        handoff: what a resumed request computes again is decoding time.
        """
        if not self._has_prompt_timings:
            self._has_prompt_timings = True
            self._timings.MergeFrom(output.timings)
            self._usage.cached_tokens = output.cached_tokens
        else:
            ours, theirs = self._timings, output.timings
            ours.transfer_ms = ours.transfer_ms or theirs.transfer_ms
            ours.load_ms = ours.load_ms or theirs.load_ms

    def _close(self, response: _Response) -> None:
        """Completes the last message."""
        self._timings.decode_ms = self._elapsed_ms(self._first_token or self._arrival)
        self._timings.total_ms = self._elapsed_ms(self._arrival)
        response.usage.CopyFrom(self._usage)
        response.timings.CopyFrom(self._timings)

    def _elapsed_ms(self, since: float) -> float:
        return (self._now() - since) * 1000


class _Candidate:
    """One candidate's text, and its last token, which may prove to be a stop later."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self._last_token_id: int | None = None

    def take(self, output: decode_pb2.DecodeOutput) -> _Response:
        """The message for its next tokens; a finish reason ends it."""
        piece = self._text.push(output.token_ids)
        text, matched_stop = piece.text, piece.matched_stop
        if output.finish_reason and matched_stop is None:
            end = self._text.finish()
            text, matched_stop = text + end.text, end.matched_stop
        token_ids = output.token_ids[: piece.num_tokens]
        if token_ids:
            self._last_token_id = token_ids[-1]
        response = _Response(index=output.index, token_ids=token_ids, text=text)
        if matched_stop is not None:
            response.finish_reason = common_pb2.FINISH_REASON_STOP
            response.matched_stop.text = matched_stop
        elif output.finish_reason:
            self._end(response, output)
        return response

    def _end(self, response: _Response, output: decode_pb2.DecodeOutput) -> None:
        response.finish_reason = output.finish_reason
        is_stop = output.finish_reason == common_pb2.FINISH_REASON_STOP
        if is_stop and self._last_token_id is not None:
            response.matched_stop.token_id = self._last_token_id
        if output.HasField("score"):
            response.score = output.score


class WholeGeneration:
    """Gathers the messages of a stream."""

    def __init__(self) -> None:
        self._completions: dict[int, generation_pb2.Completion] = {}
        self._texts: dict[int, list[str]] = {}
        self._last = generation_pb2.GenerateStreamResponse()

    def add(self, message: generation_pb2.GenerateStreamResponse) -> None:
        """Takes the next message."""
        if message.index not in self._completions:
            self._completions[message.index] = generation_pb2.Completion(index=message.index)
            self._texts[message.index] = []
        self._completions[message.index].token_ids.extend(message.token_ids)
        self._texts[message.index].append(message.text)
        if message.finish_reason:
            self._end(self._completions[message.index], message)
        self._last = message

    def response(self) -> generation_pb2.GenerateResponse:
        """The candidates by index, once the stream has ended."""
        return generation_pb2.GenerateResponse(
            request_id=self._last.request_id,
            completions=[self._completions[index] for index in sorted(self._completions)],
            usage=self._last.usage,
            timings=self._last.timings,
        )

    def _end(
        self,
        completion: generation_pb2.Completion,
        message: generation_pb2.GenerateStreamResponse,
    ) -> None:
        completion.text = "".join(self._texts.pop(message.index))
        completion.finish_reason = message.finish_reason
        if message.HasField("matched_stop"):
            completion.matched_stop.CopyFrom(message.matched_stop)
        if message.HasField("score"):
            completion.score = message.score
