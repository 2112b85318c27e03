"""The interface of a backend: `Backend`, the `Grammar` that it compiles, and positions in it."""

from typing import Any, Protocol

from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.vocabulary import Mask

__all__ = [
    "MAX_COMPILER_THREADS",
    "MAX_WHITESPACE",
    "Backend",
    "Grammar",
    "GrammarState",
    "RefusedError",
    "TooComplexError",
    "first_line",
]

MAX_COMPILER_THREADS = 2
"""Threads of a backend that compile one grammar."""
MAX_WHITESPACE = 8
"""Characters of whitespace between two tokens of JSON, unless the operator states another limit.

Small models repeat whitespace until their limit of tokens cuts the answer.
"""

_MAX_REASON_CHARS = 300


class RefusedError(Exception):
    """A backend cannot express a constraint, or would enforce only a part of it."""


class TooComplexError(Exception):
    """A backend gave up on a grammar that exceeds its limits."""


class GrammarState(Protocol):
    """A position in a grammar. It gets only tokens that have text, never stop tokens.

    `fill_mask` and `accept` raise TooComplexError if the grammar exceeds the backend's limits.
    """

    def fill_mask(self, row: Mask) -> None:
        """Writes which tokens may come next. Bits of end-of-sequence tokens, and those past the
        vocabulary, have no meaning.
        """

    def accept(self, token_id: int) -> bool:
        """Moves on by a token; returns False, and stays, if the token may not come next."""

    def is_complete(self) -> bool:
        """Whether the text so far belongs to the grammar."""

    def fork(self) -> "GrammarState":
        """Returns an independent copy."""


class Grammar(Protocol):
    """A grammar that a backend has compiled.

    Attributes:
        num_bytes: about how much memory it takes.
    """

    num_bytes: int

    def new_state(self) -> GrammarState:
        """Returns the position before the first token."""


class Backend(Protocol):
    """A library that compiles grammars for one vocabulary."""

    def compile(
        self, outputs: StructuredOutputs, max_whitespace: int | None = MAX_WHITESPACE
    ) -> bytes:
        """Returns a compiled grammar in a form that other processes can load.

        Args:
            outputs: the constraint.
            max_whitespace: the most characters of whitespace between two tokens of JSON, unless
                the constraint states its own whitespace; None for any number.

        Raises:
            RefusedError: says what cannot be expressed.
        """

    def check(self, schema: Any) -> None:
        """Does nothing for a JSON schema that the backend enforces as a whole.

        Raises:
            RefusedError: says what it would not enforce.
        """

    def load(self, data: bytes) -> Grammar:
        """Returns the grammar that `compile` returned."""


def first_line(message: str) -> str:
    """Returns the first line of a library's error message, shortened, for an error to users."""
    lines = message.strip().splitlines()
    return lines[0][:_MAX_REASON_CHARS] if lines else "it gives no reason"
