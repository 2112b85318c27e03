"""`Drafts`: decides how many draft tokens sequences get. Pure.

A sequence with drafts runs a chunk in each step: its last token and the draft tokens. The step
draws a token after each, with the noise of its position, and keeps them as long as the draft tokens
are equal: the tokens are those of a sequence without drafts. `engine.batch.ScheduledChunk` has the
details. Draft tokens come from look-ups, or from a draft model or heads, which the runner runs
after a step for the next one.

How many draft tokens pay depends on the sequence and on the step: those of a sequence are right
with some probability p, and a step's time grows with its tokens. The draft token at place j adds a
token with probability p**j. So many are made as draw the most tokens per second, by the measured
times of steps.
"""

from collections.abc import Callable
from typing import NamedTuple

from engine.batch import DraftWork, ScheduledBatch
from engine.config import EngineConfig
from engine.groups.group import Sequence
from engine.groups.states import DraftState, TokenHistory
from engine.metrics.counts import EngineMetrics
from engine.runner import StepCosts
from engine.speculation.lookup import make_proposer

__all__ = ["Drafts", "may_draft"]

_KEPT_SHARE = 0.9  # of what was counted before, at each step with drafts
_FORGOTTEN_SHARE = 0.1  # of what was counted, at each block without drafts
_FORGETTING_STEPS = 16  # without drafts, of a sequence that cannot decode
_MAX_STEPS_WITHOUT = 8  # in which a sequence waits for a draft token before it decodes
# The most extra time of these steps together, as a share of a step that decodes.
_WAITING_SHARE = 0.4
_MIN_S = 1e-9
_FIRST_CHECKED = 2.0  # so many draft tokens count as checked at the start of a sequence
_FIRST_SHARE, _MIN_SHARE = 0.75, 0.5  # of right draft tokens: a new engine's, and the least assumed
_SHARE_RATE = 0.01  # weight of a draft token in the engine's share of right draft tokens
_MIN_GAIN = 1.05  # expected, as estimates are uncertain
_TIME_RATE = 0.1  # weight of a step in the mean time
_TRYING_RATE = 0.001  # by which steps without drafts bring the time of those with drafts nearer
_MAX_TIMED_TOKENS = 256  # steps with longer prompts say little about steps without


class _Plan(NamedTuple):
    """How many draft tokens of a sequence draw the most tokens per second.

    Attributes:
        num_drafts: their number; 0 if decoding draws more.
        saved_s: seconds per token that they save, as far as steps have been measured.
    """

    num_drafts: int
    saved_s: float


class Drafts:
    """The drafts of one engine's sequences.

    Args:
        config: the limits, and `speculative_config`.
        costs: measured times; `prompt_token_s` is that of one more token in a long step.
        metrics: counts drafts.
        clock: monotonic seconds.
        runs_again: whether accepted draft tokens run again with the next step, as those of a model
            with recurrent layers do.
    """

    def __init__(
        self,
        config: EngineConfig,
        costs: StepCosts,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        *,
        runs_again: bool = False,
    ) -> None:
        assert config.speculative_config is not None, "the engine drafts tokens"
        self._most = min(config.max_drafts, costs.max_proposals)
        self._block_size = config.block_size
        # Tokens that a sequence draws by decoding in the time of one with drafts, which runs again
        # only when its step has ended.
        self._num_decoded = config.max_open_steps / config.num_lanes
        self._proposer = make_proposer(config.speculative_config)
        self._reads_states = config.speculative_config.reads_states
        self._costs = costs
        # Seconds of a short step, less those of its tokens and of the draft model: of one in which
        # all sequences decode, and of one with drafts. None before the first.
        self._decoding_s: float | None = None
        self._drafting_s: float | None = None
        self._right_share = _FIRST_SHARE  # of draft tokens; what is assumed of a new sequence
        self._metrics = metrics
        self._clock = clock
        self._runs_again = runs_again
        self._num_rows = 1
        self._began_at = 0.0

    def scheduling_began(self) -> None:
        """Notes that the next step is about to be scheduled."""
        self._began_at = self._clock()

    def scheduled(self, num_rows: int) -> None:
        """Notes that a step with so many sequences was scheduled."""
        self._num_rows = max(1, num_rows)

    def committed(self, batch: ScheduledBatch) -> None:
        """Measures the time of a step that has been committed, with that of scheduling it: chunks
        take the scheduler longer than rows that decode.
        """
        step_s = self._clock() - self._began_at
        tokens_s = batch.num_tokens * self._costs.prompt_token_s
        if batch.num_tokens + batch.num_drafted_tokens > _MAX_TIMED_TOKENS or step_s <= 0:
            return
        fixed_s = max(0.0, step_s - tokens_s - self._costs.draft_s(batch))
        if batch.num_proposals or any(chunk.num_drafts for chunk in batch.chunks):
            if self._drafting_s is not None:  # a step of a new size is slower, as it is recorded
                fixed_s = min(fixed_s, 2 * self._drafting_s + tokens_s)
            self._drafting_s = _mean(self._drafting_s, fixed_s, _TIME_RATE)
        elif not batch.chunks:
            self._decoding_s = _mean(self._decoding_s, fixed_s, _TIME_RATE)
            if self._drafting_s is not None:  # else a few slow steps could end all drafts
                self._drafting_s = _mean(self._drafting_s, self._decoding_s, _TRYING_RATE)

    def draft(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Returns the draft tokens to check in this step.

        Args:
            sequence: a sequence whose next step runs its last token.
            limit: the most draft tokens.
        """
        state = self._state_of(sequence)
        state.num_steps_without += 1
        if state.num_steps_without % _FORGETTING_STEPS == 0:
            self._forget(state)  # a sequence with a grammar never decodes
        room = sequence.limit - len(sequence.token_ids) - 1  # one token is drawn in any case
        limit = min(limit, room, self._plan(state).num_drafts)
        return tuple(self._drafts(sequence, limit)) if limit > 0 else ()

    def num_proposals(self, sequence: Sequence, num_drafts: int) -> int:
        """Returns how many tokens a draft model should draft after this step.

        Args:
            sequence: a sequence whose step runs its last token.
            num_drafts: number of drafts in this step.
        """
        if self._proposer is not None:
            return 0
        state = self._state_of(sequence)
        state.history.updated(sequence.token_ids)
        if state.history.predicted(sequence.group.num_prompt, 1):
            return 0
        num_left = sequence.limit - len(sequence.token_ids)
        num_drafts_next, saved_s = self._plan(state)
        num_missing = sequence.num_scheduled - state.num_drafted
        if self._is_timed and num_missing * self._costs.draft_token_s > num_left * saved_s:
            return 0  # its tokens before this step would take the draft model too long
        # The step draws a token in any case, and the next one draws another one.
        return max(0, min(num_left - num_drafts - 2, num_drafts_next))

    def work(self, sequence: Sequence, num_proposals: int, budget: int) -> DraftWork | None:
        """Returns what the draft model does after this step; None if it does nothing.

        Args:
            sequence: as in `num_proposals`.
            num_proposals: number of tokens that it should draft.
            budget: the most known tokens that it may run.
        """
        if not num_proposals:
            return None
        end = sequence.num_scheduled
        first = min(self._state_of(sequence).num_drafted, end)
        if self._reads_states:
            return DraftWork(first, (), num_proposals)  # tokens before have no states
        if end - first > budget:
            num_proposals, end = 0, first + budget
            if budget >= self._block_size:
                end -= end % self._block_size  # so that the next tokens begin a block
            if end == first:
                return None
        token_ids = tuple(sequence.token_ids[first:end])
        return DraftWork(first, token_ids, num_proposals, sequence.group.request.spec.cache_salt)

    def worked(
        self, sequence: Sequence, work: DraftWork, proposals: tuple[int, ...], num_tokens: int
    ) -> None:
        """Takes what the draft model has done.

        Args:
            sequence: a sequence that goes on.
            work: what `work` has returned for the step.
            proposals: draft tokens after the first `num_tokens`.
            num_tokens: number of tokens of the sequence after the step's draws.
        """
        state = self._state_of(sequence)
        if not work.num_proposals:
            state.num_drafted = work.first + len(work.token_ids)
            return
        state.proposals, state.proposed_at = proposals, num_tokens
        state.num_drafted = num_tokens
        if not proposals:  # the draft model has failed
            state.num_checked += work.num_proposals

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether a sequence without drafts in this step should have the chance to get some in the
        next one, and so must not decode.
        """
        if self._proposer is None:
            return False  # the draft model was not asked
        state, most = self._state_of(sequence), float(_MAX_STEPS_WITHOUT)
        if self._decoding_s is not None and self._drafting_s is not None:
            lost_s = max(self._drafting_s - self._decoding_s, _MIN_S)
            most = min(most, _WAITING_SHARE * self._decoding_s / lost_s)
        return state.num_steps_without <= most and self._plan(state).num_drafts > 0

    def should_begin(self, sequence: Sequence) -> bool:
        """Whether a sequence that decodes should try drafts again; called once per block."""
        state = self._state_of(sequence)
        self._forget(state)
        if not may_draft(sequence) or not self._plan(state).num_drafts:
            return False
        begins = self._proposer is None or bool(self._drafts(sequence, 1))
        if begins:
            state.num_steps_without = 0
        return begins

    def checked(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Notes how many of a step's draft tokens were right, from the first one on."""
        state = self._state_of(sequence)
        num_checked = min(num_drafts, num_right + 1)
        state.num_steps_without = 0
        state.num_checked = _KEPT_SHARE * state.num_checked + num_checked
        state.num_right = _KEPT_SHARE * state.num_right + num_right
        share = self._right_share + _SHARE_RATE * (
            min(num_right, num_checked) - num_checked * self._right_share
        )
        self._right_share = min(max(share, _MIN_SHARE), _FIRST_SHARE)
        self._metrics.drafted(num_drafts, num_right)

    def sequence_ended(self, sequence: Sequence) -> None:
        """Keeps a sequence that has ended for draft tokens of later ones."""
        if self._proposer is not None and not _is_private(sequence):
            self._proposer.keep_answer(sequence.token_ids, sequence.group.num_prompt)

    def forget_answers(self) -> None:
        """Forgets the sequences that have ended."""
        if self._proposer is not None:
            self._proposer.forget_answers()

    def _drafts(self, sequence: Sequence, limit: int) -> list[int]:
        """Returns at most `limit` draft tokens: what the prediction says, what the draft model has
        proposed, or what a look-up finds.
        """
        state = self._state_of(sequence)
        tokens = state.history.updated(sequence.token_ids)
        predicted = state.history.predicted(sequence.group.num_prompt, limit)
        if predicted:
            return predicted
        if self._proposer is None:
            is_current = state.proposed_at == len(sequence.token_ids)
            return list(state.proposals[:limit]) if is_current else []
        return self._proposer.propose(tokens, limit, is_private=_is_private(sequence))

    def _forget(self, state: DraftState) -> None:
        """Brings the rate of right draft tokens nearer to that of a new sequence."""
        state.num_checked += _FORGOTTEN_SHARE * (_FIRST_CHECKED - state.num_checked)
        first_right = _FIRST_CHECKED * self._right_share
        state.num_right += _FORGOTTEN_SHARE * (first_right - state.num_right)

    def _state_of(self, sequence: Sequence) -> DraftState:
        if sequence.drafts is None:
            history = TokenHistory(sequence.group.request.spec.prediction_token_ids)
            first_right = _FIRST_CHECKED * self._right_share
            sequence.drafts = DraftState(history, _FIRST_CHECKED, first_right)
        return sequence.drafts

    @property
    def _is_timed(self) -> bool:
        return self._decoding_s is not None or self._drafting_s is not None

    def _plan(self, state: DraftState) -> _Plan:
        """Plans draft tokens for a step with as many sequences as the last one."""
        place_s, again_s, decoding_s, drafting_s = 0.0, 0.0, 1.0, 1.0  # if no step is measured
        if self._is_timed:
            tokens_s = self._num_rows * self._costs.prompt_token_s
            place_s = tokens_s + self._costs.proposal_s  # of one draft token of each sequence
            again_s = tokens_s if self._runs_again else 0.0  # of one that is accepted
            times = [each for each in (self._decoding_s, self._drafting_s) if each is not None]
            drafting_s = times[-1] + tokens_s
            # If it was measured long ago it may seem longer, which it cannot be.
            decoding_s = min(times) + tokens_s
        decoded_s = decoding_s / self._num_decoded  # per token
        best, best_s = 0, decoded_s / _MIN_GAIN
        right, chance, num_drawn = state.num_right / state.num_checked, 1.0, 1.0
        for num_drafts in range(1, self._most + 1):
            chance *= right
            num_drawn += chance
            step_s = drafting_s + num_drafts * place_s + (num_drawn - 1) * again_s
            drawn_s = step_s / num_drawn
            if drawn_s < best_s:
                best, best_s = num_drafts, drawn_s
        return _Plan(best, decoded_s - best_s if best else 0.0)


def _mean(mean: float | None, value: float, rate: float) -> float:
    """Returns a mean in which a new value has the weight `rate`."""
    return value if mean is None else mean + rate * (value - mean)


def may_draft(sequence: Sequence) -> bool:
    """Whether a sequence's tokens may be drawn several in a step.

    Not those of ranked requests and beams, whose candidates are compared, and not those of logits
    processors, which see each token as it is drawn.
    """
    group = sequence.group
    params = group.request.spec.params
    is_plain = not params.is_ranked and not params.extra_args and group.beams is None
    return is_plain and sequence is not group.root and not group.hands_over


def _is_private(sequence: Sequence) -> bool:
    """Whether a request shares nothing with others, so that its text shows in no other's speed."""
    return bool(sequence.group.request.spec.cache_salt)
