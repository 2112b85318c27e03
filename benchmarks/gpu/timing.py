"""Measures how long calls take on a device: by CUDA events on a GPU, by the clock on a CPU."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

__all__ = ["Call", "synchronize", "time_busy", "time_calls"]

_MIN_SAMPLES = 8
_MAX_SAMPLES = 200
_EVENTS_AT_ONCE = 8
_HEADSTART_SIZE = 8192
_HEADSTART_CALLS = 32  # about 45 ms of products: the time to launch what is measured

Call = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(
    calls: Sequence[Call], device: torch.device, sample_s: float, *, captured: bool = True
) -> list[float]:
    """Returns samples of the seconds of a call.

    Args:
        calls: calls of equal work on inputs of their own, so that no cache holds their inputs. A
            sample is the mean over all calls.
        device: where they compute.
        sample_s: seconds to spend, about.
        captured: whether a CUDA graph launches the calls, as in decoding, so that the time of
            Python does not count.
    """
    for call in calls:
        call()  # compiles, and allocates
    synchronize(device)
    if device.type != "cuda":
        return _sampled(lambda: _host_s(calls), sample_s)
    run = _graph_of(calls) if captured else lambda: _run_all(calls)
    run()
    torch.cuda.synchronize()
    return _device_samples(run, len(calls), sample_s)


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
        _run_all([launch] * num_calls)
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


def _device_samples(run: Call, num_calls: int, sample_s: float) -> list[float]:
    samples: list[float] = []
    ends_at = time.perf_counter() + sample_s
    while len(samples) < _MIN_SAMPLES or time.perf_counter() < ends_at:
        pairs = [(_event(), _event()) for _ in range(_EVENTS_AT_ONCE)]
        for start, end in pairs:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        samples += [_seconds_between(start, end) / num_calls for start, end in pairs]
        if len(samples) >= _MAX_SAMPLES:
            break
    return samples


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _recorded_event() -> torch.cuda.Event:
    event = _event()
    event.record()
    return event


def _seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3


def _sampled(measure: Callable[[], float], sample_s: float) -> list[float]:
    ends_at = time.perf_counter() + sample_s
    samples = [measure()]
    while time.perf_counter() < ends_at and len(samples) < _MAX_SAMPLES:
        samples.append(measure())
    return samples


def _host_s(calls: Sequence[Call]) -> float:
    started = time.perf_counter()
    _run_all(calls)
    return (time.perf_counter() - started) / len(calls)


def _graph_of(calls: Sequence[Call]) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run_all(calls)
    return graph.replay


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
