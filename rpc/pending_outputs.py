"""`PendingOutputs`: one request's outputs that wait to be read.

A decode replica keeps them for a router that reads its stream slowly, the router for a
client that does. Waiting outputs are merged, so they hold at most `max_tokens` token ids
per candidate, however slow the reader is.
"""

from baton.v1 import request_pb2

__all__ = ["PendingOutputs"]


class PendingOutputs:
    """At most one output per candidate, and the request's end. False if there is none.

    A decode replica makes one per request and step, so this is on its hot path.
    """

    __slots__ = ("_by_candidate", "_end")

    def __init__(self) -> None:
        self._by_candidate: dict[int, request_pb2.CandidateOutput] = {}
        # The request's end, if it is an error or belongs to no waiting candidate: it must not
        # be merged into what a candidate got before.
        self._end: request_pb2.CandidateOutput | None = None

    def __bool__(self) -> bool:
        return bool(self._by_candidate) or self._end is not None

    def add(self, output: request_pb2.CandidateOutput) -> None:
        """Adds an output, which is merged with a waiting one of its candidate: token ids are
        joined in order, other fields merge as protobuf merges messages. The request's last
        output stays the last.
        """
        waiting = self._by_candidate.get(output.index)
        if output.HasField("error") or (waiting is not None and waiting.finish_reason):
            self._end = output
        elif waiting is None:
            self._by_candidate[output.index] = output
        else:
            waiting.MergeFrom(output)
            if output.is_last:
                self._by_candidate[output.index] = self._by_candidate.pop(output.index)

    def take(self) -> request_pb2.CandidateOutput:
        """Removes and returns the first output; there must be one."""
        if self._by_candidate:
            return self._by_candidate.pop(next(iter(self._by_candidate)))
        output, self._end = self._end, None
        assert output is not None
        return output

    def take_all(self) -> list[request_pb2.CandidateOutput]:
        """Removes and returns all outputs, the request's last one at the end."""
        outputs = list(self._by_candidate.values())
        if self._end is not None:
            outputs.append(self._end)
        self._by_candidate, self._end = {}, None
        return outputs
