"""Workers' messages with new tokens as `CandidateOutput`."""

from baton.common.errors import InternalError
from baton.common.request.answer import CandidateOutput
from baton.common.request.wire import FINISH_REASONS, parse_timings
from baton.v1 import common_pb2, request_pb2

__all__ = ["output_from_proto"]

_FINISH_REASONS = {common_pb2.FINISH_REASON_UNSPECIFIED: None, **FINISH_REASONS}


def output_from_proto(message: request_pb2.CandidateOutput) -> CandidateOutput:
    """The output that a worker sent.

    Raises:
        InternalError: the finish reason is unknown.
    """
    output = CandidateOutput(message.index, message.token_ids[:])
    if message.logprobs:
        output.logprobs = message.logprobs
    if message.accepted_drafts or message.rejected_drafts:
        output.accepted_drafts = message.accepted_drafts
        output.rejected_drafts = message.rejected_drafts
    if message.is_last or message.finish_reason:
        output.is_last = message.is_last
        if message.finish_reason not in _FINISH_REASONS:
            raise InternalError(
                f"finish_reason is {message.finish_reason}, which this router does not know; is "
                "the worker of a later version?"
            )
        output.finish_reason = _FINISH_REASONS[message.finish_reason]
        output.score = message.score if message.HasField("score") else None
    if message.HasField("timings"):
        output.stages = parse_timings(message.timings)
    output.cached_tokens = message.cached_tokens
    if message.prompt_logprobs:
        output.prompt_logprobs = message.prompt_logprobs
    return output
