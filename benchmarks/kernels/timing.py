"""Medians of how long calls take that find their inputs in no cache."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

import kernels
from benchmarks.kernels.case import CPU, Call

__all__ = ["median_call_s"]

_BATCH_SECONDS = 1e-3
_LEAST_BATCHES = 9
_LEAST_SECONDS = 0.2
_WARM_UP_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class _Batch:
    """Calls that are timed together: one alone may be shorter than what the clock resolves."""

    num_calls: int
    run: Callable[[], object]


def median_call_s(
    calls: Sequence[Call], *, is_recordable: bool, sweep: Callable[[], object] | None
) -> float:
    """Seconds of a call.

    Args:
        calls: of equal inputs, to be made in turn.
        is_recordable: whether they may run from recordings, as decoding does: without Python
            between them, where the kernels can do that.
        sweep: empties the caches before each measurement; None where the calls do.
    """
    batches = cycle(_batches(calls, is_recordable))
    deadline = time.perf_counter() + _WARM_UP_SECONDS
    next(batches).run()
    while time.perf_counter() < deadline:
        next(batches).run()
    times: list[float] = []
    deadline = time.perf_counter() + _LEAST_SECONDS
    while len(times) < _LEAST_BATCHES or time.perf_counter() < deadline:
        if sweep is not None:
            sweep()
        batch = next(batches)
        started = time.perf_counter()
        batch.run()
        times.append((time.perf_counter() - started) / batch.num_calls)
    return statistics.median(times)


def _batches(calls: Sequence[Call], is_recordable: bool) -> list[_Batch]:
    calls[-1]()
    started = time.perf_counter()
    calls[-1]()
    size = max(1, int(_BATCH_SECONDS / (time.perf_counter() - started)))
    arena = kernels.Arena()
    return [
        _Batch(len(part), _recorded(part, arena) if is_recordable else _in_turn(part))
        for part in _parts(calls, size)
    ]


def _parts(calls: Sequence[Call], size: int) -> Iterator[Sequence[Call]]:
    for first in range(0, len(calls), size):
        yield calls[first : first + size]


def _in_turn(calls: Sequence[Call]) -> Callable[[], object]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _recorded(calls: Sequence[Call], arena: kernels.Arena) -> Callable[[], object]:
    def run() -> torch.Tensor:
        results = [call() for call in calls]
        last = results[-1]
        return last[0] if isinstance(last, tuple) else last

    _, step = kernels.record_step(CPU, arena, run)
    return _in_turn(calls) if step is None else step.run
