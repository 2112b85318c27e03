"""`EngineMetrics`: counts what one engine does. Pure.

The engine's thread counts requests and steps, and the threads that compile grammars count these.
`engine.metrics.export` adds the values of `EngineLoad` and exports all. To add a metric, add a
`MetricInfo` to `METRICS`, a method that counts it, and a row in docs/metrics.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from baton.common.observe.metrics import MetricInfo, Metrics, Series, Snapshot, buckets_between
from engine.batch import ScheduledBatch
from engine.request import EngineOutput, FinishReason

__all__ = ["METRICS", "PHASES", "WAITS", "EngineMetrics", "Phase", "RankReport", "StepTimer"]

Phase = Literal["transfers", "schedule", "execute", "commit"]

PHASES: tuple[Phase, ...] = ("transfers", "schedule", "execute", "commit")

WAITS = ("blocks", "load", "grammar", "swapped")
"""What a request waits for that does not run: blocks of the pool, a load of its KV, its grammar, or
room for its KV, which is on the host."""

_REQUEST_S = buckets_between(0.001, 500.0)
_TOKEN_S = buckets_between(0.001, 10.0)
_PHASE_S = buckets_between(1e-5, 10.0)
_SIZES = tuple(2.0**power for power in range(15))

_COUNTED: dict[str, MetricInfo] = {
    "baton_engine_requests": MetricInfo(
        "counter", "Requests that have ended.", {"outcome": tuple(r.value for r in FinishReason)}
    ),
    "baton_engine_prompt_tokens": MetricInfo(
        "counter", "Tokens of the prompts of admitted requests."
    ),
    "baton_engine_cached_prompt_tokens": MetricInfo(
        "counter",
        "Of them, those whose KV was not computed.",
        {"source": ("local", "loaded", "pulled")},
    ),
    "baton_engine_generated_tokens": MetricInfo("counter", "Tokens in the requests' outputs."),
    "baton_engine_load_seconds": MetricInfo(
        "histogram", "From a request's arrival to the end of its load.", buckets=_REQUEST_S
    ),
    "baton_engine_queue_seconds": MetricInfo(
        "histogram",
        "From a request's arrival, or the end of its load, to its first step.",
        buckets=_REQUEST_S,
    ),
    "baton_engine_prefill_seconds": MetricInfo(
        "histogram", "From a request's first step to its first token.", buckets=_REQUEST_S
    ),
    "baton_engine_first_token_seconds": MetricInfo(
        "histogram", "From a request's arrival to its first token.", buckets=_REQUEST_S
    ),
    "baton_engine_inter_token_seconds": MetricInfo(
        "histogram", "Between two tokens of one sequence.", buckets=_TOKEN_S
    ),
    "baton_engine_request_seconds": MetricInfo(
        "histogram", "From a request's arrival to its last output.", buckets=_REQUEST_S
    ),
    "baton_engine_step_seconds": MetricInfo(
        "histogram", "Phases of engine steps.", {"phase": PHASES}, buckets=_PHASE_S
    ),
    "baton_engine_step_rows": MetricInfo("histogram", "Sequences in a step.", buckets=_SIZES),
    "baton_engine_step_tokens": MetricInfo(
        "histogram", "Tokens that a step computes.", buckets=_SIZES
    ),
    "baton_engine_step_limit_seconds": MetricInfo(
        "gauge", "How long the newest step may take; 0 while nothing bounds it."
    ),
    "baton_engine_ruled_rows": MetricInfo(
        "counter", "Sequences in steps whose next token is drawn by logit rules."
    ),
    "baton_engine_constrained_rows": MetricInfo(
        "counter", "Sequences in steps whose next token a grammar or a thinking budget constrains."
    ),
    "baton_engine_draft_tokens": MetricInfo(
        "counter",
        "Draft tokens that a step has checked.",
        {"result": ("accepted", "rejected")},
    ),
    "baton_engine_accepted_drafts": MetricInfo(
        "histogram",
        "Draft tokens of a sequence that were right in one step.",
        buckets=tuple(map(float, (*range(9), 16, 32, 64))),
    ),
    "baton_engine_failed_steps": MetricInfo("counter", "Steps that raised an error."),
    "baton_engine_retried_requests": MetricInfo(
        "counter",
        "Requests that were tried alone, as a step with them and others had failed.",
        {"result": ("passed", "failed")},
    ),
    "baton_engine_grammar_lookups": MetricInfo(
        "counter", "Grammars that requests asked for.", {"result": ("hit", "miss")}
    ),
    "baton_engine_grammar_compile_seconds": MetricInfo(
        "histogram",
        "Compilations of grammars.",
        {"result": ("compiled", "refused", "failed")},
        buckets=buckets_between(0.001, 50.0),
    ),
}

_FROM_LOAD: dict[str, MetricInfo] = {
    "baton_engine_running_sequences": MetricInfo("gauge", "Sequences in the running batch."),
    "baton_engine_waiting_requests": MetricInfo(
        "gauge", "Requests that do not run yet.", {"reason": WAITS}
    ),
    "baton_engine_queued_prompt_tokens": MetricInfo(
        "gauge", "Tokens still to compute for prompts of running and waiting requests."
    ),
    "baton_engine_draining": MetricInfo("gauge", "1 if new requests are refused, else 0."),
    "baton_engine_stalled": MetricInfo(
        "gauge", "1 while a step takes much longer than such steps have taken, else 0."
    ),
    "baton_engine_kv_blocks": MetricInfo("gauge", "KV blocks in the pool."),
    "baton_engine_used_kv_blocks": MetricInfo("gauge", "KV blocks that requests hold."),
    "baton_engine_cached_kv_blocks": MetricInfo("gauge", "KV blocks in the prefix cache."),
    "baton_engine_swapped_kv_blocks": MetricInfo("gauge", "KV blocks swapped to the host."),
    "baton_engine_prefix_cache_queries": MetricInfo(
        "counter", "Tokens looked up in the prefix cache."
    ),
    "baton_engine_prefix_cache_hits": MetricInfo("counter", "Tokens found in the prefix cache."),
    "baton_engine_preemptions": MetricInfo(
        "counter", "Running requests that were preempted.", {"kind": ("recompute", "swap")}
    ),
    "baton_engine_state_slots": MetricInfo(
        "gauge", "Slots for the states of recurrent layers; 0 for a model without."
    ),
    "baton_engine_used_state_slots": MetricInfo("gauge", "Slots that requests hold."),
    "baton_engine_cached_state_slots": MetricInfo("gauge", "Slots in the prefix cache."),
    "baton_engine_state_ends": MetricInfo(
        "counter",
        "Ends of blocks at which a state was worth keeping; without a free slot it was not kept.",
        {"result": ("kept", "skipped")},
    ),
    "baton_engine_state_hits": MetricInfo(
        "counter", "Sequences that began at a state of the prefix cache."
    ),
    "baton_engine_state_lost_tokens": MetricInfo(
        "counter",
        "Tokens computed again though their KV was in the prefix cache, as no state was at their "
        "end.",
    ),
}

_FROM_RANKS: dict[str, MetricInfo] = {
    "baton_engine_rank_step_seconds": MetricInfo(
        "counter", "Time of another rank in steps, with its waits for others.", {"rank": None}
    ),
    "baton_engine_rank_idle_seconds": MetricInfo(
        "counter", "Time of another rank between steps.", {"rank": None}
    ),
    "baton_engine_rank_cpu_seconds": MetricInfo(
        "counter", "Processor time of another rank's process.", {"rank": None}
    ),
    "baton_engine_rank_resident_bytes": MetricInfo(
        "gauge", "Memory of another rank's process.", {"rank": None}
    ),
}

METRICS: dict[str, MetricInfo] = {
    **_COUNTED,
    **_FROM_LOAD,
    **_FROM_RANKS,
    "baton_engine_info": MetricInfo(
        "gauge", "1; the labels describe the engine.", {"model": None, "role": None}
    ),
}

_token_ids_of = attrgetter("token_ids")


@dataclass(frozen=True, slots=True)
class RankReport:
    """Time and memory that a rank other than 0 has used since it started.

    Attributes:
        rank: its number.
        step_s: seconds in steps, with the waits for other ranks' parts.
        idle_s: seconds between steps.
        cpu_s: processor seconds of its process.
        resident_bytes: memory of its process now.
    """

    rank: int
    step_s: float
    idle_s: float
    cpu_s: float
    resident_bytes: int


class EngineMetrics:
    """The metrics that the engine counts itself. Thread-safe."""

    def __init__(self) -> None:
        self._metrics = Metrics(_COUNTED)
        self._gaps: Counter[float] = Counter()
        self._of_ranks: dict[Series, float] = {}

    def snapshot(self) -> Snapshot:
        """Returns the metrics as of now."""
        values, histograms = self._metrics.snapshot()
        return Snapshot(values | self._of_ranks, histograms)

    def rank_reported(self, report: RankReport) -> None:
        """Stores what another rank has reported."""
        rank = str(report.rank)
        self._of_ranks.update(
            {
                ("baton_engine_rank_step_seconds", rank): report.step_s,
                ("baton_engine_rank_idle_seconds", rank): report.idle_s,
                ("baton_engine_rank_cpu_seconds", rank): report.cpu_s,
                ("baton_engine_rank_resident_bytes", rank): report.resident_bytes,
            }
        )

    # Requests.

    def admitted(
        self, num_prompt: int, num_local: int, num_loaded: int, *, is_pulled: bool = False
    ) -> None:
        """Counts a request that is admitted for the first time.

        Args:
            num_prompt: tokens in its prompt.
            num_local: those found in the prefix cache.
            num_loaded: those loaded through the connector.
            is_pulled: whether they come from another replica's prefix cache.
        """
        self._metrics.add("baton_engine_prompt_tokens", num_prompt)
        self._metrics.add("baton_engine_cached_prompt_tokens", num_local, "local")
        source = "pulled" if is_pulled else "loaded"
        self._metrics.add("baton_engine_cached_prompt_tokens", num_loaded, source)

    def first_token(
        self, arrived_at: float, loaded_at: float | None, scheduled_at: float, now: float
    ) -> None:
        """Counts the stages of a request that draws its first token.

        Args:
            arrived_at: when it arrived.
            loaded_at: when its load ended; None if it loaded nothing.
            scheduled_at: when its first step began.
            now: when the token was drawn.
        """
        observe = self._metrics.observe
        if loaded_at is not None:
            observe("baton_engine_load_seconds", loaded_at - arrived_at)
        queued_at = arrived_at if loaded_at is None else loaded_at
        observe("baton_engine_queue_seconds", scheduled_at - queued_at)
        observe("baton_engine_prefill_seconds", now - scheduled_at)
        observe("baton_engine_first_token_seconds", now - arrived_at)

    def request_ended(self, reason: FinishReason, seconds: float) -> None:
        """Counts a request that has ended, `seconds` after its arrival."""
        self._metrics.add("baton_engine_requests", 1, reason.value)
        self._metrics.observe("baton_engine_request_seconds", seconds)

    def outputs_made(self, outputs: Iterable[EngineOutput]) -> None:
        """Counts the tokens of outputs."""
        self._metrics.add(
            "baton_engine_generated_tokens", sum(map(len, map(_token_ids_of, outputs)))
        )

    # Steps.

    def step_limited(self, seconds: float) -> None:
        """Notes how long the next step may take; 0 without a bound."""
        self._metrics.set("baton_engine_step_limit_seconds", seconds)

    def step_scheduled(self, batch: ScheduledBatch, num_ruled: int) -> None:
        """Counts a step's rows.

        Args:
            batch: the step.
            num_ruled: rows with logit rules among its decode rows.
        """
        metrics, num_rows = self._metrics, len(batch.chunks) + len(batch.decode_rows)
        metrics.observe("baton_engine_step_rows", num_rows)
        metrics.observe("baton_engine_step_tokens", batch.num_tokens)
        if batch.chunks:
            num_ruled += sum([chunk.rules is not None for chunk in batch.chunks])
            if num_masked := sum([chunk.mask is not None for chunk in batch.chunks]):
                metrics.add("baton_engine_constrained_rows", num_masked)
        if num_ruled:
            metrics.add("baton_engine_ruled_rows", num_ruled)

    def decoded(self, seconds: float, num_rows: int) -> None:
        """Counts the time since the previous step for all sequences that decoded in both."""
        if num_rows:
            self._metrics.observe("baton_engine_inter_token_seconds", seconds, count=num_rows)

    def drafted(self, num_drafts: int, num_accepted: int) -> None:
        """Counts the drafts of a sequence that a step has checked."""
        add, observe = self._metrics.add, self._metrics.observe
        add("baton_engine_draft_tokens", num_accepted, "accepted")
        add("baton_engine_draft_tokens", num_drafts - num_accepted, "rejected")
        observe("baton_engine_accepted_drafts", num_accepted)

    def drew(self, seconds: float, num_tokens: int) -> None:
        """Counts tokens that a sequence drew with a chunk, `seconds` after the one before.

        They are counted at the next `step_committed`, with those of other sequences.
        """
        self._gaps[seconds / num_tokens] += num_tokens

    def step_committed(self) -> None:
        """Counts what `drew` has collected: most sequences drew in the same step before, too."""
        for seconds, count in self._gaps.items():
            self._metrics.observe("baton_engine_inter_token_seconds", seconds, count=count)
        self._gaps.clear()

    def step_timed(self, spent: dict[Phase, float]) -> None:
        """Counts the seconds that the phases of a step took."""
        for phase, seconds in spent.items():
            self._metrics.observe("baton_engine_step_seconds", seconds, phase)

    def step_failed(self) -> None:
        """Counts a step that raised an error."""
        self._metrics.add("baton_engine_failed_steps")

    def request_retried(self, result: Literal["passed", "failed"]) -> None:
        """Counts a request that was tried alone."""
        self._metrics.add("baton_engine_retried_requests", 1, result)

    # Grammars.

    def grammar_looked_up(self, *, found: bool) -> None:
        """Counts a grammar that a request asks for.

        Args:
            found: whether it is compiled, is being compiled, or was refused before.
        """
        self._metrics.add("baton_engine_grammar_lookups", 1, "hit" if found else "miss")

    def grammar_compiled(
        self, seconds: float, result: Literal["compiled", "refused", "failed"]
    ) -> None:
        """Counts a compilation that has ended."""
        self._metrics.observe("baton_engine_grammar_compile_seconds", seconds, result)


class StepTimer:
    """Splits the time of each step into phases.

    Args:
        metrics: counts the phases.
        clock: monotonic seconds.

    Attributes:
        on_step: called with the seconds of each phase at the end of each step that has executed
            anything; None to call nothing.
    """

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float]) -> None:
        self.on_step: Callable[[Mapping[Phase, float]], None] | None = None
        self._metrics = metrics
        self._clock = clock
        self._at = 0.0
        self._spent: dict[Phase, float] = {}

    def start(self) -> None:
        """Begins a step."""
        self._spent.clear()
        self._at = self._clock()

    def end_phase(self, phase: Phase) -> None:
        """Counts the time since the last call for a phase; a step may have several parts of it."""
        now = self._clock()
        self._spent[phase] = self._spent.get(phase, 0.0) + now - self._at
        self._at = now

    def end(self) -> None:
        """Ends the step, which is counted if it has executed anything."""
        if "execute" in self._spent:
            self._metrics.step_timed(self._spent)
            if self.on_step is not None:
                self.on_step(dict(self._spent))
