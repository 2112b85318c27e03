"""The loop of every worker: JSON lines on stdin and stdout, around one engine.

    <- {"ready": {"engine": "vllm 0.32.0"}}         after loading
    -> {"command": "run", "requests": [{"prompt_token_ids": [1], "num_output_tokens": 2}]}
    <- {"wall_s": 0.1, "requests": [{"token_ids": [5, 6], "token_times_s": [0.05, 0.1]}]}
    -> {"command": "reset"}                         empties prefix caches
    <- {}
    -> {"command": "logits", "token_ids": [1, 2], "file": "..."}
    <- {}                                           they are in the file, float32
    -> {"command": "quit"}
    <- {"error": "..."}                             instead of an answer; the worker ends

A worker runs as a script in its engine's own environment: neither this module
nor a worker imports anything but the standard library and that engine.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO, runtime_checkable

__all__ = [
    "Engine",
    "LogitsEngine",
    "Request",
    "Result",
    "StepOutput",
    "Stepper",
    "run_stepped",
    "serve",
    "work",
]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a run. All requests of a run arrive at its start."""

    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(slots=True)
class Result:
    """A request's tokens and the time of each, in seconds after the start of the run."""

    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)


class Engine(Protocol):
    """A loaded engine.

    Attributes:
        name: the engine's name, with its version.
    """

    name: str

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Generates greedily, past any end of sequence; returns results in the requests' order."""

    def reset(self) -> None:
        """Empties prefix caches, if the engine has a call for it.

        Runs share no prompts, so cached prefixes only occupy memory.
        """


@runtime_checkable
class LogitsEngine(Protocol):
    """An engine that computes the logits of whole texts too."""

    def write_logits(self, token_ids: Sequence[int], file: str) -> None:
        """Writes the logits after each token of a text to a file, `[num_tokens, vocab]` float32."""


StepOutput = tuple[int, Sequence[int], bool]
"""The request's index, its new tokens, and whether they are its last."""


class Stepper(Protocol):
    """An engine that is driven step by step."""

    def add(self, index: int, request: Request) -> None:
        """Adds a request; outputs refer to it by `index`."""

    def step(self) -> Iterable[StepOutput]:
        """Computes one step; returns its outputs."""


def run_stepped(
    stepper: Stepper,
    requests: Sequence[Request],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Result]:
    """Adds all requests, and steps until they have ended."""
    results = [Result() for _ in requests]
    started = clock()
    for index, request in enumerate(requests):
        stepper.add(index, request)
    num_running = len(requests)
    while num_running:
        outputs = stepper.step()
        now = clock() - started
        for index, token_ids, is_last in outputs:
            results[index].token_ids += token_ids
            results[index].token_times_s += [now] * len(token_ids)
            num_running -= is_last
    return results


def work(description: str, load: Callable[[argparse.Namespace], Engine]) -> None:
    """The main function of a worker: loads the engine that the flags describe, and serves it."""
    _die_with_parent()
    args = _parser(description).parse_args()
    # Engines may print to stdout. That goes to stderr, so that answers stay intact.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    status = 0
    try:
        serve(load(args), sys.stdin, answers)
    except Exception as error:
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        traceback.print_exc()
        status = 1
    os._exit(status)  # an engine's threads may still wait for work


def serve(engine: Engine, commands: Iterable[str], answers: TextIO) -> None:
    """Answers commands until `quit` or the end of the stream."""
    _answer(answers, {"ready": {"engine": engine.name}})
    for line in commands:
        command = json.loads(line)
        if command["command"] == "quit":
            return
        _answer(answers, _do(engine, command))


def _do(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    if command["command"] == "reset":
        engine.reset()
        return {}
    if command["command"] == "logits" and isinstance(engine, LogitsEngine):
        engine.write_logits(command["token_ids"], command["file"])
        return {}
    if command["command"] != "run":
        raise ValueError(f"unknown command {command['command']!r}")
    requests = [Request(**request) for request in command["requests"]]
    started = time.perf_counter()
    results = engine.run(requests)
    wall_s = time.perf_counter() - started
    return {"wall_s": wall_s, "requests": [asdict(result) for result in results]}


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", help="checkpoint folder, or file in the engine's own format")
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "auto"), default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantized-compute", default="exact", help="Baton's flag")
    return parser


def _die_with_parent() -> None:
    """Makes the kernel end this process with its parent, even if the process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
