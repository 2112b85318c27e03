"""Time of each kernel in a few steps, as torch's profiler sees it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.offline.driven_rows import DrivenRows
from benchmarks.report import describe_error
from engine.runtime.device import wait_for
from engine.runtime.model_runner import ModelRunner

__all__ = ["KernelTime", "StepKernels", "profile_device_steps"]

_NUM_STEPS = 3
_NUM_KERNELS = 40
_MAX_NAME = 120


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel in a step.

    Attributes:
        name: its function; on a CPU a torch operation.
        calls: how often a step launches it.
        us: microseconds of all its calls in a step.
    """

    name: str
    calls: float
    us: float


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The kernels of a kind of step, those that take the longest first.

    Attributes:
        kind: "decode", "mixed" or "prompt", as in `DeviceStep`.
        batch_size: number of sequences.
        context: tokens of each.
        kernels: at most `_NUM_KERNELS`.
        failed: why there are none.
    """

    kind: str
    batch_size: int
    context: int
    kernels: tuple[KernelTime, ...] = ()
    failed: str | None = None


def profile_device_steps(
    runner: ModelRunner, *, batch_sizes: Sequence[int], context: int, num_chunk_tokens: int
) -> Iterator[StepKernels]:
    """Yields the kernels of decode steps and of mixed ones, and of a prompt.

    Args:
        runner: the model's; the rows of earlier steps are given up.
        batch_sizes: numbers of sequences.
        context: tokens of each, and of the prompt.
        num_chunk_tokens: tokens of the chunk in a mixed step, at most `context`.
    """
    rows = DrivenRows(runner)
    num_tokens = context + _NUM_STEPS + 2

    def decode(batch_size: int, num_chunk: int) -> Callable[[], object]:
        if rows.blocks_short(batch_size, num_tokens):
            raise RuntimeError("the pool has no room")
        rows.begin(batch_size, context, num_tokens)
        if num_chunk:
            rows.start_chunk()
        rows.run(num_chunk)  # compiles
        return lambda: [rows.run(num_chunk) for _ in range(_NUM_STEPS)]

    def prompt() -> Callable[[], object]:
        rows.compute_prompts(1, context)
        return lambda: [rows.compute_prompts(1, context) for _ in range(_NUM_STEPS)]

    for batch_size in batch_sizes:
        yield _attempt("decode", batch_size, context, partial(decode, batch_size, 0), runner)
        if batch_size > 1:
            mixed = partial(decode, batch_size, num_chunk_tokens)
            yield _attempt("mixed", batch_size, context, mixed, runner)
    yield _attempt("prompt", 1, context, prompt, runner)


def _attempt(
    kind: str,
    batch_size: int,
    context: int,
    prepare: Callable[[], Callable[[], object]],
    runner: ModelRunner,
) -> StepKernels:
    try:
        kernels = _kernels_of(prepare(), runner.kv_pool.device)
    except Exception as error:  # any error ends this profile, but not the others
        return StepKernels(kind, batch_size, context, failed=describe_error(error))
    return StepKernels(kind, batch_size, context, kernels)


def _kernels_of(run: Callable[[], object], device: torch.device) -> tuple[KernelTime, ...]:
    """Returns the kernels of a function that runs `_NUM_STEPS` steps."""
    is_on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if is_on_gpu else activity.CPU]) as seen:
        run()
        wait_for(device)
    times = [
        KernelTime(
            event.key[:_MAX_NAME],
            event.count / _NUM_STEPS,
            (event.self_device_time_total if is_on_gpu else event.self_cpu_time_total) / _NUM_STEPS,
        )
        for event in seen.key_averages()
    ]
    return tuple(sorted(times, key=lambda time: -time.us)[:_NUM_KERNELS])
