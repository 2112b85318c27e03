"""Messages to workers and their answers, which `workers/worker_loop.py` describes. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.common.errors import BatonError
from benchmarks.request import BenchRequest

__all__ = ["PeerAnswer", "PeerError", "PeerRun", "format_run", "parse_answer", "parse_run"]


class PeerError(BatonError):
    """An engine failed, or gave a wrong answer."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One request's tokens and the time of each, in seconds after the start of the run."""

    token_ids: tuple[int, ...]
    token_times_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One run of a workload.

    Attributes:
        wall_s: seconds from the first request's start to the last token.
        answers: the answers, in the order of the requests.
    """

    wall_s: float
    answers: tuple[PeerAnswer, ...]


def format_run(requests: Sequence[BenchRequest]) -> dict[str, Any]:
    """Returns the command that runs the requests. Those without an arrival time arrive at once."""
    return {
        "command": "run",
        "requests": [
            {
                "prompt_token_ids": list(request.prompt_token_ids),
                "num_output_tokens": request.num_output_tokens,
                "arrival_s": request.arrival_s or 0.0,
            }
            for request in requests
        ],
    }


def parse_answer(engine: str, line: str) -> dict[str, Any]:
    """Parses a worker's line.

    Raises:
        PeerError: the line reports an error, or is no answer.
    """
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise PeerError(f"{engine} answered {line[:80]!r}, which is no JSON object")
    if "error" in answer:
        raise PeerError(f"{engine} failed: {answer['error']}")
    return answer


def parse_run(engine: str, answer: dict[str, Any], requests: Sequence[BenchRequest]) -> PeerRun:
    """Parses the answer to `format_run(requests)`.

    Raises:
        PeerError: a request has too few or too many tokens, or tokens have no times.
    """
    answers = tuple(
        PeerAnswer(tuple(result["token_ids"]), tuple(result["token_times_s"]))
        for result in answer["requests"]
    )
    if len(answers) != len(requests):
        raise PeerError(f"{engine} answered {len(answers)} of {len(requests)} requests")
    for index, (result, request) in enumerate(zip(answers, requests, strict=True)):
        counts = (len(result.token_ids), len(result.token_times_s))
        if counts != (request.num_output_tokens,) * 2:
            raise PeerError(
                f"{engine} gave request {index} {counts[0]} tokens at {counts[1]} times; "
                f"{request.num_output_tokens} were asked for"
            )
    return PeerRun(answer["wall_s"], answers)
