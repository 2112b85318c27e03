"""Speculation on engines in this process: decoding with and without drafts, and its steps."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from baton.common.errors import ConfigurationError
from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from benchmarks.offline.driven_rows import DrivenRows
from benchmarks.offline.offline_engine import OfflineEngine
from engine.config import EngineConfig
from engine.loop.core import EngineCore
from engine.runtime.device import with_device_defaults
from engine.runtime.model_runner import ModelRunner
from engine.speculative_config import SpeculativeConfig

__all__ = [
    "DraftComparison",
    "DraftEngine",
    "Round",
    "RowTimes",
    "compare_methods",
    "compare_rounds",
    "open_engines",
    "time_rows",
]

_ROW_TOKENS = (1, 2, 3, 4, 6, 8)
_ROW_CONTEXT = 256
_ROW_REPEATS = 20
_ROW_WARM_UPS = 3

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftEngine:
    """An engine and its runner.

    Attributes:
        method: of its draft tokens; None: it drafts nothing.
        offline: the engine.
        runner: runs its steps.
    """

    method: str | None
    offline: OfflineEngine
    runner: ModelRunner


@dataclass(frozen=True, slots=True)
class DraftComparison:
    """Rounds of one workload with a method's draft tokens, and without any.

    Attributes:
        workload: name of the workload.
        batch_size: the most requests at once.
        method: of the draft tokens.
        num_requests: requests in a round.
        tokens_per_s_without: median over the rounds; prompts are part of the time.
        tokens_per_s_with: the same with drafts.
        ratios: speed with drafts over the speed without, by round.
        ratio: their median.
        num_drafts: draft tokens that steps have checked, in all rounds.
        num_accepted: those of them that were right.
        tokens_per_step: mean number of tokens that a sequence got from a step that gave it any.
        num_differing: requests whose tokens were not those of the engine without drafts.
    """

    workload: str
    batch_size: int
    method: str
    num_requests: int
    tokens_per_s_without: float
    tokens_per_s_with: float
    ratios: tuple[float, ...]
    ratio: float
    num_drafts: int
    num_accepted: int
    tokens_per_step: float
    num_differing: int


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Steps of rows that all run the same number of known tokens. Medians in milliseconds.

    Attributes:
        batch_size: number of rows.
        context: tokens of each row before these.
        decode_ms: the step of an engine that drafts nothing, which decodes one token per row.
        known_ms: by the number of known tokens, of which all but the first are draft tokens.
    """

    batch_size: int
    context: int
    decode_ms: float
    known_ms: Mapping[int, float]


@contextmanager
def open_engines(
    config: EngineConfig, methods: Sequence[SpeculativeConfig]
) -> Iterator[list[DraftEngine]]:
    """Opens an engine without drafts, then one for each method; they divide the GPU's memory.

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
            offline = opened.enter_context(OfflineEngine(own, EngineCore(own, runner)))
            method = speculative_config.method if speculative_config else None
            engines.append(DraftEngine(method, offline, runner))
        yield engines


def compare_methods(
    engines: Sequence[DraftEngine],
    workload: str,
    batch_size: int,
    rounds: Sequence[Sequence[Prompt]],
    max_tokens: int,
) -> list[DraftComparison]:
    """Runs every round on every engine, and compares each method with the engine without drafts.

    The engines take turns in going first. The first round does not count, but its tokens do.

    Args:
        engines: as `open_engines` opens them.
        workload: name of the workload.
        batch_size: the most requests at once.
        rounds: the prompts of each round.
        max_tokens: the most tokens of an answer.
    """
    results: list[list[Round]] = [[] for _ in engines]
    for index, prompts in enumerate(rounds):
        for place in range(len(engines)):
            number = (index + place) % len(engines)
            results[number].append(
                _run_round(engines[number].offline, prompts, max_tokens, batch_size)
            )
    plain, *others = results
    return [
        compare_rounds(workload, batch_size, engine.method or "", plain, own)
        for engine, own in zip(engines[1:], others, strict=True)
    ]


def time_rows(engine: DraftEngine, batch_size: int) -> RowTimes:
    """Times steps of rows that decode, and of rows of several known tokens, in turn.

    Args:
        engine: drafts tokens, and has no requests. Rows have at most as many draft tokens as its
            sequences.
        batch_size: number of rows.

    Raises:
        ConfigurationError: the pool cannot hold the rows.
    """
    runner, most = engine.runner, 1 + engine.offline.core.config.max_drafts
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


@dataclass(frozen=True, slots=True)
class Round:
    """The outcome of a round on one engine.

    Attributes:
        tokens: those of each request.
        num_draws: steps that gave a sequence tokens, summed over the sequences.
        num_accepted: draft tokens that were right.
        num_rejected: draft tokens that were wrong.
        duration_s: seconds of the round.
    """

    tokens: Sequence[Sequence[int]]
    num_draws: int
    num_accepted: int
    num_rejected: int
    duration_s: float

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.duration_s


def _run_round(
    engine: OfflineEngine, prompts: Sequence[Prompt], max_tokens: int, batch_size: int
) -> Round:
    """Runs a round, at most `batch_size` requests at once."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    eos_token_ids = engine.core.info.eos_token_ids
    before = _num_drafts(engine.core)
    run = engine.run_specs(
        [
            RequestSpec.with_defaults("", prompt, params, eos_token_ids=eos_token_ids)
            for prompt in prompts
        ],
        max_concurrency=batch_size,
    )
    accepted, rejected = (b - a for a, b in zip(before, _num_drafts(engine.core), strict=True))
    return Round(
        tokens=[record.token_ids for record in run.records],
        num_draws=run.num_draws,
        num_accepted=int(accepted),
        num_rejected=int(rejected),
        duration_s=run.duration_s,
    )


def _num_drafts(core: EngineCore) -> tuple[float, float]:
    """Returns how many draft tokens an engine has accepted and rejected."""
    values = core.metrics.snapshot().values
    accepted, rejected = (
        values.get(("baton_engine_draft_tokens", result), 0.0)
        for result in ("accepted", "rejected")
    )
    return accepted, rejected


def compare_rounds(
    workload: str,
    batch_size: int,
    method: str,
    without: Sequence[Round],
    drafting: Sequence[Round],
) -> DraftComparison:
    """Compares rounds with a method's draft tokens with the same rounds without drafts; the speed
    of the first one does not count.
    """
    num_differing = sum(
        tokens != other
        for plain, own in zip(without, drafting, strict=True)
        for tokens, other in zip(plain.tokens, own.tokens, strict=True)
    )
    without, drafting = without[1:], drafting[1:]
    ratios = tuple(
        own.tokens_per_s / plain.tokens_per_s for plain, own in zip(without, drafting, strict=True)
    )
    num_accepted = sum(run.num_accepted for run in drafting)
    return DraftComparison(
        workload=workload,
        batch_size=batch_size,
        method=method,
        num_requests=len(drafting[0].tokens),
        tokens_per_s_without=statistics.median(run.tokens_per_s for run in without),
        tokens_per_s_with=statistics.median(run.tokens_per_s for run in drafting),
        ratios=ratios,
        ratio=statistics.median(ratios),
        num_drafts=num_accepted + sum(run.num_rejected for run in drafting),
        num_accepted=num_accepted,
        tokens_per_step=sum(run.num_tokens for run in drafting)
        / sum(run.num_draws for run in drafting),
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
