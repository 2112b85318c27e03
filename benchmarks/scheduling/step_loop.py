"""Times the steps of a scheduler, this commit's or the former one's (`former`).

What both share stands here, and imports nothing that either lacks: they meet
the same requests, and a runner that answers at once.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from baton.request_spec import RequestSpec
from baton.sampling_params import SamplingParams
from engine.config import EngineConfig
from engine.request import EngineRequest
from engine.runner import ModelInfo
from kvstore.layout import KvLayout

__all__ = [
    "BLOCK_SIZE",
    "CONTEXTS",
    "NUM_RUNNING",
    "PATTERNS",
    "NewScheduler",
    "StepTimes",
    "SteppedLoad",
    "engine_config",
    "measure_all",
    "measure_steps",
    "model_info",
    "start_load",
]

BLOCK_SIZE = 16
NUM_RUNNING = (16, 64, 256, 1024)
CONTEXTS = (256, 8192)
PATTERNS = ("steady", "aligned", "churn")
"""steady: blocks fill up at different steps; aligned: all at the same; churn: one
sequence in a hundred ends at each step, and another takes its place."""
_LIFETIME = 100  # tokens per request under churn: one in a hundred ends at each step
_WARM_UP_STEPS = 2 * BLOCK_SIZE
_MEASURED_STEPS = 30 * BLOCK_SIZE
_MAX_MODEL_LEN = 1 << 14
_VOCAB_SIZE = 1 << 15

NewScheduler = Callable[[int, int], Any]
"""Makes a scheduler for at most so many sequences and so many blocks."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Nanoseconds of one step; `num_due` sequences began a block, `num_added` were new."""

    add: int
    schedule: int
    commit: int
    num_due: int
    num_added: int

    @property
    def total(self) -> int:
        return self.add + self.schedule + self.commit


def engine_config(max_num_seqs: int, **arguments: Any) -> EngineConfig:
    """A config whose token budget never stands in the way."""
    defaults: dict[str, Any] = {
        "model": "none",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 1 << 24,
    }
    return EngineConfig(max_num_seqs=max_num_seqs, **(defaults | arguments))


def model_info(block_size: int = BLOCK_SIZE) -> ModelInfo:
    """A model that does nothing."""
    return ModelInfo(
        max_model_len=_MAX_MODEL_LEN,
        vocab_size=_VOCAB_SIZE,
        eos_token_ids=(),
        fingerprint=b"none",
        layout=KvLayout(1, 1, block_size, 1, "float32"),
    )


class SteppedLoad:
    """Keeps `num_running` sequences decoding at a context of about `context` tokens.

    Args:
        scheduler: new.
        execute: makes a step's output of its batch.
        pattern: one of `PATTERNS`.
    """

    def __init__(
        self,
        scheduler: Any,
        execute: Callable[[Any], Any],
        num_running: int,
        context: int,
        pattern: str,
    ) -> None:
        self.scheduler = scheduler
        self._execute = execute
        self._num_running = num_running
        self._context = context
        self._pattern = pattern
        self._shared = tuple(range(context))  # prompts share their integers, not their prefix
        self._lengths: dict[str, int] = {}  # of the live requests
        self._num_made = 0
        self._num_to_add = 0
        for index in range(num_running):
            scheduler.add(self._make_request(index, self._first_lifetime(index)))
        scheduler.commit(*self._run(scheduler.schedule()))
        self._note_first_tokens()

    def step(self) -> StepTimes:
        """One step, timed, and checked to bring every sequence a token."""
        scheduler, added = self.scheduler, self._replacements()
        begun = time.perf_counter_ns()
        for request in added:
            scheduler.add(request)
        started = time.perf_counter_ns()
        batch = scheduler.schedule()
        scheduled = time.perf_counter_ns()
        done = self._run(batch)
        computed = time.perf_counter_ns()
        outputs = scheduler.commit(*done)
        committed = time.perf_counter_ns()
        num_due = self._take(outputs)
        return StepTimes(
            started - begun, scheduled - started, committed - computed, num_due, len(added)
        )

    def _run(self, batch: Any) -> tuple[Any, Any]:
        return batch, self._execute(batch)

    def _replacements(self) -> list[EngineRequest]:
        added = [self._make_request(0, _LIFETIME) for _ in range(self._num_to_add)]
        self._num_to_add = 0
        return added

    def _first_lifetime(self, index: int) -> int:
        """Under churn, requests are of every age at the start."""
        if self._pattern != "churn":
            return _WARM_UP_STEPS + _MEASURED_STEPS + 8
        return 2 + index * _LIFETIME // self._num_running

    def _make_request(self, index: int, max_tokens: int) -> EngineRequest:
        shift = index % BLOCK_SIZE if self._pattern == "steady" else 0
        number, self._num_made = self._num_made, self._num_made + 1
        prompt = (number % _VOCAB_SIZE, *self._shared[1 : self._context - shift])
        request_id = f"request-{number}"
        self._lengths[request_id] = len(prompt)
        return EngineRequest(
            spec=RequestSpec(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens),
            )
        )

    def _note_first_tokens(self) -> None:
        for request_id in self._lengths:
            self._lengths[request_id] += 1

    def _take(self, outputs: list[Any]) -> int:
        """Notes the tokens; returns how many sequences' step began a new block."""
        if len(outputs) != self._num_running or any(len(o.token_ids) != 1 for o in outputs):
            raise RuntimeError(f"a step of {self._num_running} brought {len(outputs)} tokens")
        num_due = 0
        for output in outputs:
            length = self._lengths[output.request_id] = self._lengths[output.request_id] + 1
            num_due += length % BLOCK_SIZE == 2  # the token before it took a block's first slot
            if output.finish_reason is not None:
                del self._lengths[output.request_id]
                self._num_to_add += 1
        return num_due


def start_load(
    new_scheduler: NewScheduler,
    execute: Callable[[Any], Any],
    num_running: int,
    context: int,
    pattern: str,
) -> SteppedLoad:
    """A load that decodes, warmed up. Blocks are plenty: nobody gives way."""
    longest = context + _WARM_UP_STEPS + _MEASURED_STEPS + 16
    num_blocks = (num_running + num_running // 8 + 8) * -(-longest // BLOCK_SIZE)
    scheduler = new_scheduler(num_running, num_blocks)
    load = SteppedLoad(scheduler, execute, num_running, context, pattern)
    for _ in range(_WARM_UP_STEPS):
        load.step()
    return load


def measure_steps(load: SteppedLoad) -> list[StepTimes]:
    """Times steps as an engine would run them: garbage is collected, but what was there
    before is left alone.
    """
    gc.collect()
    gc.freeze()
    try:
        times = [load.step() for _ in range(_MEASURED_STEPS)]
    finally:
        gc.unfreeze()
    load.scheduler.check()
    return times


def measure_all(
    new_scheduler: NewScheduler, execute: Callable[[Any], Any]
) -> Iterator[tuple[dict[str, Any], list[StepTimes]]]:
    """Every number of running sequences, context and pattern, with its times."""
    for context in CONTEXTS:
        for num_running in NUM_RUNNING:
            for pattern in PATTERNS:
                load = start_load(new_scheduler, execute, num_running, context, pattern)
                case = {"num_running": num_running, "context": context, "pattern": pattern}
                yield case | _summary(times := measure_steps(load), num_running), times


def _summary(times: list[StepTimes], num_running: int) -> dict[str, Any]:
    """Medians and 99th percentiles in microseconds."""
    parts = {
        "schedule": [t.schedule for t in times],
        "commit": [t.commit for t in times],
        "step": [t.total for t in times],
    }
    summary: dict[str, Any] = {}
    for name, values in parts.items():
        summary[f"{name}_us"] = round(statistics.median(values) / 1e3, 2)
        summary[f"{name}_p99_us"] = round(statistics.quantiles(values, n=100)[98] / 1e3, 2)
    per_token = statistics.median(t.commit for t in times) / num_running
    return summary | {"commit_ns_per_token": round(per_token), "num_steps": len(times)}
