"""Requests that clients of all languages make, and their answers in one comparable form."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.v1 import common_pb2, generation_pb2

__all__ = ["CASES", "Candidate", "candidates_of", "stop_request"]

_UNICODE = "Grüße, 世界 🎉 ok"


def _request(text: str = "", *, max_tokens: int = 24, **sampling: Any) -> Any:
    return generation_pb2.GenerateRequest(
        text=text,
        sampling=common_pb2.SamplingParams(**sampling),
        stopping=common_pb2.StoppingParams(max_tokens=max_tokens),
    )


def _greedy() -> Any:
    return _request("Open the file", temperature=0)


def _candidates() -> Any:
    """The seed needs all of its 64 bits."""
    return _request("Return a list of", temperature=1, seed=2**64 - 3, n=3, logprobs=2)


def _unicode() -> Any:
    """A text whose characters have several tokens each."""
    form = common_pb2.StructuredOutputs(choice=[_UNICODE])
    return _request(f"Say {_UNICODE}: ", max_tokens=64, structured_outputs=form, seed=7)


def _prompts() -> Any:
    request = _request(temperature=0.8, seed=5)
    for text in ("Open the file", "Ёлка 🎄", "Return a list"):
        request.prompts.prompts.add(text=text)
    return request


def _chat() -> Any:
    request = _request(temperature=0.5, seed=11, logprobs=0)
    request.chat.messages_json = '[{"role": "user", "content": "How do I öpen a file?"}]'
    return request


CASES: dict[str, Callable[[], Any]] = {
    "greedy": _greedy,
    "candidates": _candidates,
    "unicode": _unicode,
    "prompts": _prompts,
    "chat": _chat,
}


def stop_request(greedy_text: str) -> Any:
    """Returns a request that a text of its answer ends, given the answer without one."""
    request = _greedy()
    request.stopping.stop.append(greedy_text[-4:])
    return request


@dataclass(frozen=True)
class Candidate:
    """A candidate's whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: int
    matched_stop: bytes
    top_token_ids: tuple[tuple[int, ...], ...]
    logprobs: Any

    def nearly(self) -> "Candidate":
        """The same; equals candidates whose log-probabilities differ in the last bits, which depend
        on the batch.
        """
        return replace(self, logprobs=pytest.approx(self.logprobs, abs=1e-3))


def candidates_of(messages: Sequence[Any]) -> dict[tuple[int, int], Candidate]:
    """The candidates of a whole or a streamed answer, by prompt and number."""
    pieces = defaultdict(list)
    for message in messages:
        if isinstance(message, generation_pb2.GenerateStreamResponse):
            pieces[message.prompt_index, message.index].append(message)
            continue
        for prompt, response in enumerate(message.responses or [message]):
            for completion in response.completions:
                pieces[prompt, completion.index].append(completion)
    return {key: _joined(values) for key, values in pieces.items()}


def _joined(pieces: Iterable[Any]) -> Candidate:
    pieces = list(pieces)
    logprobs = [entry for piece in pieces for entry in piece.logprobs]
    return Candidate(
        "".join(piece.text for piece in pieces),
        tuple(token_id for piece in pieces for token_id in piece.token_ids),
        pieces[-1].finish_reason,
        pieces[-1].matched_stop.SerializeToString(),
        tuple(tuple(entry.top_token_ids) for entry in logprobs),
        [entry.logprob for entry in logprobs],
    )
