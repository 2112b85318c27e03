"""Steps of a runner, and of its engine, beside the least times that the device allows."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.kernels.case import ByteSpan, DecoderShape
from benchmarks.kernels.timing import time_busy
from benchmarks.model_cost import decode_floor_s, floor_s
from benchmarks.offline.cases import OfflineCase, RunTimes, run_times
from benchmarks.offline.driven_rows import DrivenRows
from benchmarks.offline.offline_engine import Floors, OfflineEngine
from benchmarks.offline.step_floors import operations_floor_s
from benchmarks.report import describe_error
from benchmarks.request import BenchRequest
from engine.config import EngineConfig
from engine.runner import PendingOutput
from engine.runtime.model_runner import ModelRunner
from kvstore.layout import DTYPE_BYTES

__all__ = ["DeviceStep", "chunk_tokens", "measure_device_steps"]

_WARM_UP_STEPS = 8
_NUM_PROMPT_SAMPLES = 4
_MIXED_TOKENS = 512
"""Prompt tokens of a mixed step, if the runner takes as many."""


def chunk_tokens(context: int, config: EngineConfig) -> int:
    """Returns how many tokens of a prompt mixed steps compute beside rows of a context."""
    return min(_MIXED_TOKENS, context, config.max_step_tokens // 2)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One figure.

    Attributes:
        kind: "decode", a step of the runner alone, of which the next one is launched before one is
            read; "device busy", the time that the device works on it; "mixed", such a step with a
            chunk of a prompt in place of one sequence; "engine step", with the scheduler;
            "prompt", a step that computes a prompt.
        batch_size: number of sequences.
        context: tokens of each.
        samples_us: microseconds of single steps.
        median_us: their median; None if nothing was measured.
        floor_us: weights and KV read once, or the operations at the matrix rate.
        operations_floor_us: the same for each operation, summed; None for models that are no
            dense decoders.
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
    operations_floor_us: float | None = None
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
    decoder: DecoderShape | None = None,
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
        decoder: the shape of a dense decoder; None for other models.
    """
    runner.kv_pool.normal_()
    steps = _Steps(engine, runner, floors, num_steps, decoder)
    for batch_size in batch_sizes:
        for context in contexts:
            yield _attempt("decode", batch_size, context, steps.decode)
            if batch_size > 1:
                yield _attempt("mixed", batch_size, context, steps.mixed)
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
        return DeviceStep(kind, batch_size, context, failed=describe_error(error))
    return DeviceStep(kind, batch_size, context, **figures)


class _Steps:
    def __init__(
        self,
        engine: OfflineEngine,
        runner: ModelRunner,
        floors: Floors,
        num_steps: int,
        decoder: DecoderShape | None,
    ) -> None:
        self._engine, self._floors, self._num_steps = engine, floors, num_steps
        self._decoder = decoder
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
        spans = [ByteSpan(middle - 1, 1)] * batch_size
        return _summary(samples_s) | self._floor(batch_size, middle) | self._floor_of(spans)

    def mixed(self, batch_size: int, context: int) -> dict[str, Any]:
        """Measures steps of the runner in which one sequence gets a chunk of its prompt."""
        num_chunk = chunk_tokens(context, self._engine.core.config)
        self._begin(batch_size, context, context + self._num_steps + _WARM_UP_STEPS + 2)
        num_decodes = self._rows.start_chunk()
        self._rows.overlapped(_WARM_UP_STEPS, num_chunk)
        samples_s = self._rows.overlapped(self._num_steps, num_chunk)
        middle = context + _WARM_UP_STEPS + self._num_steps // 2
        spans = [ByteSpan(0, num_chunk), *[ByteSpan(middle - 1, 1)] * num_decodes]
        return _summary(samples_s) | self._floor_of(spans)

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
        floors = {"floor_us": 1e6 * least_s} | self._floor_of([ByteSpan(0, context)] * batch_size)
        return _summary(samples_s[1:]) | floors  # the first compiles

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

    def _floor_of(self, spans: Sequence[ByteSpan]) -> dict[str, float]:
        if self._decoder is None:
            return {}
        least_s = operations_floor_s(
            self._decoder,
            spans,
            self._floors.ceilings,
            num_drawn=len(spans),
            bytes_per_number=DTYPE_BYTES[self._floors.dtype],
        )
        return {"operations_floor_us": 1e6 * least_s}

    def _run(self, case: OfflineCase, seed: int) -> RunTimes:
        # Prompts of one seed share a prefix, and their cached KV has been overwritten.
        self._engine.core.scheduler.reset_prefix_cache()
        return run_times(self._engine.run(case.requests(self._engine.core.info.vocab_size, seed)))


def _summary(samples_s: Sequence[float]) -> dict[str, Any]:
    samples_us = tuple(round(1e6 * sample, 3) for sample in samples_s)
    return {"samples_us": samples_us, "median_us": statistics.median(samples_us)}
