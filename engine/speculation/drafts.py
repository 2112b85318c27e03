"""`Drafts`: decides how many guesses of their next tokens ("drafts") sequences get. Pure.

A sequence with drafts runs a chunk in each step: its last token and the guesses. The step draws a
token after each, with the noise of its position, and keeps them as long as the guesses are equal:
the tokens are those of a sequence without drafts. `engine.batch.ScheduledChunk` has the details.
Guesses come from look-ups, or from a draft model, which the runner runs after a step for the next
one.

How many guesses pay depends on the sequence, whose guesses are right with some probability p, and
on the step, whose time grows with its tokens. The guess at place j adds a token with probability
p**j. So many are made as draw the most tokens per second, by the measured times of steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.batch import DraftWork, ScheduledBatch
from engine.config import EngineConfig
from engine.group import Sequence
from engine.metrics.counts import EngineMetrics
from engine.runner import StepCosts
from engine.speculation.lookup import make_proposer
from engine.speculation.state import DraftState, TokenHistory

__all__ = ["Drafts", "may_draft"]

_KEPT_SHARE = 0.9  # of what was counted before, at each step with drafts
_FORGOTTEN_SHARE = 0.1  # of what was counted, at each block without drafts
_FORGETTING_STEPS = 16
_MAX_STEPS_WITHOUT = 8
_WAITING_SHARE = 0.4  # of a step; what such steps may take longer in all than those that decode
_FIRST_CHECKED = 2.0  # a new sequence's rate counts as if so many of its guesses had been checked
_FIRST_SHARE, _LEAST_SHARE = 0.75, 0.5  # of right guesses: a new engine's, and the least assumed
_SHARE_RATE = 0.01  # weight of a guess in the engine's share of right guesses
_LEAST_GAIN = 1.05  # expected, as estimates are uncertain
_TIME_RATE = 0.1  # weight of a step in the mean time
_TRYING_RATE = 0.001  # by which steps without drafts bring the time of those with drafts nearer
_MAX_TIMED_TOKENS = 256  # steps with longer prompts say little about steps without


@dataclass(slots=True)
class _StepTimes:
    """Mean seconds of short steps, less what their tokens and proposals take.

    Attributes:
        decoding_s: of steps in which all sequences decode.
        drafting_s: of steps with drafts.
    """

    decoding_s: float
    drafting_s: float


class Drafts:
    """The drafts of one engine's sequences.

    Args:
        config: the limits, and `speculative_config`.
        costs: measured times; `prompt_token_s` is that of one more token in a long step.
        metrics: counts drafts.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        costs: StepCosts,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        assert config.speculative_config is not None, "the engine guesses"
        self._most, self._block_size = config.max_drafts, config.block_size
        # Tokens that a sequence draws by decoding in the time of one with drafts, which runs again
        # only when its step has ended.
        self._num_decoded = config.max_open_steps / config.num_lanes
        self._proposer = make_proposer(config.speculative_config)
        self._token_s, self._proposal_s = costs.prompt_token_s, costs.proposal_s
        self._times: _StepTimes | None = None
        self._right_share = _FIRST_SHARE  # of guesses; what is assumed of a new sequence
        self._metrics = metrics
        self._clock = clock
        self._num_rows = 1
        self._began_at = 0.0

    def step_began(self) -> None:
        """Notes that a step is about to be scheduled."""
        self._began_at = self._clock()

    def step_started(self, num_rows: int) -> None:
        """Notes that a step with so many sequences was scheduled."""
        self._num_rows = max(1, num_rows)

    def step_ended(self, batch: ScheduledBatch) -> None:
        """Measures the time of a step that has been committed, with that of scheduling it: chunks
        take the scheduler longer than rows that decode.
        """
        step_s = self._clock() - self._began_at
        chunks = batch.chunks
        if batch.num_tokens + batch.num_drafted_tokens > _MAX_TIMED_TOKENS or step_s <= 0:
            return
        works = [chunk.draft_work for chunk in chunks if chunk.draft_work is not None]
        num_proposed = max([work.num_proposals for work in works], default=0)
        tokens_s = batch.num_tokens * self._token_s
        fixed_s = max(0.0, step_s - tokens_s - num_proposed * self._proposal_s)
        has_drafts = num_proposed > 0 or any(chunk.num_drafts for chunk in chunks)
        if self._times is None:
            self._times = _StepTimes(fixed_s, fixed_s)
        elif has_drafts:
            # A step of a new size is slower, as it is recorded.
            fixed_s = min(fixed_s, 2 * self._times.drafting_s + tokens_s)
            self._times.drafting_s += _TIME_RATE * (fixed_s - self._times.drafting_s)
        elif not chunks:
            self._times.decoding_s += _TIME_RATE * (fixed_s - self._times.decoding_s)
            # Else a step that was slow by chance could end all drafts.
            difference_s = self._times.decoding_s - self._times.drafting_s
            self._times.drafting_s += _TRYING_RATE * difference_s

    def draft(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Returns the guesses to check in this step.

        Args:
            sequence: a sequence whose next step runs its last token.
            limit: the most guesses.
        """
        state = self._state_of(sequence)
        state.num_steps_without += 1
        if state.num_steps_without % _FORGETTING_STEPS == 0:
            self._forget(state)  # a sequence with a grammar never decodes
        room = sequence.limit - len(sequence.token_ids) - 1  # one token is drawn in any case
        limit = min(limit, room, self._num_worthwhile(state))
        return tuple(self._guesses(sequence, limit)) if limit > 0 else ()

    def num_proposals(self, sequence: Sequence, num_drafts: int) -> int:
        """Returns how many tokens a draft model should guess after this step.

        Args:
            sequence: a sequence whose step runs its last token.
            num_drafts: number of drafts in this step.
        """
        if self._proposer is not None:
            return 0
        # The step draws a token in any case, and the next one draws another one.
        room = sequence.limit - len(sequence.token_ids) - num_drafts - 2
        return max(0, min(room, self._num_worthwhile(self._state_of(sequence))))

    def work(self, sequence: Sequence, num_proposals: int, budget: int) -> DraftWork | None:
        """Returns what the draft model does after this step; None if it does nothing.

        Args:
            sequence: as in `num_proposals`.
            num_proposals: number of tokens that it should guess.
            budget: the most known tokens that it may run.
        """
        if not num_proposals:
            return None
        end = sequence.num_scheduled
        first = min(self._state_of(sequence).num_drafted, end)
        if end - first > budget:
            num_proposals, end = 0, first + budget
            if budget >= self._block_size:
                end -= end % self._block_size  # so that the next tokens begin a block
            if end == first:
                return None
        return DraftWork(first, tuple(sequence.token_ids[first:end]), num_proposals)

    def worked(
        self, sequence: Sequence, work: DraftWork, proposals: tuple[int, ...], num_tokens: int
    ) -> None:
        """Takes what the draft model has done.

        Args:
            sequence: a sequence that goes on.
            work: what `work` has returned for the step.
            proposals: guesses of the tokens after the first `num_tokens`.
            num_tokens: number of tokens of the sequence after the step's draws.
        """
        state = self._state_of(sequence)
        if work.num_proposals:
            state.proposals, state.proposed_at, state.num_drafted = (
                proposals,
                num_tokens,
                num_tokens,
            )
        else:
            state.num_drafted = work.first + len(work.token_ids)

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether a sequence without drafts in this step should have the chance to get some in the
        next one, and so must not decode.
        """
        if self._proposer is None:
            return False  # the draft model was not asked
        state, most = self._state_of(sequence), float(_MAX_STEPS_WITHOUT)
        if self._times is not None:
            lost_s = self._times.drafting_s - self._times.decoding_s
            most = min(most, _WAITING_SHARE * self._times.decoding_s / max(lost_s, 1e-9))
        return state.num_steps_without <= most and self._num_worthwhile(state) > 0

    def should_begin(self, sequence: Sequence) -> bool:
        """Whether a sequence that decodes should try drafts again; called once per block."""
        state = self._state_of(sequence)
        self._forget(state)
        if not may_draft(sequence) or not self._num_worthwhile(state):
            return False
        begins = self._proposer is None or bool(self._guesses(sequence, 1))
        if begins:
            state.num_steps_without = 0
        return begins

    def checked(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Notes how many of a step's guesses were right, from the first one on."""
        state = self._state_of(sequence)
        num_checked = min(num_drafts, num_right + 1)
        state.num_steps_without = 0
        state.num_checked = _KEPT_SHARE * state.num_checked + num_checked
        state.num_right = _KEPT_SHARE * state.num_right + num_right
        share = self._right_share + _SHARE_RATE * (
            min(num_right, num_checked) - num_checked * self._right_share
        )
        self._right_share = min(max(share, _LEAST_SHARE), _FIRST_SHARE)
        self._metrics.drafted(num_drafts, num_right)

    def sequence_ended(self, sequence: Sequence) -> None:
        """Keeps a sequence that has ended for guesses of later ones."""
        if self._proposer is not None and not _is_private(sequence):
            self._proposer.keep_answer(sequence.token_ids, sequence.group.num_prompt)

    def forget_answers(self) -> None:
        """Forgets the sequences that have ended."""
        if self._proposer is not None:
            self._proposer.forget_answers()

    def _guesses(self, sequence: Sequence, limit: int) -> list[int]:
        """Returns at most `limit` guesses: what the prediction says, what the draft model has
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
        """Brings the rate of right guesses nearer to that of a new sequence."""
        state.num_checked += _FORGOTTEN_SHARE * (_FIRST_CHECKED - state.num_checked)
        first_right = _FIRST_CHECKED * self._right_share
        state.num_right += _FORGOTTEN_SHARE * (first_right - state.num_right)

    def _state_of(self, sequence: Sequence) -> DraftState:
        if sequence.drafts is None:
            history = TokenHistory(sequence.group.request.spec.prediction_token_ids)
            first_right = _FIRST_CHECKED * self._right_share
            sequence.drafts = DraftState(history, _FIRST_CHECKED, first_right)
        return sequence.drafts

    def _num_worthwhile(self, state: DraftState) -> int:
        """Returns how many guesses draw the most tokens per second in a step with as many sequences
        as the last one; 0 if decoding draws more.
        """
        place_s, step_s, decoding_step_s = 0.0, 1.0, 1.0  # while nothing is measured
        if self._times is not None:
            tokens_s = self._num_rows * self._token_s
            place_s = tokens_s + self._proposal_s  # of one guess of each sequence
            step_s = self._times.drafting_s + tokens_s
            decoding_step_s = self._times.decoding_s + tokens_s
        best, best_rate = 0, _LEAST_GAIN * self._num_decoded / decoding_step_s
        right, chance, num_drawn = state.num_right / state.num_checked, 1.0, 1.0
        for num_drafts in range(1, self._most + 1):
            chance *= right
            num_drawn += chance
            rate = num_drawn / (step_s + num_drafts * place_s)
            if rate > best_rate:
                best, best_rate = num_drafts, rate
        return best


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
