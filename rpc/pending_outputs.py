"""`PendingOutputs`: one request's outputs that wait to be read.

A decode replica keeps them for a router that reads its stream slowly, the router for a
client that does. Waiting outputs are merged, so they hold at most `max_tokens` token ids
per candidate, however slow the reader is.
"""

from baton.v1 import request_pb2

__all__ = ["PendingOutputs", "add_output"]

PendingOutputs = dict[int, request_pb2.CandidateOutput]
"""At most one output per candidate, by the candidate's index, and the request's end.

A plain dict, because a decode replica makes one per request and step.
"""

# Key of the request's end, if it is an error or belongs to no waiting candidate: it must not be
# merged into what a candidate got before.
_END = -1


def add_output(pending: PendingOutputs, output: request_pb2.CandidateOutput) -> None:
    """Adds an output, which is merged with a waiting one of its candidate: token ids are joined
    in order, other fields merge as protobuf merges messages. The request's last output stays
    the last, and log-probabilities of the prompt stay on the first.
    """
    index = output.index
    waiting = pending.get(index)
    if output.HasField("error") or (waiting is not None and waiting.finish_reason):
        pending[_END] = output
    elif waiting is None:
        pending[index] = output
    else:
        waiting.MergeFrom(output)
        if output.is_last:
            pending[index] = pending.pop(index)
            if waiting.prompt_logprobs:
                _move_prompt_logprobs(waiting, next(iter(pending.values())))


def _move_prompt_logprobs(
    source: request_pb2.CandidateOutput, first: request_pb2.CandidateOutput
) -> None:
    if first is not source:
        first.prompt_logprobs.extend(source.prompt_logprobs)
        del source.prompt_logprobs[:]
