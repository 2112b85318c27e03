"""`WholeGeneration`: a stream's messages as one response."""

from baton.v1 import generation_pb2

__all__ = ["WholeGeneration"]


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
