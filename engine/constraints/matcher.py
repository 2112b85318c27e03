"""`Matcher`: where a text is within its grammar, and which tokens may come next.

`Constraint` is a compiled grammar; every sequence that it constrains has a `Matcher` of its
own. What differs between xgrammar and llguidance is behind `engine.constraints.interface`.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from baton.common.errors import InvalidArgumentError
from engine.constraints.interface import Grammar, GrammarState, TooComplexError
from engine.constraints.vocabulary import Mask, Vocabulary, bits_of

__all__ = ["Constraint", "Matcher"]

# CPU seconds that a sequence's grammar may use at once, and on average per token. Everything
# else in the batch waits meanwhile.
_BURST_S = 0.5
_STEADY_S = 0.01

_MAX_FORCED_BYTES = 128  # found at once; the rest is found after the next token
_MAX_FORCED_CHOICES = 64  # where more tokens may come next, their bytes are not compared


@dataclass(frozen=True, slots=True)
class Constraint:
    """A compiled grammar, shared by all sequences that it constrains.

    Attributes:
        grammar: the backend's.
        vocabulary: the token table that it was compiled against.
        field: the user's field in error messages, such as `structured_outputs.json`.
        marks: special tokens that count as their names in the text, with these.
    """

    grammar: Grammar
    vocabulary: Vocabulary
    field: str
    marks: Mapping[int, bytes] = dataclasses.field(default_factory=dict)

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
        self._stop_bits = bits_of(i for i in stop_token_ids if i < constraint.vocabulary.size)
        self._row: Mask | None = None  # the state's mask, once it was needed; never changed
        self._allowance_s = _BURST_S

    @property
    def may_stop(self) -> bool:
        """Whether the sequence may end here."""
        return self._state.is_complete()

    @property
    def is_terminated(self) -> bool:
        """Whether nothing but a stop token can follow."""
        return self._state.is_complete() and not self._current_row().any()

    def fill_mask(self, row: Mask) -> None:
        """Writes which tokens may come next into a row of `vocabulary.num_mask_words` words.

        The row is empty if the text is complete and the sequence has no stop tokens.

        Raises:
            InvalidArgumentError: no token may come next, or the grammar takes too long.
        """
        row[:] = self._current_row()
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
        started = time.thread_time()
        try:
            is_accepted = self._move(token_id)
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
        """Returns bytes that come next in every continuation; empty if there is a choice.

        It looks at one byte after the other, and not further than 128, because the libraries have
        no bound: the text of `a{100000000}` would fill the memory.

        Raises:
            InvalidArgumentError: the grammar takes too long.
        """
        byte = self._only_first_byte()
        if byte is None:
            return b""
        started, text, ahead = time.thread_time(), bytearray(), self.fork()
        byte_tokens = self._constraint.vocabulary.byte_tokens
        while byte in byte_tokens and ahead.accept(byte_tokens[byte]):
            text.append(byte)
            byte = ahead._only_first_byte()
            if byte is None or len(text) == _MAX_FORCED_BYTES:
                break
        self._spend(time.thread_time() - started)
        return bytes(text)

    def fork(self) -> "Matcher":
        """Returns an independent copy, for another candidate that has the same tokens."""
        twin = Matcher(self._constraint, self._state.fork(), self._stop_token_ids)
        twin._row, twin._allowance_s = self._row, self._allowance_s
        return twin

    def _only_first_byte(self) -> int | None:
        """Returns the byte that all tokens begin with that may come next; None if they differ, or
        if the text may end.
        """
        if self._state.is_complete():
            return None
        row = self._current_row()
        if np.bitwise_count(row.view(np.uint32)).sum() > _MAX_FORCED_CHOICES:
            return None
        tokens = self._constraint.vocabulary.tokens
        bits = np.unpackbits(row[(words := np.flatnonzero(row))].view(np.uint8), bitorder="little")
        places = np.flatnonzero(bits)
        ids = words[places // 32] * 32 + places % 32
        marks = self._constraint.marks
        first = {(tokens[token_id] or marks[token_id])[0] for token_id in ids.tolist()}
        return first.pop() if len(first) == 1 else None

    def _current_row(self) -> Mask:
        """Returns which tokens with text may come next; computed once per state."""
        if self._row is not None:
            return self._row
        started, vocabulary = time.thread_time(), self._constraint.vocabulary
        row = np.empty(vocabulary.num_mask_words, dtype=np.int32)
        try:
            self._state.fill_mask(row)
        except TooComplexError as error:
            raise self._error(f"is too complex: {error}") from None
        words, bits = vocabulary.meaningless_bits
        row[words] &= ~bits
        words, bits = bits_of(i for i in self._constraint.marks if self._after_mark(i) is not None)
        row[words] |= bits
        self._charge(started)
        self._row = row
        return row

    def _move(self, token_id: int) -> bool:
        """Moves the state on by a token; returns whether the token may come next."""
        tokens = self._constraint.vocabulary.tokens
        if not 0 <= token_id < len(tokens):
            return False
        if tokens[token_id]:
            return self._state.accept(token_id)
        if (state := self._after_mark(token_id)) is None:
            return False
        self._state = state
        return True

    def _after_mark(self, token_id: int) -> GrammarState | None:
        """Returns the state after a special token that counts as its name; None if it is none, or
        may not come next.
        """
        name = self._constraint.marks.get(token_id)
        if name is None:
            return None
        state, byte_tokens = self._state.fork(), self._constraint.vocabulary.byte_tokens
        is_text = all(byte in byte_tokens and state.accept(byte_tokens[byte]) for byte in name)
        return state if is_text else None

    def _charge(self, started: float) -> None:
        """Takes the time of one call from the grammar's allowance."""
        self._allowance_s = min(self._allowance_s + _STEADY_S, _BURST_S)
        self._spend(time.thread_time() - started)

    def _spend(self, used_s: float) -> None:
        """Refuses a grammar that has used up its time."""
        self._allowance_s -= used_s
        if self._allowance_s < 0:
            limit = f"it may take {_STEADY_S * 1e3:.0f} ms on average"
            raise self._error(f"took {used_s * 1e3:.0f} ms for one token; {limit}")

    def _error(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._constraint.field} {problem}")
