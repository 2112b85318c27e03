"""`Completion`: one request's tokens as the messages that its client gets."""

import asyncio
from collections.abc import Callable, Sequence

from baton.v1 import common_pb2, decode_pb2, generation_pb2
from router.request import RoutedRequest
from router.text_stream import TextStream
from router.tokenizer import Tokenizer

__all__ = ["Completion"]


class Completion:
    """Text, stops, token counts and timings of one generation.

    Args:
        request: the request.
        tokenizer: the model's.
        arrival: event loop time at which the request came.
    """

    def __init__(self, request: RoutedRequest, tokenizer: Tokenizer, arrival: float) -> None:
        self._request_id = request.request_id
        self._text = TextStream(tokenizer, request.prompt_token_ids, request.params.stop)
        self._usage = common_pb2.Usage(prompt_tokens=len(request.prompt_token_ids))
        self._timings = common_pb2.Timings()
        self._arrival = arrival
        self._first_token: float | None = None
        self._now: Callable[[], float] = asyncio.get_running_loop().time

    def mark_routed(self) -> None:
        """The request leaves for the tiers."""
        self._timings.route_ms = self._elapsed_ms(self._arrival)

    def add(self, output: decode_pb2.DecodeOutput) -> generation_pb2.GenerateStreamResponse:
        """The message for the next tokens; the last one has a finish reason."""
        self._take_timings(output)
        piece = self._text.push(output.token_ids)
        text, matched_stop = piece.text, piece.matched_stop
        if output.finish_reason and matched_stop is None:
            end = self._text.finish()
            text, matched_stop = text + end.text, end.matched_stop
        token_ids = output.token_ids[: piece.num_tokens]
        self._usage.completion_tokens += len(token_ids)
        response = generation_pb2.GenerateStreamResponse(
            request_id=self._request_id, token_ids=token_ids, text=text
        )
        if matched_stop is not None:
            response.finish_reason = common_pb2.FINISH_REASON_STOP
            response.matched_stop.text = matched_stop
        elif output.finish_reason:
            response.finish_reason = output.finish_reason
            _set_matched_token(response, token_ids)
        if response.finish_reason:
            self._close(response)
        return response

    def _take_timings(self, output: decode_pb2.DecodeOutput) -> None:
        """The first tokens tell of the prompt. Later outputs tell only of the load that
        followed a handoff: what a resumed request computes again is decoding time.
        """
        if self._first_token is None:
            self._first_token = self._now()
            self._timings.first_token_ms = self._elapsed_ms(self._arrival)
            self._timings.MergeFrom(output.timings)
            self._usage.cached_tokens = output.cached_tokens
        elif not self._timings.load_ms:
            self._timings.load_ms = output.timings.load_ms

    def _close(self, response: generation_pb2.GenerateStreamResponse) -> None:
        """Completes the last message."""
        self._timings.decode_ms = self._elapsed_ms(self._first_token or self._arrival)
        self._timings.total_ms = self._elapsed_ms(self._arrival)
        response.usage.CopyFrom(self._usage)
        response.timings.CopyFrom(self._timings)

    def _elapsed_ms(self, since: float) -> float:
        return (self._now() - since) * 1000


def _set_matched_token(
    response: generation_pb2.GenerateStreamResponse, token_ids: Sequence[int]
) -> None:
    if response.finish_reason == common_pb2.FINISH_REASON_STOP and token_ids:
        response.matched_stop.token_id = token_ids[-1]
