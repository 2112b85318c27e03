"""`Sequence`: one request as the scheduler sees it. Mutable, scheduler-owned. Pure."""

from dataclasses import dataclass, field
from enum import Enum

from engine.batch import ScheduledSequence
from engine.request import EngineRequest, FinishReason, StageTimings
from kvstore.block_key import BlockKeyChain
from kvstore.handoff import KvHandoff

__all__ = ["Sequence", "SequenceState"]


class SequenceState(Enum):
    """Where a sequence stands.

    WAITING -> (LOADING ->) RUNNING -> (SAVING ->) FINISHED; preemption and a
    failed load lead back to WAITING.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    SAVING = "saving"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens, blocks and progress.

    Attributes:
        request: what was asked.
        arrival: admission number; earlier is served first among equals.
        keys: keys of the full blocks of `token_ids`.
        token_ids: the prompt and all tokens generated, here or before.
        num_computed: tokens whose KV is in `block_ids`.
        block_ids: block table; covers `num_computed` tokens at least.
        num_registered: leading blocks offered to the prefix cache.
        num_cached: prompt tokens found or loaded at first admission.
        num_saved: leading blocks that a save job or the store already has.
        lookup_job: the connector's look-up for it, open or answered.
        load_job: the load under way, in state LOADING.
        pending_saves: save jobs under way.
        save_failed: a save job did not commit.
        is_poisoned: its KV is not finite and must not be used by anybody.
        may_load: whether the connector may still be asked for this sequence.
        pending_handoff: the request's handoff until its load has started.
        handoff: the handoff that this sequence's prefill makes.
        reported: whether an output with timings has been sent.
    """

    request: EngineRequest
    arrival: int
    keys: BlockKeyChain
    arrived_at: float
    token_ids: list[int] = field(init=False)
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_registered: int = 0
    num_cached: int | None = None
    num_saved: int = 0
    lookup_job: int | None = None
    load_job: int | None = None
    pending_saves: set[int] = field(default_factory=set)
    save_failed: bool = False
    is_poisoned: bool = False
    may_load: bool = True
    pending_handoff: KvHandoff | None = field(init=False)
    handoff: KvHandoff | None = None
    reported: bool = False
    scheduled_at: float | None = None
    loaded_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids]
        self.keys.extend(self.token_ids)
        self.pending_handoff = self.request.handoff

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def order(self) -> tuple[int, int]:
        """Sorts sequences: higher priority first, then earlier arrival."""
        return (-self.request.priority, self.arrival)

    @property
    def num_prompt(self) -> int:
        """Tokens in the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Tokens generated, here or before."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens that must still run before the next one can be drawn."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_queued_prompt(self) -> int:
        """Prompt tokens still to compute, for load reports."""
        return max(0, self.num_prompt - self.num_computed)

    def share_of_step(self, num_tokens: int) -> ScheduledSequence:
        """The next `num_tokens` tokens, as the runner takes them."""
        end = self.num_computed + num_tokens
        draws = end == len(self.token_ids)
        return ScheduledSequence(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids[self.num_computed : end]),
            start_position=self.num_computed,
            block_table=tuple(self.block_ids),
            draw=self.request.draw if draws else None,
        )

    def finish_reason(self, max_model_len: int, *, hands_over: bool) -> FinishReason | None:
        """Whether the newest token ends the sequence, and why."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return FinishReason.STOP
        if self.num_output >= self.request.max_tokens or len(self.token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return FinishReason.HANDOFF if hands_over else None

    def timings(self, now: float) -> StageTimings:
        """Where the time went so far. Stages not passed are 0."""

        def between(start: float | None, end: float | None) -> float:
            return max(0.0, end - start) * 1000 if start is not None and end is not None else 0.0

        return StageTimings(
            queue_ms=between(self.loaded_at or self.arrived_at, self.scheduled_at),
            prefill_ms=between(self.scheduled_at, self.first_token_at),
            transfer_ms=between(
                self.first_token_at, now if self.state is SequenceState.SAVING else None
            ),
            load_ms=between(self.arrived_at, self.loaded_at),
        )
