"""`DraftState`: what is known of one sequence's guesses. Pure."""

from dataclasses import dataclass, field

import numpy as np

__all__ = ["FIRST_CHECKED", "FIRST_RIGHT", "DraftState", "TokenHistory"]

# What is assumed of a new sequence: so many guesses were checked, and so many of them were right.
FIRST_CHECKED, FIRST_RIGHT = 2.0, 1.5


class TokenHistory:
    """The tokens of one sequence as an array, which grows with it."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int32)
        self._length = 0

    def updated(self, token_ids: list[int]) -> np.ndarray:
        """Returns all tokens, `[n]` int32, as a view that the next call may overwrite.

        Args:
            token_ids: those of the last call, and those that have followed.
        """
        length = len(token_ids)
        if length > len(self._tokens):
            grown = np.empty(max(2 * length, 256), np.int32)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : length] = token_ids[self._length :]
        self._length = length
        return self._tokens[:length]


@dataclass(slots=True)
class DraftState:
    """What is known of one sequence.

    Attributes:
        history: its tokens.
        num_checked: guesses that were compared with what was drawn, the newest ones count more.
        num_right: those of them that were equal to it.
        num_steps_without: steps since the last one with drafts.
        num_drafted: guesses in all steps.
        num_accepted: those of them that were right.
    """

    history: TokenHistory = field(default_factory=TokenHistory)
    num_checked: float = FIRST_CHECKED
    num_right: float = FIRST_RIGHT
    num_steps_without: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
