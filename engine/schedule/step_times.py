"""`StepTimes`: measures steps, and bounds how many prompt tokens the next one computes. Pure.

Routers learn from the same measurements how fast an engine is (`prompt_token_s`, `full_step_s`).

Sequences that decode wait for the whole step, so a step's prompts lengthen the gap between the
tokens of all streams. A number of tokens says little about that time: 2,048 take a GPU some
milliseconds, and two cores of a CPU seconds. A step of n tokens takes about
`fixed_s + n * token_s`. For steps that only decode, both follow from these alone (`DecodeTimes`);
in steps with prompts tokens have another `token_s`, a mean over such steps so far.

Nothing is bounded while no sequence decodes, neither here nor in another engine that takes turns on
the same cores: then prompts are computed in the fewest steps.
"""

import sys
from collections.abc import Callable

from engine.batch import ScheduledBatch
from engine.config import AUTO, EngineConfig
from engine.runner import EngineTurns, StepCosts, TurnWish
from engine.schedule.decode_times import MAX_RATIO, MEAN_RATE, DecodeTimes

__all__ = ["NO_BOUND", "StepTimes"]

NO_BOUND = sys.maxsize
_FACTOR = 4.0
"""With `auto`, a step with prompts may take as long as so many steps that only decode."""
_MIN_TOKENS = 64
"""The minimum: with shorter chunks, a step would mostly read the weights again. Larger steps have
a multiple of it: sizes must recur to be replayed (`RecordedSteps`), which saves a tenth."""
_MIN_S = 1e-9


class StepTimes:
    """The times of one engine's steps.

    Args:
        config: `max_step_ms` and the limits.
        costs: the time of a prompt's token, until steps have been measured.
        clock: monotonic seconds.
        turns: the engine's turns. Waiting for one is not a step's time.

    Attributes:
        limit_s: the longest time of the next step by the last call of `prompt_budget`; 0 without
            a bound.
    """

    def __init__(
        self,
        config: EngineConfig,
        costs: StepCosts,
        clock: Callable[[], float],
        turns: EngineTurns,
    ) -> None:
        self.limit_s = 0.0
        self._max_step_ms = config.max_step_ms or 0
        self._tokens_per_row = 1 + config.max_drafts
        self._max_running, self._num_lanes = config.max_running, config.num_lanes
        self._clock = clock
        self._turns = turns
        self._token_s = max(costs.prompt_token_s, _MIN_S)
        self._decode = DecodeTimes(self._token_s)
        self._ended_at = 0.0

    @property
    def prompt_token_s(self) -> float:
        """Seconds in which a step computes one more token of a prompt; more than 0."""
        return self._token_s

    @property
    def full_step_s(self) -> float:
        """Seconds in which each sequence decodes once while all seats are taken; more than 0. It
        depends on how fast the engine is, and hardly on how many sequences run now.
        """
        return self._num_lanes * self._decode.step_s(self._tokens_per_step(self._max_running))

    def now(self) -> float:
        """Returns the clock's seconds without those in which the engine waited for its turn."""
        return self._clock() - self._turns.waited_s

    def record_step(self, batch: ScheduledBatch, began_at: float) -> None:
        """Measures a step that was computed.

        Args:
            batch: the step.
            began_at: `now` when it began to be scheduled. If another step was in flight then, it
                counts from the end of that one.
        """
        now = self.now()
        seconds, self._ended_at = max(0.0, now - max(began_at, self._ended_at)), now
        num_tokens = batch.num_tokens
        if not num_tokens:
            return  # it only copied blocks
        num_drafts = sum(chunk.num_drafts for chunk in batch.chunks)
        num_decoded = len(batch.chunks) + num_drafts + len(batch.decode_rows)
        if num_tokens - num_decoded < _MIN_TOKENS // 2:
            self._decode.record(num_tokens, seconds)
            return
        fixed_s = self._decode.fixed_s
        counted_s = min(seconds, MAX_RATIO * (fixed_s + num_tokens * self._token_s))
        token_s = max(_MIN_S, (counted_s - fixed_s) / num_tokens)
        self._token_s += MEAN_RATE * (token_s - self._token_s)
        self._decode.expect(self._token_s)

    def prompt_budget(
        self, num_decoding: int, num_present: int, num_leaving: Callable[[int], int]
    ) -> int:
        """Returns how many prompt tokens the next step may compute; `NO_BOUND` for any number.

        Args:
            num_decoding: sequences that have computed their prompts.
            num_present: those and all others that run, and the requests that wait.
            num_leaving: returns how many others will decode in another engine, of as many
                requests that wait as its argument says.
        """
        self.limit_s = 0.0
        if not self._max_step_ms:
            return NO_BOUND
        limits_s = []
        wish = None
        if num_decoding:
            num_present = max(num_decoding, num_present)
            wish = self._wish(num_decoding, num_present)
            limits_s.append(self._longest_s(num_present))
        self._turns.wish = wish  # another thread may read it at any moment
        if (others_wish := self._turns.others_wish) is not None:
            limits_s.append(others_wish.limit_s(num_leaving(self._max_running)))
        if not limits_s:
            return NO_BOUND
        self.limit_s = min(limits_s)
        num_tokens = int((self.limit_s - self._decode.fixed_s) / self._token_s)
        num_decoded = self._tokens_per_step(num_decoding)
        return max(_MIN_TOKENS, num_tokens - num_tokens % _MIN_TOKENS - num_decoded)

    def _wish(self, num_decoding: int, num_present: int) -> TurnWish:
        """Returns how long turns of others may be beside the sequences that decode.

        A request that others hand over when a step has just begun waits for that step, for another
        turn of theirs, and for its own step.

        Args:
            num_decoding: number of sequences that decode.
            num_present: those and all others that will soon decode.
        """
        own_s = 2 * self._decode.step_s(self._tokens_per_step(num_decoding))
        present_s, full_s = self._longest_s(num_present), self._longest_s(self._max_running)
        return TurnWish(
            turn_s=max(_MIN_S, present_s - own_s),
            sequence_s=max(0.0, full_s - present_s) / max(1, self._max_running - num_present),
            max_s=max(_MIN_S, full_s - own_s),
        )

    def _tokens_per_step(self, num_sequences: int) -> int:
        """Returns the tokens, draft tokens included, of a step in which sequences decode."""
        num_rows = -(-min(num_sequences, self._max_running) // self._num_lanes)
        return num_rows * self._tokens_per_row

    def _longest_s(self, num_sequences: int) -> float:
        """Returns the longest time of a step, if so many sequences will soon decode."""
        if self._max_step_ms == AUTO:
            return _FACTOR * self._decode.step_s(self._tokens_per_step(num_sequences))
        return float(self._max_step_ms) / 1000
