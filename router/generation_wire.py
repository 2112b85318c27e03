"""Answers as the messages of `GenerationService`."""

from collections.abc import Iterable, Sequence
from typing import cast

from baton.common.request.answer import CandidateOutput, TokenCounts, TokenLogprobs
from baton.common.request.results import Timings
from baton.v1 import common_pb2, generation_pb2

__all__ = ["WholeGeneration", "WholePrompts", "stream_response", "usage_to_proto"]

_FINISH_REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "abort": common_pb2.FINISH_REASON_ABORTED,
}
_STAGES = tuple(Timings.__slots__)


def stream_response(output: CandidateOutput) -> generation_pb2.GenerateStreamResponse:
    """The message of a stream for an output."""
    response = generation_pb2.GenerateStreamResponse(
        request_id=output.request_id,
        index=output.index,
        token_ids=output.token_ids,
        text=output.text,
        prompt_index=output.prompt_index,
    )
    if output.logprobs:
        response.logprobs.extend(_messages(output.logprobs))
    if output.prompt_usage is not None:
        _add_prompt(response, output)
        response.prompt_usage.CopyFrom(usage_to_proto(output.prompt_usage))
    if output.finish_reason is not None:
        _add_end(response, output)
    if output.usage is not None and output.timings is not None:
        response.usage.CopyFrom(usage_to_proto(output.usage))
        response.timings.CopyFrom(_timings(output.timings))
    return response


class WholeGeneration:
    """Joins the outputs of a request into one response.

    Attributes:
        num_bytes: about how many bytes the response has so far; it has no fewer.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._completions: dict[int, generation_pb2.Completion] = {}
        self._texts: dict[int, list[str]] = {}
        self._response = generation_pb2.GenerateResponse()

    def add(self, output: CandidateOutput) -> None:
        """Adds the next output."""
        index = output.index
        if index not in self._completions:
            self._completions[index] = generation_pb2.Completion(index=index)
            self._texts[index] = []
        completion = self._completions[index]
        completion.token_ids.extend(output.token_ids)
        completion.logprobs.extend(_messages(output.logprobs))
        self._texts[index].append(output.text)
        self.num_bytes += len(output.token_ids) + len(output.text)
        if output.prompt_usage is not None:
            _add_prompt(self._response, output)
        if output.finish_reason is not None:
            completion.text = "".join(self._texts.pop(index))
            _add_end(completion, output)
        if output.usage is not None and output.timings is not None:
            self._response.request_id = output.request_id
            self._response.usage.CopyFrom(usage_to_proto(output.usage))
            self._response.timings.CopyFrom(_timings(output.timings))

    def response(self) -> generation_pb2.GenerateResponse:
        """The candidates by index. Called once, when the request has ended."""
        self._response.completions.extend(
            self._completions[index] for index in sorted(self._completions)
        )
        return self._response


class WholePrompts:
    """Joins the outputs of several prompts into one response.

    Args:
        request_id: the request's name.
        num_prompts: how many prompts it has.

    Attributes:
        num_bytes: about how many bytes the response has so far; it has no fewer.
    """

    def __init__(self, request_id: str, num_prompts: int) -> None:
        self.num_bytes = 0
        self._request_id = request_id
        self._prompts = [WholeGeneration() for _ in range(num_prompts)]

    def add(self, output: CandidateOutput) -> None:
        """Adds the next output."""
        prompt = self._prompts[output.prompt_index]
        num_bytes = prompt.num_bytes
        prompt.add(output)
        self.num_bytes += prompt.num_bytes - num_bytes

    def response(self) -> generation_pb2.GenerateResponse:
        """The prompts' responses. Called once, when the request has ended."""
        return generation_pb2.GenerateResponse(
            request_id=self._request_id,
            responses=[prompt.response() for prompt in self._prompts],
        )


def _add_prompt(
    response: generation_pb2.GenerateStreamResponse | generation_pb2.GenerateResponse,
    output: CandidateOutput,
) -> None:
    response.prompt_token_ids.extend(output.prompt_token_ids)
    response.prompt_logprobs.extend(_messages(output.prompt_logprobs))


def _add_end(
    response: generation_pb2.GenerateStreamResponse | generation_pb2.Completion,
    output: CandidateOutput,
) -> None:
    response.finish_reason = _FINISH_REASONS[output.finish_reason or ""]
    if isinstance(output.matched_stop, str):
        response.matched_stop.text = output.matched_stop
    elif output.matched_stop is not None:
        response.matched_stop.token_id = output.matched_stop
    if output.score is not None:
        response.score = output.score


def usage_to_proto(counts: TokenCounts) -> common_pb2.Usage:
    """The message with token counts."""
    return common_pb2.Usage(
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        completion_tokens=counts.completion_tokens,
        accepted_prediction_tokens=counts.accepted_prediction_tokens,
        rejected_prediction_tokens=counts.rejected_prediction_tokens,
    )


def _messages(logprobs: Sequence[TokenLogprobs]) -> Iterable[common_pb2.TokenLogprobs]:
    """Log-probabilities of a worker, which are messages as they came."""
    return cast("Iterable[common_pb2.TokenLogprobs]", logprobs)


def _timings(timings: Timings) -> common_pb2.Timings:
    return common_pb2.Timings(**{stage: getattr(timings, stage) for stage in _STAGES})
