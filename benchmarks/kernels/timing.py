"""Times of calls whose inputs are in no cache: on a CPU by the clock, on a GPU by CUDA events."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path

import torch

import kernels
from benchmarks.kernels.case import CPU, Call

__all__ = [
    "Cycle",
    "cache_bytes_of",
    "last_level_cache_bytes",
    "make_sweep",
    "median_call_s",
    "plan_cycle",
    "sample_calls",
    "time_busy",
]

_BATCH_SECONDS = 1e-3
_MIN_BATCHES = 9
_MIN_SECONDS = 0.2
_WARM_UP_SECONDS = 0.03
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_BYTES = 32 << 20
_UNITS = {"K": 10, "M": 20, "G": 30}
_CACHES_PER_CYCLE = 4
"""Caches do not evict in the order of use."""
_MAX_COPIES = 256
_MIN_SAMPLES = 8
_MAX_SAMPLES = 200
_SAMPLE_S = 0.15
_EVENTS_AT_ONCE = 8
_HEADSTART_SIZE = 8192
_HEADSTART_CALLS = 32  # about 45 ms of products: the time to launch what is measured


@dataclass(frozen=True, slots=True)
class Cycle:
    """A round of calls, each on its own copy of the inputs, which is then repeated.

    Attributes:
        num_copies: copies of the inputs.
        must_sweep: whether the caches must be emptied, because all copies fit in them.
    """

    num_copies: int
    must_sweep: bool


def cache_bytes_of(device: torch.device) -> int:
    """Returns the size of a device's largest cache."""
    if device.type == "cpu":
        return last_level_cache_bytes()
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def last_level_cache_bytes(caches: Path = _CACHES) -> int:
    """Returns the size of the first core's largest cache; 32 MiB if the system does not list it.

    Args:
        caches: Linux' folder with a subfolder per cache.
    """
    sizes = [_bytes_of(path.read_text().strip()) for path in caches.glob("index*/size")]
    return max(sizes, default=_UNKNOWN_BYTES)


def plan_cycle(bytes_per_call: int, max_copies: int | None, cache_bytes: int) -> Cycle:
    """Plans enough copies to overflow the cache, if that many can be made."""
    wanted = -(-_CACHES_PER_CYCLE * cache_bytes // bytes_per_call)
    # Two, so that no call ever follows itself.
    num_copies = min(max(2, wanted), max_copies or _MAX_COPIES, _MAX_COPIES)
    return Cycle(num_copies, must_sweep=num_copies < wanted)


def make_sweep(cache_bytes: int) -> Callable[[], object]:
    """Returns a function that reads enough memory to evict everything else from the cache."""
    return torch.ones(_CACHES_PER_CYCLE * cache_bytes // 4).sum


def _bytes_of(size: str) -> int:
    """Parses a size such as 32768K."""
    return int(size.rstrip("KMG")) << _UNITS.get(size[-1], 0)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Calls that are timed together: a single one may be shorter than the clock's resolution."""

    num_calls: int
    run: Callable[[], object]


def median_call_s(
    calls: Sequence[Call], *, is_recordable: bool, sweep: Callable[[], object] | None
) -> float:
    """Returns the median seconds of a call.

    Args:
        calls: calls on equal inputs, made in turn.
        is_recordable: whether the calls may run from recordings, as in decoding: without Python
            between them, if the kernels support it.
        sweep: empties the caches before each measurement; None if the calls themselves do.
    """
    batches = cycle(_batches(calls, is_recordable))
    deadline = time.perf_counter() + _WARM_UP_SECONDS
    next(batches).run()
    while time.perf_counter() < deadline:
        next(batches).run()
    times: list[float] = []
    deadline = time.perf_counter() + _MIN_SECONDS
    while len(times) < _MIN_BATCHES or time.perf_counter() < deadline:
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
    graph = kernels.CudaGraphRecorder()(run)
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


def time_busy(
    launch: Callable[[], object], finish: Callable[[], object], num_calls: int, device: torch.device
) -> list[float]:
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
    launch: Callable[[], object], num_calls: int, mark: Callable[[], torch.cuda.Event]
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
