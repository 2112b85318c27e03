"""`OfflineEngine`: an engine in this process, with records of its requests, steps and floors."""

import resource
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from baton.common.errors import BatonError
from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from benchmarks.machine import describe_machine
from benchmarks.model_cost import Ceilings, ModelShape
from benchmarks.model_shape import read_shape
from benchmarks.request import BenchRequest, MeasuredRequest
from engine.config import EngineConfig
from engine.loop.build import build_engine
from engine.loop.core import EngineCore
from engine.metrics.counts import Phase
from engine.request import EngineOutput, EngineRequest
from engine.runner import ModelInfo
from engine.runtime.device import resolve_device

__all__ = [
    "Floors",
    "MeasuredStep",
    "OfflineEngine",
    "OfflineRecord",
    "OfflineRun",
    "cache_facts",
    "measure_floors",
    "peak_memory_bytes",
]


@dataclass(slots=True)
class OfflineRecord(MeasuredRequest):
    """The record of one request on an engine in this process.

    Attributes:
        token_ids: the tokens.
        num_draws: steps that gave it tokens; a step gives several with drafts or forced tokens.
        failure: the error that ended it; None if it ended well.
    """

    token_ids: list[int] = field(default_factory=list)
    num_draws: int = 0
    failure: BatonError | None = None


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of the engine.

    Attributes:
        phases: the seconds of each phase.
        num_draws: requests that got tokens.
        num_begun: those of them that got their first tokens.
        num_ended: requests that ended.
    """

    phases: Mapping[Phase, float]
    num_draws: int
    num_begun: int
    num_ended: int

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.phases.values())


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """Requests that ran together.

    Attributes:
        records: a record per request, in the order of the requests.
        steps: the steps that computed anything.
        duration_s: from the start to the last end.
    """

    records: Sequence[OfflineRecord]
    steps: Sequence[MeasuredStep]
    duration_s: float

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(len(record.token_ids) for record in self.records)

    @property
    def num_draws(self) -> int:
        """Steps that gave a request tokens, summed over the requests."""
        return sum(record.num_draws for record in self.records)

    @property
    def num_steps(self) -> int:
        """Steps that gave any request tokens."""
        return sum(step.num_draws > 0 for step in self.steps)

    def check(self) -> Self:
        """Returns the run.

        Raises:
            BatonError: a request failed.
        """
        for record in self.records:
            if record.failure is not None:
                raise record.failure
        return self


class OfflineEngine:
    """An engine in this process.

    Args:
        config: the engine's config.
        core: an existing engine; None to build one.

    Attributes:
        core: the engine.
        start_up_s: seconds to load the model, profile it and allocate, without the import of torch.
    """

    def __init__(self, config: EngineConfig, core: EngineCore | None = None) -> None:
        started = time.perf_counter()
        self.core = core or build_engine(config)
        self.start_up_s = time.perf_counter() - started

    def run(
        self,
        requests: Sequence[BenchRequest],
        on_end: Callable[[MeasuredRequest], None] = lambda record: None,
    ) -> list[MeasuredRequest]:
        """Runs all requests greedily, past the end of sequence. Each starts at once, or when the
        request that it waits for has ended.

        Times of arrival are ignored.

        Returns:
            The records, in the order of the requests. Failed requests have an error.
        """
        return list(self.run_timed(requests, on_end).records)

    def run_timed(
        self,
        requests: Sequence[BenchRequest],
        on_end: Callable[[MeasuredRequest], None] = lambda record: None,
    ) -> OfflineRun:
        """Runs requests as `run` does; returns the run with its steps."""

        def end(index: int, record: OfflineRecord) -> None:
            num_tokens, num_asked = len(record.token_ids), requests[index].num_output_tokens
            if record.failure is None and num_tokens != num_asked:
                record.error = f"{num_tokens} tokens came, {num_asked} were asked for"
            on_end(record)

        specs = [_greedy_spec(request) for request in requests]
        return self._run(_EngineRun(self.core, specs, [request.after for request in requests], end))

    def run_specs(
        self, specs: Sequence[RequestSpec], max_concurrency: int | None = None
    ) -> OfflineRun:
        """Runs requests with parameters of their own.

        Args:
            specs: the requests; their ids are replaced.
            max_concurrency: the most requests at once; None for any number.

        Raises:
            BatonError: a request failed.
        """
        after = [None] * len(specs)
        return self._run(
            _EngineRun(self.core, specs, after, max_concurrency=max_concurrency)
        ).check()

    def _run(self, run: "_EngineRun") -> OfflineRun:
        with run.timed():
            while run.is_unfinished:
                self.core.run_step(run.record_outputs)
                if run.is_unfinished:
                    self.core.wait()
        return OfflineRun(run.records, run.steps, run.now_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.core.close()


def peak_memory_bytes() -> int:
    """Returns the most host memory that this process ever had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _greedy_spec(request: BenchRequest) -> RequestSpec:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=request.num_output_tokens)
    return RequestSpec(
        request_id="", prompt_token_ids=tuple(request.prompt_token_ids), params=params
    )


class _EngineRun:
    """The requests of one run. Its clock starts at 0 when `timed` is entered.

    Args:
        core: the engine.
        specs: the requests.
        after: for each request, the index of the one that must have ended first, if any.
        on_end: called with a request's index and record at its end.
        max_concurrency: the most requests at once; None for any number.
    """

    def __init__(
        self,
        core: EngineCore,
        specs: Sequence[RequestSpec],
        after: Sequence[int | None],
        on_end: Callable[[int, OfflineRecord], None] = lambda index, record: None,
        *,
        max_concurrency: int | None = None,
    ) -> None:
        self._core, self._specs, self._on_end = core, specs, on_end
        self._max_running = len(specs) if max_concurrency is None else max_concurrency
        self._followers: dict[int | None, list[int]] = defaultdict(list)
        for index, before in enumerate(after):
            self._followers[before].append(index)
        self._ready = deque(self._followers[None])
        self._num_running, self._num_unfinished = 0, len(specs)
        self._num_draws = self._num_begun = self._num_ended = 0  # since the last step
        self._started_at = 0.0
        self.records = [OfflineRecord(len(spec.prompt_token_ids), 0.0) for spec in specs]
        self.steps: list[MeasuredStep] = []

    @property
    def is_unfinished(self) -> bool:
        """Whether a request has not ended."""
        return self._num_unfinished > 0

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started_at

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Starts the clock and the first requests; records the engine's steps meanwhile."""
        timer = self._core.step_timer
        timer.on_step = self._record_step
        self._started_at = time.perf_counter()
        try:
            self._add_ready()
            yield
        finally:
            timer.on_step = None

    def record_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Records the outputs of a step, and adds the requests that may start now."""
        self._record(outputs)
        self._add_ready()

    def _record(self, outputs: Sequence[EngineOutput]) -> None:
        now_s = self.now_s
        for output in outputs:
            index = int(output.request_id)
            record = self.records[index]
            if output.token_ids:
                self._num_draws += 1
                self._num_begun += not record.token_ids
                record.num_draws += 1
                record.token_ids += output.token_ids
                record.token_times_s += [now_s] * len(output.token_ids)
            if output.is_last:
                self._num_running -= 1
                self._end(index, output.error)

    def _record_step(self, phases: Mapping[Phase, float]) -> None:
        self.steps.append(MeasuredStep(phases, self._num_draws, self._num_begun, self._num_ended))
        self._num_draws = self._num_begun = self._num_ended = 0

    def _add_ready(self) -> None:
        while self._ready and self._num_running < self._max_running:
            self._add(self._ready.popleft())

    def _add(self, index: int) -> None:
        request = EngineRequest(spec=replace(self._specs[index], request_id=str(index)))
        self.records[index].sent_s = self.now_s
        try:
            self._core.check(request)
        except BatonError as error:
            self._end(index, error)
        else:
            self._num_running += 1
            self._record(self._core.scheduler.add(request))

    def _end(self, index: int, error: BatonError | None) -> None:
        record = self.records[index]
        record.ended_s, record.failure = self.now_s, error
        if error is not None:
            record.error = f"{error.code}: {error.message}"
        self._num_unfinished -= 1
        self._num_ended += 1
        self._on_end(index, record)
        self._ready += self._followers[index]


@dataclass(frozen=True, slots=True)
class Floors:
    """The machine's limits on an engine's figures.

    Attributes:
        machine: the machine's names, and its ceilings, as measured now.
        ceilings: the ceilings for the model's type.
        shape: the model's size.
        dtype: type of weights and activations.
    """

    machine: dict[str, Any]
    ceilings: Ceilings
    shape: ModelShape
    dtype: str


def cache_facts(info: ModelInfo) -> dict[str, str]:
    """Returns what a report states of a model's KV and states."""
    facts = {
        "type of KV": info.layout.dtype,
        "KV of a token, bytes": f"{info.kv_bytes_per_token:,}",
    }
    if info.states is not None:
        facts["states of a sequence, bytes"] = f"{info.states.slot_bytes:,}"
    return facts


def measure_floors(config: EngineConfig) -> Floors:
    """Measures the ceilings and reads the model's size.

    It needs half a GiB of memory, so call it after `peak_memory_bytes`.
    """
    shape, dtype = read_shape(config)
    machine = describe_machine(str(resolve_device(config.device)), config.num_threads)
    # Where float16 products are fast, they are as fast as bfloat16 products.
    product = "float32" if dtype == "float32" else "bfloat16"
    return Floors(machine, Ceilings.of_machine(machine, product), shape, dtype)
