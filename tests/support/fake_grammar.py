"""Grammars over the fake model's two tokens: what may come next is a hash of the text."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.matcher import Constraint, Matcher
from engine.constraints.vocabulary import Mask, Vocabulary
from tests.support.fake_model import VOCAB_SIZE, hash_of

__all__ = ["FakeGrammars", "allowed_tokens", "is_complete"]

VOCABULARY = Vocabulary(tuple(b"%d" % token for token in range(VOCAB_SIZE)), {}, ())


def is_complete(outputs: StructuredOutputs, generated: Sequence[int]) -> bool:
    """Returns whether a text belongs to the grammar; some texts can go on, the longest cannot."""
    return len(generated) >= _length(outputs) or _hash(outputs, generated) % 7 == 0


def allowed_tokens(outputs: StructuredOutputs, generated: Sequence[int]) -> frozenset[int]:
    """Returns the tokens that may follow a text; none if it cannot go on."""
    if len(generated) >= _length(outputs):
        return frozenset()
    choice = _hash(outputs, generated) % (VOCAB_SIZE + 1)
    return frozenset(range(VOCAB_SIZE)) if choice == VOCAB_SIZE else frozenset([choice])


def _length(outputs: StructuredOutputs) -> int:
    return 1 + len(outputs.regex)


def _hash(outputs: StructuredOutputs, generated: Sequence[int]) -> int:
    return hash_of(generated, len(outputs.regex))


class _State:
    """A `GrammarState`."""

    def __init__(self, outputs: StructuredOutputs, generated: tuple[int, ...] = ()) -> None:
        self._outputs, self._generated = outputs, generated

    def fill_mask(self, row: Mask) -> None:
        tokens = allowed_tokens(self._outputs, self._generated)
        row[:] = np.array([sum(1 << token for token in tokens)], np.int32)

    def accept(self, token_id: int) -> bool:
        if token_id not in allowed_tokens(self._outputs, self._generated):
            return False
        self._generated += (token_id,)
        return True

    def is_complete(self) -> bool:
        return is_complete(self._outputs, self._generated)

    def fork(self) -> "_State":
        return _State(self._outputs, self._generated)


class _Grammar:
    """A `Grammar`."""

    num_bytes = 1

    def __init__(self, outputs: StructuredOutputs) -> None:
        self._outputs = outputs

    def new_state(self) -> _State:
        return _State(self._outputs)


class _Retokenizer:
    """Each byte of forced text is a token."""

    def forced_tokens(self, matcher: Matcher, token_ids: Sequence[int]) -> list[int]:
        return [int(chr(byte)) for byte in matcher.forced_text()]


class FakeGrammars:
    """A `GrammarSource` whose futures end one by one, when the test says so."""

    retokenizer = _Retokenizer()

    def __init__(self) -> None:
        self._pending: list[tuple[StructuredOutputs, Future[Constraint]]] = []

    def compile(self, outputs: StructuredOutputs, owner: str = "") -> "Future[Constraint]":
        self._pending.append((outputs, Future()))
        return self._pending[-1][1]

    def end_one(self, error: Exception | None = None) -> None:
        """Ends the oldest future that has not ended, if any; with an error, if one is given."""
        if not self._pending:
            return
        outputs, future = self._pending.pop(0)
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(Constraint(_Grammar(outputs), VOCABULARY, "structured_outputs.regex"))
