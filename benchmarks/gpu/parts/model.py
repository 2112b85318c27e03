"""Measures one model: decode steps of runner and engine, prompts, and a served workload."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import engine_config, kv_bytes_per_token, shape_of, write_config
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Record, summary
from benchmarks.gpu.timing import time_busy
from benchmarks.model_cost import Ceilings, decode_floor_s, floor_s
from benchmarks.offline.cases import Case, run_times
from benchmarks.offline.driven_rows import DrivenRows
from benchmarks.offline.offline_engine import OfflineEngine
from benchmarks.request import BenchRequest
from engine.core import EngineCore
from engine.runner import PendingOutput
from engine.runtime.model_runner import ModelRunner

__all__ = ["measure"]

_WARM_UP_STEPS = 8
_NUM_PROMPT_SAMPLES = 4


def measure(plan: Plan, ceilings: Ceilings | None, record: Record, model: str) -> None:
    """Loads the model once and measures everything. Figures that have aims come first."""
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(
            plan, write_config(model, plan.dtype, Path(folder)), async_scheduling=True
        )
        started = time.perf_counter()
        runner = ModelRunner(config, progress=False)
        record.add(
            "start", model, seconds=time.perf_counter() - started, num_blocks=runner.num_blocks
        )
        with OfflineEngine(config, EngineCore(config, runner)) as engine:
            runner.kv_pool.normal_()
            figures = _Figures(plan, ceilings, model, runner, engine)
            for batch_size in plan.batch_sizes:
                for context in plan.contexts:
                    figures.add_decode(record, batch_size, context)
                figures.add_loop(record, batch_size)
            for num_prompts, length in plan.prompts:
                figures.add_prefill(record, num_prompts, length)
            record.attempt("served", model, figures.served)


class _Figures:
    """Measures one loaded model."""

    def __init__(
        self,
        plan: Plan,
        ceilings: Ceilings | None,
        model: str,
        runner: ModelRunner,
        engine: OfflineEngine,
    ) -> None:
        self._plan, self._ceilings, self._model, self._engine = plan, ceilings, model, engine
        self._rows = DrivenRows(runner)
        self._device = torch.device(plan.device)
        self._shape = shape_of(model, plan.dtype)
        self._kv_bytes = kv_bytes_per_token(model, plan.dtype)
        self._busy_s: dict[int, float] = {}

    def add_decode(self, record: Record, batch_size: int, context: int) -> None:
        """Adds a decode step of the runner alone, launched ahead, and the device's share of it."""
        name = f"{self._model}, {batch_size} x {context}"
        if record.attempt("decode step", name, lambda: self._decode(batch_size, context)):
            record.attempt("device busy", name, lambda: self._busy(batch_size, context))

    def add_loop(self, record: Record, batch_size: int) -> None:
        """Adds a decode step of the engine, with its scheduler."""
        name = f"{self._model}, {batch_size} x {self._plan.contexts[0]}"
        record.attempt("engine step", name, lambda: self._loop(batch_size))

    def add_prefill(self, record: Record, num_prompts: int, length: int) -> None:
        """Adds prompts that one step computes."""
        name = f"{self._model}, {num_prompts} x {length}"
        record.attempt("prefill", name, lambda: self._prefill(num_prompts, length))

    def served(self) -> dict[str, Any]:
        """Returns the figures of requests that arrive at once, the same as for transformers."""
        case = Case(*self._plan.served)
        self._run(case, seed=1)  # the runner may record prompts of a repeated size
        times = run_times(self._run(case, seed=2))
        return {"output_tokens_per_s": times.output_tokens_per_s, "prefill_ms": times.prefill_ms}

    def _decode(self, batch_size: int, context: int) -> dict[str, Any]:
        num_steps = self._plan.num_steps
        num_tokens = context + num_steps + _WARM_UP_STEPS + 2
        if short := self._rows.blocks_short(batch_size, num_tokens):
            return {"skipped": f"the pool lacks {short} blocks"}
        self._rows.begin(batch_size, context, num_tokens)
        self._rows.overlapped(_WARM_UP_STEPS)
        samples = self._rows.overlapped(num_steps)
        middle = context + _WARM_UP_STEPS + num_steps // 2
        return summary(samples) | self._floor(batch_size, middle, statistics.median(samples))

    def _busy(self, batch_size: int, context: int) -> dict[str, Any]:
        """Measures steps at the contexts of the engine's loop.

        They run from the prompt and its first token to all tokens but the last, which no step
        computes.
        """
        num_tokens = context + self._plan.num_steps
        self._rows.begin(batch_size, context, num_tokens)
        pending: list[PendingOutput] = []
        samples = time_busy(
            lambda: pending.append(self._rows.submit()),
            lambda: [step.result() for step in pending],
            self._plan.num_steps - 1,
            self._device,
        )
        if context == self._plan.contexts[0]:
            self._busy_s[batch_size] = statistics.median(samples)
        return summary(samples)

    def _loop(self, batch_size: int) -> dict[str, Any]:
        case = Case(batch_size, self._plan.contexts[0], self._plan.num_steps)
        self._run(Case(batch_size, case.input_len, 3), seed=1)
        times = run_times(self._run(case, seed=2))
        step_s, context = times.step_ms / 1e3, case.input_len + case.output_len // 2
        figures = {"median_us": 1e6 * step_s, "prefill_ms": times.prefill_ms}
        if (busy_s := self._busy_s.get(batch_size)) is not None:
            figures["idle_share"] = 1 - busy_s / step_s
        return figures | self._floor(batch_size, context, step_s)

    def _prefill(self, num_prompts: int, length: int) -> dict[str, Any]:
        if short := self._rows.blocks_short(num_prompts, length):
            return {"skipped": f"the pool lacks {short} blocks"}
        samples = []
        for _ in range(1 + _NUM_PROMPT_SAMPLES):
            started = time.perf_counter()
            self._rows.compute_prompts(num_prompts, length)
            samples.append(time.perf_counter() - started)
        step_s = statistics.median(samples[1:])  # the first compiles
        figures = summary(samples[1:]) | {"tokens_per_s": num_prompts * length / step_s}
        if self._ceilings is not None:
            # Different prompts: floors count a shared prefix once.
            prompts = [BenchRequest((index, *range(1, length)), 1) for index in range(num_prompts)]
            least_s = floor_s(prompts, self._shape, self._ceilings)
            figures |= {"floor_us": 1e6 * least_s, "share_of_ceiling": least_s / step_s}
        return figures

    def _floor(self, batch_size: int, context: int, step_s: float) -> dict[str, Any]:
        if self._ceilings is None:
            return {}
        least_s = decode_floor_s(
            self._shape,
            self._ceilings,
            batch_size=batch_size,
            context=context,
            kv_bytes_per_token=self._kv_bytes,
        )
        return {"floor_us": 1e6 * least_s, "times_floor": step_s / least_s}

    def _run(self, case: Case, seed: int) -> Any:
        # Prompts of one seed share a prefix, and their cached KV has been overwritten.
        self._engine.core.reset_prefix_cache()
        return self._engine.run(case.requests(self._engine.core.info.vocab_size, seed))
