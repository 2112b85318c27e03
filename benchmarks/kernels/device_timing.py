"""Times of calls on a GPU, by CUDA events."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from kernels import CudaGraphRecorder

__all__ = ["sample_calls", "time_busy"]

_MIN_SAMPLES = 8
_MAX_SAMPLES = 200
_SAMPLE_S = 0.15
_EVENTS_AT_ONCE = 8
_HEADSTART_SIZE = 8192
_HEADSTART_CALLS = 32  # about 45 ms of products: the time to launch what is measured

Call = Callable[[], object]


def sample_calls(calls: Sequence[Call]) -> list[float]:
    """Returns samples of the seconds of a call; each is a mean over all calls.

    A CUDA graph launches the calls, as in decoding, so that the time of Python does not count.

    Args:
        calls: calls of equal work, each on inputs of its own, so that no cache holds them.
    """

    def run() -> torch.Tensor:
        for call in calls:
            call()
        return torch.empty(0)

    run()  # compiles, and allocates
    graph = CudaGraphRecorder()(run)
    graph.run()
    torch.cuda.synchronize()
    samples: list[float] = []
    ends_at = time.perf_counter() + _SAMPLE_S
    while len(samples) < _MIN_SAMPLES or time.perf_counter() < ends_at:
        pairs = [(_event(), _event()) for _ in range(_EVENTS_AT_ONCE)]
        for start, end in pairs:
            start.record()
            graph.run()
            end.record()
        torch.cuda.synchronize()
        samples += [_seconds_between(start, end) / len(calls) for start, end in pairs]
        if len(samples) >= _MAX_SAMPLES:
            break
    return samples


def time_busy(launch: Call, finish: Call, num_calls: int, device: torch.device) -> list[float]:
    """Returns the seconds that the device works on each of several calls launched ahead.

    Args:
        launch: launches a call without waiting for the device.
        finish: waits for all calls.
        num_calls: number of calls.
        device: where they compute. On a CPU the only sample is the mean, with `finish`.

    Raises:
        RuntimeError: the device reached a call before the host had launched all of it, so it may
            have waited for the host.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(num_calls):
            launch()
        finish()
        return [(time.perf_counter() - started) / num_calls]
    headstart = torch.zeros(_HEADSTART_SIZE, _HEADSTART_SIZE, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    for _ in range(_HEADSTART_CALLS):
        torch.mm(headstart, headstart)
    try:
        marks = _launch_ahead(launch, num_calls, _recorded_event)
    finally:
        finish()
        torch.cuda.synchronize()
    return [_seconds_between(before, after) for before, after in pairwise(marks)]


def _launch_ahead(
    launch: Call, num_calls: int, mark: Callable[[], torch.cuda.Event]
) -> list[torch.cuda.Event]:
    """Launches the calls; returns events before the first call and after each."""
    marks = [mark()]
    for index in range(num_calls):
        launch()
        has_come = marks[-1].query()  # type: ignore[no-untyped-call]
        if has_come:
            raise RuntimeError(
                f"the host fell behind: the device came to call {index + 1} of {num_calls} "
                "before all of it was launched"
            )
        marks.append(mark())
    return marks


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _recorded_event() -> torch.cuda.Event:
    event = _event()
    event.record()
    return event


def _seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3
