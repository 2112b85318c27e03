"""The time of a scheduler's step, and what it grows with.

Nothing is computed: `NullRunner` returns made-up tokens, so only the scheduler takes time.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from engine.batch import ChunkOutput, ScheduledBatch, StepOutput
from engine.config import EngineConfig
from engine.constraints.grammars import Grammars
from engine.request import EngineOutput, EngineRequest
from engine.runner import ModelInfo, StepCosts
from engine.schedule.parts import SchedulerParts
from engine.schedule.scheduler import Scheduler
from kvstore.connector import null_connector
from kvstore.layout import KvLayout

__all__ = [
    "BLOCK_SIZE",
    "PATTERNS",
    "VOCAB_SIZE",
    "NullRunner",
    "StepTimes",
    "SteppedLoad",
    "greedy_request",
    "measure_step_time",
    "measure_steps",
    "new_scheduler",
    "start_load",
]

BLOCK_SIZE = 16
VOCAB_SIZE = 1 << 15
_MAX_MODEL_LEN = 1 << 14
_TOKEN_ID = 7
_COSTS = StepCosts(prompt_token_s=1e-4, swapped_block_s=1e-4)
_NUM_RUNNING = (16, 64, 256, 1024)
_CONTEXTS = (256, 8192)
PATTERNS = ("steady", "aligned", "churn")
"""steady: sequences fill their blocks at different steps. aligned: all fill them at the same step.
churn: one sequence in a hundred ends at each step, and a new one replaces it."""
_LIFETIME = 100  # tokens per request under churn: one in a hundred ends at each step
_WARM_UP_STEPS = 2 * BLOCK_SIZE
_MEASURED_STEPS = 30 * BLOCK_SIZE


def greedy_request(
    request_id: str, prompt_token_ids: tuple[int, ...], max_tokens: int
) -> EngineRequest:
    """Returns a request without stop tokens that always takes the likeliest token."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    return EngineRequest(
        spec=RequestSpec(request_id=request_id, prompt_token_ids=prompt_token_ids, params=params)
    )


class NullRunner:
    """A runner that computes nothing: every draw is the same token."""

    def __init__(self) -> None:
        self._decoded: tuple[int, ...] = ()

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Returns the output of a step at once."""
        if len(self._decoded) != len(batch.decode_rows):
            self._decoded = (_TOKEN_ID,) * len(batch.decode_rows)
        chunks = tuple(
            ChunkOutput((_TOKEN_ID,) * len(chunk.draws)) if chunk.draws else None
            for chunk in batch.chunks
        )
        return StepOutput(step=batch.step, chunks=chunks, decoded=self._decoded)


def new_scheduler(max_num_seqs: int, num_blocks: int) -> Scheduler:
    """Returns a scheduler without swap space or connector, whose token budget limits no step.

    Args:
        max_num_seqs: most sequences of a step.
        num_blocks: size of the KV pool.
    """
    config = EngineConfig(
        model="none",
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1 << 24,
    )
    info = ModelInfo(
        max_model_len=_MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        fingerprint=b"none",
        layout=KvLayout(1, 1, BLOCK_SIZE, 1, "float32"),
    )
    parts = SchedulerParts.build(
        config,
        info,
        num_blocks=num_blocks,
        num_host_blocks=0,
        costs=_COSTS,
        namespace=b"benchmark",
        connector=null_connector()[0],
        grammars=Grammars(config, info, lambda: None),
        clock=lambda: 0.0,
    )
    return Scheduler(parts)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long one step took, in nanoseconds.

    Attributes:
        add: time to add the new requests.
        schedule: time of `schedule`.
        commit: time of `commit`.
        num_due: sequences that began a new block.
        num_added: requests that were new.
    """

    add: int
    schedule: int
    commit: int
    num_due: int
    num_added: int

    @property
    def total(self) -> int:
        return self.add + self.schedule + self.commit


def measure_step_time() -> dict[str, Any]:
    """Returns step times of each case, and what `schedule` grows with."""
    cases: list[dict[str, Any]] = []
    growth = []
    for context, num_running, pattern in product(_CONTEXTS, _NUM_RUNNING, PATTERNS):
        case = {"num_running": num_running, "context": context, "pattern": pattern}
        times = measure_steps(start_load(NullRunner(), num_running, context, pattern))
        cases.append(case | _summary(times, num_running))
        if pattern == "aligned":
            growth.append(_growth(case, times))
    return {"steps": cases, "growth": growth}


class SteppedLoad:
    """Keeps `num_running` sequences decoding at a context of about `context` tokens.

    Args:
        scheduler: a scheduler without requests.
        runner: computes its batches.
        num_running: sequences of every step.
        context: tokens of each, about.
        pattern: one of `PATTERNS`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: NullRunner,
        num_running: int,
        context: int,
        pattern: str,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._num_running = num_running
        self._context = context
        self._pattern = pattern
        self._shared = tuple(range(context))  # prompts share these objects, but no prefix
        self._lengths: dict[str, int] = {}  # tokens of each running request
        self._num_made = 0
        self._num_to_add = 0
        for index in range(num_running):
            scheduler.add(self._make_request(index, self._first_lifetime(index)))
        batch = self._scheduled()
        scheduler.commit(batch, runner.execute(batch))
        self._note_first_tokens()

    def step(self) -> StepTimes:
        """Runs and times one step.

        Raises:
            RuntimeError: a sequence got no token.
        """
        scheduler, added = self.scheduler, self._replacements()
        begun = time.perf_counter_ns()
        for request in added:
            scheduler.add(request)
        started = time.perf_counter_ns()
        batch = self._scheduled()
        scheduled = time.perf_counter_ns()
        output = self._runner.execute(batch)
        computed = time.perf_counter_ns()
        outputs = scheduler.commit(batch, output)
        committed = time.perf_counter_ns()
        num_due = self._count_due(outputs)
        return StepTimes(
            started - begun, scheduled - started, committed - computed, num_due, len(added)
        )

    def _scheduled(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        if batch is None:
            raise RuntimeError("no sequence can be scheduled")
        return batch

    def _replacements(self) -> list[EngineRequest]:
        added = [self._make_request(0, _LIFETIME) for _ in range(self._num_to_add)]
        self._num_to_add = 0
        return added

    def _first_lifetime(self, index: int) -> int:
        """Returns how many tokens a request gets; under churn they end one after the other."""
        if self._pattern != "churn":
            return _WARM_UP_STEPS + _MEASURED_STEPS + 8
        return 2 + index * _LIFETIME // self._num_running

    def _make_request(self, index: int, max_tokens: int) -> EngineRequest:
        shift = index % BLOCK_SIZE if self._pattern == "steady" else 0
        number, self._num_made = self._num_made, self._num_made + 1
        prompt = (number % VOCAB_SIZE, *self._shared[1 : self._context - shift])
        request_id = f"request-{number}"
        self._lengths[request_id] = len(prompt)
        return greedy_request(request_id, prompt, max_tokens)

    def _note_first_tokens(self) -> None:
        for request_id in self._lengths:
            self._lengths[request_id] += 1

    def _count_due(self, outputs: Sequence[EngineOutput]) -> int:
        """Counts the tokens of each sequence; returns how many sequences began a new block."""
        if len(outputs) != self._num_running or any(len(o.token_ids) != 1 for o in outputs):
            raise RuntimeError(
                f"a step of {self._num_running} sequences had {len(outputs)} outputs"
            )
        num_due = 0
        for output in outputs:
            length = self._lengths[output.request_id] = self._lengths[output.request_id] + 1
            num_due += length % BLOCK_SIZE == 2  # its last token has the first slot of a block
            if output.finish_reason is not None:
                del self._lengths[output.request_id]
                self._num_to_add += 1
        return num_due


def start_load(runner: NullRunner, num_running: int, context: int, pattern: str) -> SteppedLoad:
    """Returns a load that decodes, after a warm-up. Its pool has room for all sequences."""
    longest = context + _WARM_UP_STEPS + _MEASURED_STEPS + 16
    num_blocks = (num_running + num_running // 8 + 8) * -(-longest // BLOCK_SIZE)
    scheduler = new_scheduler(num_running, num_blocks)
    load = SteppedLoad(scheduler, runner, num_running, context, pattern)
    for _ in range(_WARM_UP_STEPS):
        load.step()
    return load


def measure_steps(load: SteppedLoad) -> list[StepTimes]:
    """Times steps as an engine runs them: with garbage collection, but not of older objects."""
    gc.collect()
    gc.freeze()
    try:
        times = [load.step() for _ in range(_MEASURED_STEPS)]
    finally:
        gc.unfreeze()
    load.scheduler.check()
    return times


def _summary(times: list[StepTimes], num_running: int) -> dict[str, Any]:
    """Returns medians and 99th percentiles in microseconds."""
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


def _growth(case: dict[str, Any], times: list[StepTimes]) -> dict[str, Any]:
    """Returns the time of `schedule` where no block begins, and the extra time per new block.

    Steps of the aligned pattern begin either no block or one for each sequence.
    """
    quiet = statistics.median(t.schedule for t in times if t.num_due == 0)
    busy = statistics.median(t.schedule for t in times if t.num_due > 0)
    return {
        "num_running": case["num_running"],
        "context": case["context"],
        "schedule_us_nothing_due": round(quiet / 1e3, 2),
        "schedule_us_all_due": round(busy / 1e3, 2),
        "schedule_us_per_due": round((busy - quiet) / case["num_running"] / 1e3, 2),
    }
