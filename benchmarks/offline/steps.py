"""Steps of an engine in this process: by phase, and of its runner, driven without a scheduler."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any

from baton.common.request.sampling_params import SamplingParams
from benchmarks.kernels.timing import time_busy
from benchmarks.model_cost import decode_floor_s, floor_s
from benchmarks.offline.cases import OfflineCase, RunTimes, run_times
from benchmarks.offline.offline_engine import Floors, MeasuredStep, OfflineEngine
from benchmarks.request import BenchRequest
from engine.batch import ScheduledBatch, ScheduledChunk, StepOutput, TableUpdate
from engine.draw_params import DrawParams
from engine.metrics.counts import PHASES
from engine.runner import PendingOutput, Runner
from engine.runtime.model_runner import ModelRunner

__all__ = ["DeviceStep", "DrivenRows", "StepProfile", "measure_device_steps", "profile_steps"]
_GREEDY = DrawParams(SamplingParams(temperature=0.0), seed=0)
_WARM_UP_STEPS = 8
_NUM_PROMPT_SAMPLES = 4
_MAX_ERROR_LENGTH = 500


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Medians of many steps of one kind.

    Attributes:
        kind: "prefill": steps that compute prompts; "decode": steps that do not.
        batch_size: number of requests.
        num_steps: number of steps.
        total_us: microseconds of a step.
        phases_us: microseconds of each phase. Medians do not exactly add up to the total.
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
    kinds: dict[str, list[MeasuredStep]] = {"prefill": [], "decode": []}
    num_begun = 0
    for step in engine.run_timed(requests).steps:
        kinds["prefill" if num_begun < len(requests) else "decode"].append(step)
        num_begun += step.num_begun
        if step.num_ended:
            break
    return [_median(kind, len(requests), steps) for kind, steps in kinds.items() if steps]


def _median(kind: str, batch_size: int, steps: Sequence[MeasuredStep]) -> StepProfile:
    return StepProfile(
        kind=kind,
        batch_size=batch_size,
        num_steps=len(steps),
        total_us=1e6 * statistics.median(step.seconds for step in steps),
        phases_us={
            phase: 1e6 * statistics.median(step.phases.get(phase, 0.0) for step in steps)
            for phase in PHASES
        },
    )


class DrivenRows:
    """Rows of a runner. Each has blocks of its own, scattered over the pool.

    The rows attend to whatever bytes the pool has, which takes as long as real KV.

    Args:
        runner: runs the model. Layer groups share a row's blocks, which takes as long as own ones.
            A model with states has a slot for each row.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._steps = count(1)
        self._rows: tuple[int, ...] = ()

    def blocks_short(self, num_rows: int, num_tokens: int) -> int:
        """Returns how many blocks the pool lacks for rows of `num_tokens` tokens each."""
        return max(0, num_rows * self._blocks_of(num_tokens) - self._runner.num_blocks)

    def begin(self, num_rows: int, context: int, num_tokens: int) -> None:
        """Starts rows with `context` tokens each, and blocks for `num_tokens`."""
        self._rows = ()
        chunks = [
            ScheduledChunk(row, (row + 1,), context - 1, (_GREEDY,)) for row in range(num_rows)
        ]
        self._runner.execute(self._batch(chunks, self._tables(num_rows, num_tokens)))
        self._rows = tuple(range(num_rows))

    def compute_prompts(self, num_prompts: int, length: int) -> StepOutput:
        """Computes prompts in one step, and draws a token for each."""
        self._rows = ()
        chunks = [
            ScheduledChunk(row, tuple(range(1, length + 1)), 0, (_GREEDY,))
            for row in range(num_prompts)
        ]
        return self._runner.execute(self._batch(chunks, self._tables(num_prompts, length)))

    def run_known(self, num_rows: int, context: int, num_tokens: int) -> StepOutput:
        """Runs known tokens of rows that were started, after their first `context` tokens.

        All but the first token of a row are draft tokens that the step checks.
        """
        self._rows = ()
        chunks = [
            ScheduledChunk(
                row, (row + 1,) * num_tokens, context, (_GREEDY,), num_drafts=num_tokens - 1
            )
            for row in range(num_rows)
        ]
        return self._runner.execute(self._batch(chunks))

    def submit(self) -> PendingOutput:
        """Launches a decode step of all rows."""
        return self._runner.submit(self._batch())

    def overlapped(self, num_steps: int) -> list[float]:
        """Returns the seconds of each step. The next step is launched before one is read."""
        pending, times_s = self.submit(), []
        for _ in range(num_steps):
            following = self.submit()
            pending.result()
            times_s.append(time.perf_counter())
            pending = following
        pending.result()
        times_s.append(time.perf_counter())
        return [after - before for before, after in pairwise(times_s)]

    def _batch(
        self, chunks: Sequence[ScheduledChunk] = (), tables: Iterable[TableUpdate] = ()
    ) -> ScheduledBatch:
        return ScheduledBatch(next(self._steps), tuple(chunks), self._rows, tuple(tables))

    def _tables(self, num_rows: int, num_tokens: int) -> Iterator[TableUpdate]:
        each = self._blocks_of(num_tokens)
        ids = random.Random(0).sample(range(self._runner.num_blocks), num_rows * each)
        for row in range(num_rows):
            block_ids = tuple(ids[row * each : (row + 1) * each])
            for layer_group in range(len(self._runner.info.windows)):
                yield TableUpdate(row, layer_group, 0, block_ids)
            if self._runner.info.states is not None:
                yield TableUpdate(row, len(self._runner.info.windows), 0, (row,) * each)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._runner.info.layout.block_size)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One figure.

    Attributes:
        kind: "decode", a step of the runner alone, of which the next one is launched before one is
            read; "device busy", the time that the device works on it; "engine step", with the
            scheduler; "prompt", a step that computes a prompt.
        batch_size: number of sequences.
        context: tokens of each.
        samples_us: microseconds of single steps.
        median_us: their median; None if nothing was measured.
        floor_us: weights and KV read once, or the operations at the matrix rate.
        idle_share: of an engine's step: the share in which the device does not work. Below zero,
            the device's time on the runner's step was measured as the longer one.
        failed: why nothing was measured.
    """

    kind: str
    batch_size: int
    context: int
    samples_us: tuple[float, ...] = ()
    median_us: float | None = None
    floor_us: float | None = None
    idle_share: float | None = None
    failed: str | None = None


def measure_device_steps(
    engine: OfflineEngine,
    runner: ModelRunner,
    floors: Floors,
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    num_steps: int,
) -> Iterator[DeviceStep]:
    """Yields the figures of each batch size and context one by one, then those of prompts.

    A figure that fails loses no other.

    Args:
        engine: has no requests, and finds no prompt cached.
        runner: the engine's.
        floors: what limits the steps.
        batch_sizes: numbers of sequences.
        contexts: tokens of each sequence; the engine's loop starts with the first.
        num_steps: decode steps per figure.
    """
    runner.kv_pool.normal_()
    steps = _Steps(engine, runner, floors, num_steps)
    for batch_size in batch_sizes:
        for context in contexts:
            yield _attempt("decode", batch_size, context, steps.decode)
            busy = _attempt("device busy", batch_size, context, steps.busy)
            yield busy
            if context == contexts[0]:
                loop = partial(steps.loop, busy_us=busy.median_us)
                yield _attempt("engine step", batch_size, context, loop)
    for context in contexts:
        yield _attempt("prompt", 1, context, steps.prompt)


def _attempt(
    kind: str, batch_size: int, context: int, measure: Callable[[int, int], dict[str, Any]]
) -> DeviceStep:
    try:
        figures = measure(batch_size, context)
    except Exception as error:  # any error ends this figure, but not the others
        reason = f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]
        return DeviceStep(kind, batch_size, context, failed=reason)
    return DeviceStep(kind, batch_size, context, **figures)


class _Steps:
    def __init__(
        self, engine: OfflineEngine, runner: ModelRunner, floors: Floors, num_steps: int
    ) -> None:
        self._engine, self._floors, self._num_steps = engine, floors, num_steps
        self._device = runner.kv_pool.device
        info = engine.core.info
        self._kv_bytes = info.layout.block_bytes // info.layout.block_size
        self._state_bytes = 0 if info.states is None else info.states.slot_bytes
        self._rows = DrivenRows(runner)

    def decode(self, batch_size: int, context: int) -> dict[str, Any]:
        """Measures steps of the runner alone."""
        num_tokens = context + self._num_steps + _WARM_UP_STEPS + 2
        self._begin(batch_size, context, num_tokens)
        self._rows.overlapped(_WARM_UP_STEPS)
        samples_s = self._rows.overlapped(self._num_steps)
        middle = context + _WARM_UP_STEPS + self._num_steps // 2
        return _summary(samples_s) | self._floor(batch_size, middle)

    def busy(self, batch_size: int, context: int) -> dict[str, Any]:
        """Measures the device's time on steps at the contexts of the engine's loop.

        They run from the prompt and its first token to all tokens but the last, which no step
        computes.
        """
        self._begin(batch_size, context, context + self._num_steps)
        pending: list[PendingOutput] = []
        return _summary(
            time_busy(
                lambda: pending.append(self._rows.submit()),
                lambda: [step.result() for step in pending],
                self._num_steps - 1,
                self._device,
            )
        )

    def loop(self, batch_size: int, context: int, *, busy_us: float | None) -> dict[str, Any]:
        """Measures steps of the engine."""
        self._run(OfflineCase(batch_size, context, 3), seed=1)
        step_us = 1e3 * self._run(OfflineCase(batch_size, context, self._num_steps), seed=2).step_ms
        idle_share = None if busy_us is None else 1 - busy_us / step_us
        figures = {"median_us": step_us, "idle_share": idle_share}
        return figures | self._floor(batch_size, context + self._num_steps // 2)

    def prompt(self, batch_size: int, context: int) -> dict[str, Any]:
        """Measures steps that compute a prompt."""
        self._check_room(batch_size, context)
        samples_s = []
        for _ in range(1 + _NUM_PROMPT_SAMPLES):
            started = time.perf_counter()
            self._rows.compute_prompts(batch_size, context)
            samples_s.append(time.perf_counter() - started)
        prompt = BenchRequest(range(context), 1)
        least_s = floor_s([prompt] * batch_size, self._floors.shape, self._floors.ceilings)
        return _summary(samples_s[1:]) | {"floor_us": 1e6 * least_s}  # the first compiles

    def _begin(self, batch_size: int, context: int, num_tokens: int) -> None:
        self._check_room(batch_size, num_tokens)
        self._rows.begin(batch_size, context, num_tokens)

    def _check_room(self, batch_size: int, num_tokens: int) -> None:
        if short := self._rows.blocks_short(batch_size, num_tokens):
            raise RuntimeError(f"the pool lacks {short} blocks")

    def _floor(self, batch_size: int, context: int) -> dict[str, float]:
        least_s = decode_floor_s(
            self._floors.shape,
            self._floors.ceilings,
            batch_size=batch_size,
            context=context,
            kv_bytes_per_token=self._kv_bytes,
            state_bytes=self._state_bytes,
        )
        return {"floor_us": 1e6 * least_s}

    def _run(self, case: OfflineCase, seed: int) -> RunTimes:
        # Prompts of one seed share a prefix, and their cached KV has been overwritten.
        self._engine.core.scheduler.reset_prefix_cache()
        return run_times(self._engine.run(case.requests(self._engine.core.info.vocab_size, seed)))


def _summary(samples_s: Sequence[float]) -> dict[str, Any]:
    samples_us = tuple(round(1e6 * sample, 3) for sample in samples_s)
    return {"samples_us": samples_us, "median_us": statistics.median(samples_us)}
