"""`SequenceGroup` and `Sequence`: a request and its candidates as the scheduler sees them. Pure.

A request is a group of sequences, its candidates or beams, over one prompt. While the prompt is
computed, one *root* sequence stands for all of them; then they are forked from it. So the KV of
the prompt is computed and held once. After a preemption the root computes what the candidates
have in common, and each candidate computes the rest. A request with one candidate has no root.

Both classes are mutable; only the scheduler and its parts change them.
"""

from collections import abc
from dataclasses import dataclass, field
from enum import Enum

from engine.batch import TokenLogprobs
from engine.constraints.guide import Guide
from engine.draw_params import DrawParams
from engine.groups.beam_search import BeamSearch
from engine.groups.states import DraftState, GroupTimes, GroupTransfer, new_handoff_id
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.host_pool import SwappedTables
from engine.request import EngineRequest, FinishReason, StageTimings
from kvstore.block_key import BlockKeyChain

__all__ = [
    "NO_ROW",
    "FinishedCandidate",
    "GroupState",
    "Sequence",
    "SequenceGroup",
    "order_of",
]

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """A candidate, or the root: what the candidates have in common.

    Attributes:
        group: the request.
        index: the candidate's number.
        token_ids: the prompt and all generated tokens, from this engine or from the one before.
        keys: keys of the full transfer blocks and the full pool blocks of `token_ids`.
        stop_token_ids: tokens that end it.
        limit: the length at which it ends.
        is_streamed: whether outputs carry its tokens as they are drawn.
        table: its blocks; None while it has none.
        row: its slot in the runner, or `NO_ROW`.
        is_row_new: whether the runner still needs the whole block tables for the row.
        num_computed: tokens whose KV is in the blocks. Only chunks keep it up to date; while the
            sequence decodes, `count_computed` brings it up to date.
        num_scheduled: `num_computed` and the tokens of steps in flight; `DecodeSet` counts them
            while the sequence decodes.
        logprob: sum of the generated tokens' log-probabilities, if candidates are ranked.
        token_logprobs: one per generated token, if candidates are ranked and the request asks
            for them.
        draws: how its next token is drawn; None until the first chunk that draws one.
        guide: what may follow it; None if every token may. With a guide it does not decode: each
            of its steps is a chunk of known tokens.
        num_saved: leading blocks that its save jobs cover; see `engine.kv_transfer.saves`.
        is_given_up: whether it ends as soon as its KV is back from the host.
        token_at: clock time of its newest token; not up to date while it decodes.
        drafts: the state of its drafts; None before the first.
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
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)
    draws: tuple[DrawParams, ...] | None = None
    guide: Guide | None = None
    num_saved: int = 0
    is_given_up: bool = False
    token_at: float | None = None
    drafts: DraftState | None = None
    due: int = -1
    offset: int = 0

    @property
    def num_unscheduled(self) -> int:
        """Known tokens that no step has computed or is computing."""
        return len(self.token_ids) - self.num_scheduled

    @property
    def has_rules(self) -> bool:
        """Whether its next token is drawn by logit rules, once it has drawn one."""
        return any(draw.rules is not None for draw in (self.draws or ())[:1])

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the newest token ends it; None if it goes on."""
        is_complete = self.guide is not None and self.guide.is_complete
        if is_complete or self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.group.max_len else None

    def count_computed(self) -> None:
        """Updates `num_computed` of a sequence that decodes: all tokens but the last are computed.

        While the chunk before its first decode step is still in flight, nothing changes.
        """
        if self.num_computed >= self.num_scheduled:
            self.num_computed = len(self.token_ids) - 1

    def settle(self) -> None:
        """Stops decoding. Tokens that a step in flight computes will be computed again."""
        self.count_computed()
        self.num_scheduled = self.num_computed

    def restart(self) -> None:
        """Forgets the table and all that is computed."""
        self.table = None
        self.num_computed = self.num_scheduled = 0


@dataclass(frozen=True, slots=True)
class FinishedCandidate:
    """A ranked candidate that has ended; the best `score` is returned first."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason
    token_logprobs: tuple[TokenLogprobs, ...] = ()


_ROOT = -1


class GroupState(Enum):
    """A group's place in its life.

    NEW -> (COMPILING ->) WAITING -> (LOADING ->) RUNNING -> (SAVING ->) FINISHED. A group in NEW is
    in no queue. A group waits for its grammar in COMPILING. Preemption leads back to WAITING, or to
    SWAPPED, in which the group waits with its KV on the host. A failed load leads back to WAITING.
    """

    NEW = "new"
    COMPILING = "compiling"
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
        request: the request as it was added.
        order: sorts groups, the most important first; ends with the arrival number.
        keys: an empty chain of block keys; each sequence starts with a copy.
        max_len: the most prompt and generated tokens of one candidate.
        times: when it passed its stages.
        state: its place in its life.
        root: computes what the candidates have in common; None once they run themselves.
        branches: the candidates, or beams, that have not ended.
        beams: the beam search; None for other requests.
        beam_tops: most likely next tokens of beams that have reported in this round.
        finished: ranked candidates that have ended.
        num_held_seats: seats that it occupies since admission.
        stopped_at: the newest step when it was last stopped; until that step has reported, steps
            in flight draw tokens for it.
        num_overtaken: groups that were admitted before it because it lacked seats.
        swapped: its KV on the host, in state SWAPPED.
        is_returning: whether a step in flight copies its KV back from the host.
        num_cached: prompt tokens found in the cache or loaded at first admission.
        num_matched: leading blocks that its lead found in the prefix cache at admission.
        left_keys: keys of blocks that its candidates left in the prefix cache.
        transfer: what it looks up, loads, saves and hands over.
    """

    request: EngineRequest
    order: tuple[float, int]
    keys: BlockKeyChain
    max_len: int
    times: GroupTimes
    state: GroupState = GroupState.NEW
    root: Sequence | None = None
    branches: list[Sequence] = field(default_factory=list)
    beams: BeamSearch | None = None
    beam_tops: dict[Sequence, list[tuple[int, float]]] = field(default_factory=dict)
    finished: list[FinishedCandidate] = field(default_factory=list)
    num_held_seats: int = 0
    stopped_at: int = 0
    num_overtaken: int = 0
    swapped: SwappedTables | None = None
    is_returning: bool = False
    num_cached: int | None = None
    num_matched: int = 0
    left_keys: set[bytes] = field(default_factory=set)
    transfer: GroupTransfer = field(init=False)

    def __post_init__(self) -> None:
        self.transfer = GroupTransfer(
            pending_handoff=self.request.handoff or self.request.prefix,
            handoff_id=new_handoff_id() if self.hands_over else "",
            may_load=not (self.owes_prompt_logprobs or self.request.skips_lookup),
        )
        for progress in self.request.progress:
            self.branches.append(self.new_branch(progress.index, progress.output_token_ids))
            self.branches[-1].logprob = progress.logprob
            self.branches[-1].token_logprobs += progress.token_logprobs
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
    def hands_over(self) -> bool:
        """Whether this engine computes only the prompt and one token."""
        return self.request.hands_over

    @property
    def arrival(self) -> int:
        """Number of requests that arrived before it."""
        return self.order[1]

    @property
    def num_prompt(self) -> int:
        """Tokens in the prompt."""
        return len(self.request.spec.prompt_token_ids)

    @property
    def is_pulled(self) -> bool:
        """Whether another engine lends the beginning of its prompt."""
        return self.request.handoff is None and self.request.prefix is not None

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are still to be computed.

        Until then its lead computes the whole prompt, without KV from caches or stores.
        """
        is_asked = self.request.spec.params.prompt_logprobs is not None
        return is_asked and not self.request.has_begun and self.times.first_token_at is None

    @property
    def num_seats(self) -> int:
        """The most sequences that run at once."""
        if self.hands_over:
            return 1
        if self.beams is None and self.branches:
            return len(self.branches)
        return self.request.spec.params.num_candidates

    @property
    def lead(self) -> Sequence:
        """The sequence that computes the prompt: the root, or the first candidate."""
        return self.root or self.branches[0]

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have blocks, or get them at admission."""
        return [self.root] if self.root else self.branches

    @property
    def num_queued_prompt(self) -> int:
        """Prompt tokens that are not computed yet, for load reports."""
        return max(0, self.num_prompt - self.lead.num_computed)

    def new_branch(self, index: int, output_token_ids: tuple[int, ...] = ()) -> Sequence:
        """Returns a candidate without blocks."""
        return self._new_sequence(index, [*self.request.spec.prompt_token_ids, *output_token_ids])

    def fork_of(self, parent: Sequence, index: int) -> Sequence:
        """Returns a candidate with the parent's tokens. The caller adds a row and shared blocks."""
        child = self._new_sequence(index, parent.token_ids.copy(), parent.keys.copy())
        child.logprob = parent.logprob
        child.guide = None if parent.guide is None else parent.guide.fork()
        child.num_saved = parent.num_saved
        return child

    def make_root(self) -> None:
        """Chooses what computes next, while no sequence has blocks.

        A root computes what several candidates have in common; a single candidate needs none.
        """
        before, self.root = self.root, None
        if len(self.branches) == 1:
            return
        if self.branches:
            # Each candidate must compute at least its last token itself, to draw the next one.
            token_lists = [branch.token_ids for branch in self.branches]
            shortest = min(map(len, token_lists))
            num_shared = _common_length(token_lists, shortest - 1)
            self.root = self._new_sequence(_ROOT, token_lists[0][:num_shared])
        elif self.request.spec.params.num_candidates == 1 and self.beams is None:
            self.branches = [self.new_branch(0)]
        else:
            guide = None if before is None else before.guide
            self.root = self._new_sequence(_ROOT, list(self.request.spec.prompt_token_ids))
            self.root.guide = guide

    def draws_of(self, sequence: Sequence) -> tuple[DrawParams, ...]:
        """Returns how to draw the tokens that follow the sequence's known ones."""
        if self.beams is not None:
            return ()
        spec = self.request.spec
        if sequence is not self.root:
            if sequence.draws is None:
                sequence.draws = DrawParams.of_candidates(spec, (sequence.index,))
            return sequence.draws
        if self.branches:
            return ()
        return DrawParams.of_candidates(spec, range(spec.params.num_candidates))

    def num_top_of(self, sequence: Sequence) -> int:
        """Returns how many most likely next tokens a beam search needs there."""
        if self.beams is None or (sequence is self.root and self.root_is_followed):
            return 0
        return self.beams.num_top

    @property
    def root_is_followed(self) -> bool:
        """Whether the tokens after the root are known, so that none must be drawn."""
        return bool(self.branches or self.request.first_beams)

    def held_blocks(self) -> abc.Iterator[int]:
        """Returns one entry per block reference of its sequences."""
        for sequence in self.running:
            if sequence.table is not None:
                yield from sequence.table.held()

    def timings(self, now: float) -> StageTimings:
        """Returns the time spent in each stage so far; 0 for stages not passed."""
        return self.times.timings(
            now,
            hands_over=self.hands_over,
            is_saving=self.state is GroupState.SAVING,
            computes_prompt=self.num_prompt - (self.num_cached or 0) > 1,
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


def order_of(group: SequenceGroup) -> tuple[float, int]:
    """Returns the key to sort groups by, the most important first."""
    return group.order


def _common_length(token_lists: abc.Sequence[list[int]], limit: int) -> int:
    """Returns how many leading tokens all lists share, up to `limit`."""
    # The smallest and the largest list differ first: all lists share what these two share.
    first, last = min(token_lists), max(token_lists)
    return next((i for i in range(limit) if first[i] != last[i]), limit)
