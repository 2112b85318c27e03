"""`Matcher`: where a text is within its grammar, and which tokens may come next.

`Constraint` is a compiled grammar; every sequence that it constrains has a `Matcher` of its
own. What differs between xgrammar and llguidance is behind `engine.constraints.interface`.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from baton.errors import InvalidArgumentError
from engine.constraints.interface import Grammar, GrammarState, TooComplexError
from engine.constraints.vocabulary import Mask, Vocabulary, bits_of

__all__ = ["Constraint", "Matcher"]

# CPU seconds that a sequence's grammar may use at once, and on average per token. Everything
# else in the batch waits meanwhile.
_BURST_S = 0.5
_STEADY_S = 0.01


@dataclass(frozen=True, slots=True)
class Constraint:
    """A compiled grammar, shared by all sequences that it constrains.

    Attributes:
        grammar: the backend's.
        vocabulary: the token table that it was compiled against.
        field: the user's field in error messages, such as `structured_outputs.json`.
    """

    grammar: Grammar
    vocabulary: Vocabulary
    field: str

    def new_matcher(self, stop_token_ids: Iterable[int]) -> "Matcher":
        """Returns a matcher at the start of a constrained text.

        Args:
            stop_token_ids: the tokens that end the sequence. They may be drawn once the text
                belongs to the grammar. Tokens with text among them also follow the grammar.
        """
        return Matcher(self, self.grammar.new_state(), frozenset(stop_token_ids))


class Matcher:
    """The constraint of one sequence. `Constraint.new_matcher` makes one.

    Not safe to call from two threads at once.
    """

    def __init__(
        self,
        constraint: Constraint,
        state: GrammarState,
        stop_token_ids: frozenset[int],
    ) -> None:
        self._constraint = constraint
        self._state = state
        self._stop_token_ids = stop_token_ids
        vocabulary = constraint.vocabulary
        self._stop_bits = bits_of(i for i in stop_token_ids if i < vocabulary.size)
        self._meaningless_bits = vocabulary.meaningless_bits
        self._row: Mask | None = None  # of this state, if `is_terminated` needed it
        self._allowance_s = _BURST_S
        # CPU time takes a system call. It is measured once a call was slow, as that may have been
        # because of other processes.
        self._clock = time.perf_counter

    @property
    def may_stop(self) -> bool:
        """Whether the sequence may end here."""
        return self._state.is_complete()

    @property
    def is_terminated(self) -> bool:
        """Whether nothing but a stop token can follow."""
        if not self._state.is_complete():
            return False
        if self._row is None:
            row = np.empty(self._constraint.vocabulary.num_mask_words, dtype=np.int32)
            self._fill_from_state(row)
            self._row = row
        return not self._row.any()

    def fill_mask(self, row: Mask) -> None:
        """Writes which tokens may come next into a row of `vocabulary.num_mask_words` words.

        The row is empty if the text is complete and the sequence has no stop tokens.

        Raises:
            InvalidArgumentError: no token may come next, or the grammar takes too long.
        """
        if self._row is not None:
            row[:] = self._row
        else:
            self._fill_from_state(row)
        if self.may_stop:
            words, bits = self._stop_bits
            row[words] |= bits
        elif not row.any():
            raise self._error("allows no token of this model's vocabulary here")

    def accept(self, token_id: int) -> bool:
        """Moves on by a token of the text, as which a stop token does not count.

        Returns:
            Whether the token may come next; if not, the matcher stays where it is.

        Raises:
            InvalidArgumentError: the grammar takes too long.
        """
        started = self._clock()
        try:
            is_accepted = self._has_text(token_id) and self._state.accept(token_id)
        except TooComplexError as error:
            raise self._error(f"is too complex: {error}") from None
        if is_accepted:
            self._row = None
        self._charge(started)
        return is_accepted

    def replay(self, token_ids: Iterable[int]) -> bool:
        """Accepts tokens that were generated before; returns False at the first that fails."""
        return all(self.accept(token_id) for token_id in token_ids)

    def forced_text(self) -> bytes:
        """Returns the bytes that come next in every continuation; empty if there is a choice."""
        if self._state.is_complete():
            return b""
        return self._state.forced_text()

    def fork(self) -> "Matcher":
        """Returns an independent copy, for another candidate that has the same tokens."""
        twin = Matcher(self._constraint, self._state.fork(), self._stop_token_ids)
        twin._allowance_s, twin._clock = self._allowance_s, self._clock
        return twin

    def _fill_from_state(self, row: Mask) -> None:
        """Writes which tokens with text may come next."""
        started = self._clock()
        try:
            self._state.fill_mask(row)
        except TooComplexError as error:
            raise self._error(f"is too complex: {error}") from None
        words, bits = self._meaningless_bits
        row[words] &= ~bits
        self._charge(started)

    def _has_text(self, token_id: int) -> bool:
        tokens = self._constraint.vocabulary.tokens
        return 0 <= token_id < len(tokens) and bool(tokens[token_id])

    def _charge(self, started: float) -> None:
        """Refuses a grammar that has used up its time."""
        used_s = self._clock() - started
        if self._clock is not time.thread_time and used_s > _STEADY_S:
            self._clock, used_s = time.thread_time, 0.0
        self._allowance_s = min(self._allowance_s + _STEADY_S, _BURST_S) - used_s
        if self._allowance_s < 0:
            limit = f"it may take {_STEADY_S * 1e3:.0f} ms on average"
            raise self._error(f"took {used_s * 1e3:.0f} ms for one token; {limit}")

    def _error(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._constraint.field} {problem}")
