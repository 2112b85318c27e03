"""`SequenceGroup`: a request as the scheduler sees it. Mutable, the scheduler's own. Pure.

A request is a group of sequences, its candidates or beams, over one prompt.
While the prompt is computed, a *root* stands for all of them; then they are
forked from it. So the prompt's KV is computed and held once. The same way
leads back from preemption: what the candidates have in common is computed in
the root, the rest in each. A request of one candidate has no root.

`Sequence`: a candidate, or what candidates have in common, as the scheduler sees it. Pure.

Mutable; only the scheduler and what belongs to it touch it.
"""

import uuid
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from enum import Enum

from engine.batch import DrawParams
from engine.beam_search import BeamSearch
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.host_pool import SwappedTables
from engine.request import EngineRequest, FinishReason, StageTimings
from kvstore.block_key import BlockKeyChain
from kvstore.handoff import KvHandoff

__all__ = [
    "NO_ROW",
    "FinishedCandidate",
    "GroupState",
    "Sequence",
    "SequenceGroup",
    "new_handoff_id",
    "order_of",
]

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and blocks of a candidate, or of what candidates have in common.

    Attributes:
        group: its request.
        index: the candidate's number.
        token_ids: the prompt and all tokens generated, here or before.
        keys: keys of the full transfer blocks, and of the full blocks, of `token_ids`.
        stop_token_ids: ids that end it.
        limit: it draws no token beyond this length.
        table: its blocks; None while it has none.
        row: the runner's slot for it, or `NO_ROW`.
        is_row_new: the runner does not know its block tables yet.
        num_computed: tokens whose KV is in the blocks. Kept up to date by
            chunks alone: while a sequence decodes, see `count_computed`.
        num_scheduled: these, and the tokens of steps in flight; see `DecodeSet`.
        logprob: sum of the generated tokens' log-probabilities, if asked for.
        is_streamed: its tokens are told as they come.
        num_saved: leading blocks that were published; see `engine.kv_transfer.saves`.
        is_given_up: nobody wants it any more; it ends when it is back from the host.
        due: the step at which `DecodeSet` looks at it next.
        offset: `num_scheduled` minus the step number while it decodes.
    """

    group: "SequenceGroup"
    index: int
    token_ids: list[int]
    keys: BlockKeyChain
    stop_token_ids: frozenset[int]
    limit: int
    is_streamed: bool
    table: BlockTable | None = None
    row: int = NO_ROW
    is_row_new: bool = True
    num_computed: int = 0
    num_scheduled: int = 0
    logprob: float = 0.0
    num_saved: int = 0
    is_given_up: bool = False
    due: int = -1
    offset: int = 0

    @property
    def num_unscheduled(self) -> int:
        """Known tokens that no step has run or runs."""
        return len(self.token_ids) - self.num_scheduled

    def count_computed(self) -> None:
        """Counts what is computed of a sequence that decodes: all but the token drawn last,
        unless the chunk that it began with is still in flight.
        """
        if self.num_computed >= self.num_scheduled:
            self.num_computed = len(self.token_ids) - 1

    def settle(self) -> None:
        """The sequence decodes no more. What a step in flight computes of it is forgotten,
        and computed again.
        """
        self.count_computed()
        self.num_scheduled = self.num_computed

    def restart(self) -> None:
        """Nothing is computed any more."""
        self.table = None
        self.num_computed = self.num_scheduled = 0


@dataclass(frozen=True, slots=True)
class FinishedCandidate:
    """A ranked candidate that has ended; `score` is what it is ranked by."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason


_ROOT = -1


class GroupState(Enum):
    """Where a group stands.

    WAITING -> (LOADING ->) RUNNING -> (SAVING ->) FINISHED. Preemption leads
    back to WAITING, or to SWAPPED, which waits with its KV on the host; a failed
    load leads back to WAITING.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    SWAPPED = "swapped"
    SAVING = "saving"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request's candidates and progress.

    Attributes:
        request: what was asked.
        arrival: admission number; earlier is served first among equals.
        order: sorts groups, the most important first.
        keys: an empty chain of block keys, for its sequences to copy.
        max_len: prompt and generated tokens of one candidate, at most.
        hands_over: this engine computes the prompt and one token alone.
        arrived_at: clock time of arrival.
        root: runs what the candidates have in common; None once they run themselves.
        branches: the candidates, or beams, that have not ended.
        beams: beam search's bookkeeping.
        beam_tops: what running beams have reported since the last advance.
        finished: ranked candidates that have ended.
        num_held_seats: seats taken since admission.
        swapped: its KV on the host, in state SWAPPED.
        is_returning: a step that is not over brings its KV back from the host.
        num_cached: prompt tokens found or loaded at first admission.
        num_matched: leading blocks that its lead found in the prefix cache.
        num_saved: leading blocks of the prompt that a save job or the store already has.
        num_told: leading blocks that others were told to be saved.
        published: keys of all objects that its save jobs were for, of whichever sequence.
        left_keys: keys of the blocks that candidates left in the prefix cache, of several.
        lookup_job: the connector's look-up for it, open or answered.
        load_job: the load under way, in state LOADING.
        pending_saves: save jobs under way, in order, each with its first block's index.
        save_failed: a save job did not commit.
        save_times: when its save jobs started and ended, if it hands over.
        is_poisoned: its KV is not finite and must not be used by anybody.
        may_load: whether the connector may still be asked for it.
        pending_handoff: the request's handoff until its load has started.
        kept_handoff: id of the handoff whose lease is renewed for it.
        handoff_id: names the handoff that this group's prefill makes; empty where it makes none.
            It is another one after a preemption that took back what was saved for it.
        handoff: that handoff.
        is_handed_over: it was told.
        is_abandoned: it never will be.
        reported: whether an output with timings has been sent.
    """

    request: EngineRequest
    arrival: int
    order: tuple[float, int]
    keys: BlockKeyChain
    max_len: int
    hands_over: bool
    arrived_at: float
    state: GroupState = GroupState.WAITING
    root: Sequence | None = None
    branches: list[Sequence] = field(default_factory=list)
    beams: BeamSearch | None = None
    beam_tops: dict[Sequence, list[tuple[int, float]]] = field(default_factory=dict)
    finished: list[FinishedCandidate] = field(default_factory=list)
    num_held_seats: int = 0
    swapped: SwappedTables | None = None
    is_returning: bool = False
    num_cached: int | None = None
    num_matched: int = 0
    num_saved: int = 0
    num_told: int = 0
    published: list[bytes] = field(default_factory=list)
    left_keys: set[bytes] = field(default_factory=set)
    lookup_job: int | None = None
    load_job: int | None = None
    pending_saves: dict[int, int] = field(default_factory=dict)
    save_failed: bool = False
    save_times: list[tuple[float, float]] = field(default_factory=list)
    is_poisoned: bool = False
    may_load: bool = True
    pending_handoff: KvHandoff | None = None
    kept_handoff: str | None = None
    handoff_id: str = ""
    handoff: KvHandoff | None = None
    is_handed_over: bool = False
    is_abandoned: bool = False
    reported: bool = False
    scheduled_at: float | None = None
    loaded_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.pending_handoff = self.request.handoff
        if self.hands_over:
            self.handoff_id = new_handoff_id()
        for progress in self.request.progress:
            self.branches.append(self.new_branch(progress.index, progress.output_token_ids))
            self.branches[-1].logprob = progress.logprob
        if self.request.spec.params.beam_width is not None:
            self.beams = BeamSearch(
                self.request.spec.params,
                stop_token_ids=self.request.spec.stop_token_ids,
                max_tokens=self.max_len - self.num_prompt,
            )
        self.make_root()

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.spec.request_id

    @property
    def num_prompt(self) -> int:
        """Tokens in the prompt."""
        return len(self.request.spec.prompt_token_ids)

    @property
    def num_seats(self) -> int:
        """Sequences that may run at once."""
        if self.hands_over:
            return 1
        if self.beams is None and self.branches:
            return len(self.branches)
        return self.request.spec.params.num_candidates

    @property
    def lead(self) -> Sequence:
        """The sequence that has the prompt: the root, or the first candidate."""
        return self.root or self.branches[0]

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have, or will next get, blocks."""
        return [self.root] if self.root else self.branches

    @property
    def num_queued_prompt(self) -> int:
        """Prompt tokens still to compute, for load reports."""
        return max(0, self.num_prompt - self.lead.num_computed)

    def new_branch(self, index: int, output_token_ids: tuple[int, ...] = ()) -> Sequence:
        """A candidate without blocks."""
        return self._new_sequence(index, [*self.request.spec.prompt_token_ids, *output_token_ids])

    def fork_of(self, parent: Sequence, index: int) -> Sequence:
        """A candidate with the parent's tokens, and nothing computed: what is shared of the
        parent's KV is the caller's to give, with a row.
        """
        child = self._new_sequence(index, parent.token_ids.copy(), parent.keys.copy())
        child.logprob = parent.logprob
        child.num_saved = parent.num_saved
        return child

    def make_root(self) -> None:
        """Sets what computes next: a root for what several candidates have in common, or
        the only candidate itself. No sequence has blocks.
        """
        self.root = None
        if len(self.branches) == 1:
            return
        if self.branches:
            # Each candidate has a token of its own left to compute, to draw the next from.
            token_lists = [branch.token_ids for branch in self.branches]
            shortest = min(map(len, token_lists))
            num_shared = _common_length(token_lists, shortest - 1)
            self.root = self._new_sequence(_ROOT, token_lists[0][:num_shared])
        elif self.request.spec.params.num_candidates == 1 and self.beams is None:
            self.branches = [self.new_branch(0)]
        else:
            self.root = self._new_sequence(_ROOT, list(self.request.spec.prompt_token_ids))

    def draws_of(self, sequence: Sequence) -> tuple[DrawParams, ...]:
        """How tokens are drawn once all of the sequence's tokens are computed."""
        if self.beams is not None:
            return ()
        params = self.request.spec.params
        if sequence is not self.root:
            return (DrawParams.of_candidate(params, sequence.index),)
        if self.branches:
            return ()
        return tuple(DrawParams.of_candidate(params, i) for i in range(params.num_candidates))

    def num_top_of(self, sequence: Sequence) -> int:
        """How many most likely tokens are asked for then."""
        if self.beams is None or (sequence is self.root and self.root_is_followed):
            return 0
        return self.beams.num_top

    @property
    def root_is_followed(self) -> bool:
        """Whether what follows the root is known, so that it need draw nothing."""
        return bool(self.branches or self.request.first_beams)

    def finish_reason(self, token_ids: list[int]) -> FinishReason | None:
        """Whether the newest token ends a candidate, and why."""
        if token_ids[-1] in self.request.spec.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= self.max_len else None

    def held_blocks(self) -> Iterator[int]:
        """One entry per block reference of its sequences."""
        for sequence in self.running:
            if sequence.table is not None:
                yield from sequence.table.held()

    def timings(self, now: float) -> StageTimings:
        """Where the time went so far. Stages not passed are 0."""

        def between(start: float | None, end: float | None) -> float:
            return max(0.0, end - start) * 1000 if start is not None and end is not None else 0.0

        return StageTimings(
            queue_ms=between(self.loaded_at or self.arrived_at, self.scheduled_at),
            prefill_ms=between(self.scheduled_at, self.first_token_at),
            transfer_ms=between(
                self.first_token_at, now if self.state is GroupState.SAVING else None
            ),
            load_ms=between(self.arrived_at, self.loaded_at),
        )

    def _new_sequence(
        self, index: int, token_ids: list[int], keys: BlockKeyChain | None = None
    ) -> Sequence:
        return Sequence(
            group=self,
            index=index,
            token_ids=token_ids,
            keys=keys or self.keys.copy(),
            stop_token_ids=self.request.spec.stop_token_ids,
            limit=self.num_prompt + 1 if self.hands_over else self.max_len,
            is_streamed=not self.request.spec.params.is_ranked,
        )


def new_handoff_id() -> str:
    """An id that no handoff has."""
    return uuid.uuid4().hex


def order_of(group: SequenceGroup) -> tuple[float, int]:
    """Key to sort groups by, the most important first."""
    return group.order


def _common_length(token_lists: Sequences[list[int]], limit: int) -> int:
    """How many leading tokens all lists share, up to `limit`."""
    # All lists agree as far as the smallest and the largest do.
    first, last = min(token_lists), max(token_lists)
    return next((i for i in range(limit) if first[i] != last[i]), limit)
