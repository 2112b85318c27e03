"""Profiles the steps of an engine, phase by phase, by wrapping the engine's functions."""

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from benchmarks.offline.offline_engine import OfflineEngine
from benchmarks.request import BenchRequest
from engine.core import OnOutputs
from engine.request import EngineOutput
from engine.runtime.device import resolve_device, wait_for
from engine.runtime.draws.drawing import ChunkDraws, DecodeRows

__all__ = ["PHASES", "StepClock", "StepProfile", "profile_steps"]


class StepClock:
    """Sums the time spent in wrapped functions, phase by phase.

    If a wrapped function calls another one, the other's time counts only for the other.

    Args:
        settle: called before each reading of the clock; waits for a device that works
            asynchronously.
        now_ns: returns the present time in nanoseconds.
    """

    def __init__(
        self,
        settle: Callable[[], object] = lambda: None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._settle, self._now_ns = settle, now_ns
        self._spent_ns: dict[str, int] = defaultdict(int)
        self._inner_ns = [0]
        """A stack: for each running function, the time of the wrapped functions that it called."""

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, wrapped so that its time counts for `phase`."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started_ns = self._read()
            self._inner_ns.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                took_ns = self._read() - started_ns
                self._spent_ns[phase] += took_ns - self._inner_ns.pop()
                self._inner_ns[-1] += took_ns

        return wrapper

    def take_times(self) -> dict[str, int]:
        """Returns the nanoseconds of each phase since the last call."""
        spent, self._spent_ns = self._spent_ns, defaultdict(int)
        return dict(spent)

    def _read(self) -> int:
        self._settle()
        return self._now_ns()


PHASES = ("schedule", "build inputs", "forward", "logits", "draw", "commit", "rest")
"""The phases of a step. Replayed steps compute logits within "forward", and all steps find the
likeliest tokens there. "rest" is tables, copies, transfers and deadlines."""
_STEP = "rest"


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Medians of many steps of one kind.

    Attributes:
        kind: "prefill": steps that compute prompts; "decode": steps that do not.
        batch_size: number of requests.
        num_steps: number of steps.
        total_us: microseconds of a step.
        phases_us: microseconds of each of `PHASES`. Medians do not exactly add up to the total.
    """

    kind: str
    batch_size: int
    num_steps: int
    total_us: float
    phases_us: dict[str, float]


def profile_steps(engine: OfflineEngine, requests: Sequence[BenchRequest]) -> list[StepProfile]:
    """Runs requests that start together, and profiles the steps of each kind.

    Steps after the end of a request do not count.
    """
    device = resolve_device(engine.core.config.device)
    steps: dict[str, list[dict[str, int]]] = {"prefill": [], "decode": []}
    with _clocked(engine, StepClock(lambda: wait_for(device)), steps, len(requests)):
        engine.run(requests)
    return [_median(kind, len(requests), taken) for kind, taken in steps.items() if taken]


@contextmanager
def _clocked(
    engine: OfflineEngine,
    clock: StepClock,
    steps: dict[str, list[dict[str, int]]],
    num_requests: int,
) -> Generator[None, None, None]:
    """Yields the engine with timed phases; the times of each step are appended to `steps`."""
    core: Any = engine.core
    timed_step = clock.timed(_STEP, core.run_step)
    num_begun = num_ended = 0

    def run_step(on_outputs: OnOutputs) -> None:
        nonlocal num_begun, num_ended
        was_prefilling = num_begun < num_requests
        outputs: list[EngineOutput] = []
        timed_step(outputs.extend)
        if num_ended == 0:
            steps["prefill" if was_prefilling else "decode"].append(clock.take_times())
        num_begun += sum(output.timings is not None and not output.is_last for output in outputs)
        num_ended += sum(output.is_last for output in outputs)
        on_outputs(outputs)

    with ExitStack() as stack:
        for owner, name, phase in _timed_functions(core):
            function = clock.timed(phase, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, function))
        stack.enter_context(patch.object(core, "run_step", run_step))
        yield


def _timed_functions(core: Any) -> tuple[tuple[Any, str, str], ...]:
    """Returns (object, method name, phase) of the functions to time; some are private."""
    runner = core._runner
    recorded = runner._steps._recorded
    return (
        (core.scheduler, "schedule", "schedule"),
        (recorded.inputs, "fill", "build inputs"),
        (recorded, "scores", "forward"),
        (runner._model, "logits", "logits"),
        (DecodeRows, "draw", "draw"),
        (ChunkDraws, "draw", "draw"),
        (ChunkDraws, "outputs", "draw"),
        (core.scheduler, "commit", "commit"),
    )


def _median(kind: str, batch_size: int, steps: Sequence[dict[str, int]]) -> StepProfile:
    return StepProfile(
        kind=kind,
        batch_size=batch_size,
        num_steps=len(steps),
        total_us=statistics.median(sum(step.values()) for step in steps) / 1000,
        phases_us={
            phase: statistics.median(step.get(phase, 0) for step in steps) / 1000
            for phase in PHASES
        },
    )
