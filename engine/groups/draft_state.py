"""`DraftState`: what is known of one sequence's draft tokens. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["SEPARATOR", "DraftState", "TokenHistory"]

SEPARATOR = -1  # between texts; equals no token


class TokenHistory:
    """The tokens of one sequence as an array, which grows with it.

    Those of its prediction and `SEPARATOR` come before them, if it has one.

    Args:
        prediction: tokens that the answer will probably repeat.
    """

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._num_predicted = len(prediction)
        self._tokens = np.array([*prediction, SEPARATOR] if prediction else [], np.int32)
        self._start = self._length = len(self._tokens)

    def updated(self, token_ids: list[int]) -> np.ndarray:
        """Returns all tokens, `[n]` int32, as a view that the next call may overwrite.

        Args:
            token_ids: the sequence's at the last call, and those that have followed.
        """
        length = self._start + len(token_ids)
        if length > len(self._tokens):
            grown = np.empty(max(2 * length, 256), np.int32)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : length] = token_ids[self._length - self._start :]
        self._length = length
        return self._tokens[:length]

    def predicted(self, num_prompt: int, limit: int) -> list[int]:
        """Returns the next tokens of the prediction if the answer so far is its beginning.

        Args:
            num_prompt: how many of the sequence's tokens are its prompt.
            limit: the most tokens.
        """
        answer = self._tokens[self._start + num_prompt : self._length]
        rest = self._tokens[len(answer) : self._num_predicted][:limit]
        if not len(rest) or not np.array_equal(answer, self._tokens[: len(answer)]):
            return []
        return [int(token) for token in rest]


@dataclass(slots=True)
class DraftState:
    """Draft state of one sequence.

    Attributes:
        history: its tokens, after those of its prediction.
        num_checked: draft tokens that were compared with what was drawn, the newest ones count
            more.
        num_right: those of them that were equal to it.
        num_steps_without: steps since the last one with drafts.
        proposals: draft tokens of a draft model.
        proposed_at: number of tokens of the sequence that they follow.
        num_drafted: leading tokens that the draft model has run in the sequence's present row.
    """

    history: TokenHistory
    num_checked: float
    num_right: float
    num_steps_without: int = 0
    proposals: tuple[int, ...] = ()
    proposed_at: int = 0
    num_drafted: int = 0
