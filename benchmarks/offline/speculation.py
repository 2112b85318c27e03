"""Decodes with guesses and without them on engines in this process, and times rows of several
known tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from baton.common.errors import ConfigurationError
from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from benchmarks.offline.driven_rows import DrivenRows
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineOutput, EngineRequest
from engine.runtime.device import with_device_defaults
from engine.runtime.model_runner import ModelRunner
from engine.speculative_config import SpeculativeConfig

__all__ = [
    "Comparison",
    "Engine",
    "RowTimes",
    "compare_methods",
    "open_engines",
    "time_rows",
]

_ROW_TOKENS = (1, 2, 3, 4, 6, 8)
_ROW_CONTEXT = 256
_ROW_REPEATS = 20
_ROW_WARM_UPS = 3

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and its runner.

    Attributes:
        method: of its guesses; None: it guesses nothing.
        core: the engine.
        runner: runs its steps.
    """

    method: str | None
    core: EngineCore
    runner: ModelRunner


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rounds of one workload with a method's guesses, and without any.

    Attributes:
        workload: name of the workload.
        batch_size: the most requests at once.
        method: of the guesses.
        num_requests: requests in a round.
        tokens_per_s_without: median over the rounds; prompts are part of the time.
        tokens_per_s_with: the same with guesses.
        ratios: speed with guesses over the speed without, by round.
        ratio: their median.
        num_guesses: guesses that steps have checked, in all rounds.
        num_accepted: those of them that were right.
        tokens_per_step: mean number of tokens that a sequence got from a step that gave it any.
        num_differing: requests whose tokens were not those of the engine without guesses.
    """

    workload: str
    batch_size: int
    method: str
    num_requests: int
    tokens_per_s_without: float
    tokens_per_s_with: float
    ratios: tuple[float, ...]
    ratio: float
    num_guesses: int
    num_accepted: int
    tokens_per_step: float
    num_differing: int


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Steps of rows that all run the same number of known tokens. Medians in milliseconds.

    Attributes:
        batch_size: number of rows.
        context: tokens of each row before these.
        decode_ms: the step of an engine that guesses nothing, which decodes one token per row.
        known_ms: by the number of known tokens, of which all but the first are guesses.
    """

    batch_size: int
    context: int
    decode_ms: float
    known_ms: Mapping[int, float]


@contextmanager
def open_engines(
    config: EngineConfig, methods: Sequence[SpeculativeConfig]
) -> Iterator[list[Engine]]:
    """Opens an engine without guesses, then one for each method; they divide the GPU's memory.

    Requests may not find earlier ones' KV, or repeated rounds would skip prompts.
    """
    config = replace(with_device_defaults(config), enable_prefix_caching=False)
    configs: list[SpeculativeConfig | None] = [None, *methods]
    engines = []
    with ExitStack() as opened:
        for index, speculative_config in enumerate(configs, 1):
            own = replace(
                config,
                speculative_config=speculative_config,
                # What the engines before it hold counts as this one's.
                gpu_memory_utilization=config.gpu_memory_utilization * index / len(configs),
            )
            runner = ModelRunner(own)
            opened.callback(runner.close)
            core = EngineCore(own, runner)
            opened.callback(core.close)
            method = speculative_config.method if speculative_config else None
            engines.append(Engine(method, core, runner))
        yield engines


def compare_methods(
    engines: Sequence[Engine],
    workload: str,
    batch_size: int,
    rounds: Sequence[Sequence[Prompt]],
    max_tokens: int,
) -> list[Comparison]:
    """Runs every round on every engine, and compares each method with the engine without guesses.

    The engines take turns in going first. The first round does not count, but its tokens do.

    Args:
        engines: as `open_engines` opens them.
        workload: name of the workload.
        batch_size: the most requests at once.
        rounds: the prompts of each round.
        max_tokens: the most tokens of an answer.
    """
    runs: list[list[_Run]] = [[] for _ in engines]
    for index, prompts in enumerate(rounds):
        for place in range(len(engines)):
            number = (index + place) % len(engines)
            core = engines[number].core
            runs[number].append(_run(core, _requests(core, prompts, max_tokens), batch_size))
    plain, *others = runs
    return [
        _compare(workload, batch_size, engine.method or "", plain, own)
        for engine, own in zip(engines[1:], others, strict=True)
    ]


def time_rows(engine: Engine, batch_size: int) -> RowTimes:
    """Times steps of rows that decode, and of rows of several known tokens, in turn.

    Args:
        engine: guesses, and has no requests. Rows have at most as many guesses as its sequences.
        batch_size: number of rows.

    Raises:
        ConfigurationError: the pool cannot hold the rows.
    """
    runner, most = engine.runner, 1 + engine.core.config.max_drafts
    numbers = [number for number in _ROW_TOKENS if number <= most]
    context = min(_ROW_CONTEXT, runner.info.max_model_len - most)
    rows = DrivenRows(runner)
    if short := rows.blocks_short(batch_size, context + most):
        raise ConfigurationError(
            f"the KV pool has {short} blocks too few for {batch_size} rows of {context + most} "
            "tokens; set a larger --kv-cache-memory-bytes or --num-gpu-blocks-override"
        )
    runner.kv_pool.zero_()  # memory that was never written reads faster
    decode_s: list[float] = []
    known_s: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(_ROW_WARM_UPS + _ROW_REPEATS):
        rows.begin(batch_size, context, context + most)
        decode_s.append(_seconds(lambda: rows.submit().result()))
        for number, times_s in known_s.items():
            times_s.append(_seconds(partial(rows.run_known, batch_size, context, number)))
    return RowTimes(
        batch_size,
        context,
        _median_ms(decode_s[_ROW_WARM_UPS:]),
        {number: _median_ms(times_s[_ROW_WARM_UPS:]) for number, times_s in known_s.items()},
    )


@dataclass(slots=True)
class _Run:
    """The outcome of a round on one engine: tokens by request; how many steps gave a sequence
    tokens, summed over sequences; guesses; seconds.
    """

    tokens: dict[str, list[int]]
    num_draws: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    duration_s: float = 0.0
    ended: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s

    def record(self, outputs: Sequence[EngineOutput]) -> None:
        """Records outputs; each has a step's tokens of one sequence."""
        for output in outputs:
            if output.error is not None:
                raise output.error
            self.tokens[output.request_id] += output.token_ids
            self.num_draws += bool(output.token_ids)
            if output.is_last:
                self.ended.append(output.request_id)


def _requests(core: EngineCore, prompts: Sequence[Prompt], max_tokens: int) -> list[EngineRequest]:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    return [
        EngineRequest(
            spec=RequestSpec.with_defaults(
                str(index), prompt, params, eos_token_ids=core.info.eos_token_ids
            )
        )
        for index, prompt in enumerate(prompts)
    ]


def _run(core: EngineCore, requests: Sequence[EngineRequest], batch_size: int) -> _Run:
    """Runs requests, at most `batch_size` at once."""
    for request in requests:
        core.check(request)
    run = _Run({request.spec.request_id: [] for request in requests})
    before = _num_guesses(core)
    waiting = list(reversed(requests))
    started = time.perf_counter()
    while len(run.ended) < len(requests):
        while waiting and len(requests) - len(waiting) - len(run.ended) < batch_size:
            run.record(core.add_request(waiting.pop()))
        core.run_step(run.record)
        core.wait()
    run.duration_s = time.perf_counter() - started
    after = _num_guesses(core)
    run.num_accepted, run.num_rejected = (int(b - a) for a, b in zip(before, after, strict=True))
    return run


def _num_guesses(core: EngineCore) -> tuple[float, float]:
    """Returns how many guesses an engine has accepted and rejected."""
    values = core.metrics.snapshot().values
    accepted, rejected = (
        values.get(("baton_engine_draft_tokens", result), 0.0)
        for result in ("accepted", "rejected")
    )
    return accepted, rejected


def _compare(
    workload: str,
    batch_size: int,
    method: str,
    without: Sequence[_Run],
    guessing: Sequence[_Run],
) -> Comparison:
    num_differing = sum(
        plain.tokens[name] != own.tokens[name]
        for plain, own in zip(without, guessing, strict=True)
        for name in plain.tokens
    )
    without, guessing = without[1:], guessing[1:]
    ratios = tuple(
        own.tokens_per_s / plain.tokens_per_s for plain, own in zip(without, guessing, strict=True)
    )
    num_accepted = sum(run.num_accepted for run in guessing)
    return Comparison(
        workload=workload,
        batch_size=batch_size,
        method=method,
        num_requests=len(guessing[0].tokens),
        tokens_per_s_without=statistics.median(run.tokens_per_s for run in without),
        tokens_per_s_with=statistics.median(run.tokens_per_s for run in guessing),
        ratios=ratios,
        ratio=statistics.median(ratios),
        num_guesses=num_accepted + sum(run.num_rejected for run in guessing),
        num_accepted=num_accepted,
        tokens_per_step=sum(run.num_tokens for run in guessing)
        / sum(run.num_draws for run in guessing),
        num_differing=num_differing,
    )


def _seconds(call: Callable[[], object]) -> float:
    """Returns the time of a call's second run: the first step of another kind takes longer."""
    call()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _median_ms(times_s: Sequence[float]) -> float:
    return 1e3 * statistics.median(times_s)
