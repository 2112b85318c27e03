"""Token ids in, text out, up to a stop string: what the router and `LLM` share."""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

from router.detokenizer import IncrementalDetokenizer
from router.stop_strings import StopChecker
from router.tokenizer import Tokenizer

__all__ = ["TextPiece", "TextStream"]


class TextPiece(NamedTuple):
    """What some tokens brought.

    Attributes:
        text: text that can be shown now.
        matched_stop: the stop string that ended the text, which is not part of it.
        num_tokens: how many of the tokens were used: all of them, or those up
            to and including the one whose text completed the stop string.
    """

    text: str
    matched_stop: str | None
    num_tokens: int


class TextStream:
    """The text of one sequence's generated tokens, up to a stop string.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: what the generated tokens follow.
        stops: strings that end the text, none of them empty.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._checker = StopChecker(stops)

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Takes the next tokens. Nothing may be pushed after a matched stop."""
        text = ""
        for num_tokens, token_id in enumerate(token_ids, start=1):
            certain, matched_stop = self._checker.push(self._detokenizer.push([token_id]))
            text += certain
            if matched_stop is not None:
                return TextPiece(text, matched_stop, num_tokens)
        return TextPiece(text, None, len(token_ids))

    def fork(self) -> "TextStream":
        """A stream that goes on from here by itself; as cheap for many long stops as for none."""
        twin = copy(self)
        twin._detokenizer, twin._checker = self._detokenizer.fork(), copy(self._checker)
        return twin

    def finish(self) -> TextPiece:
        """Returns the text held back; it may still complete a stop. Call it once, at
        the end, unless a stop was matched.
        """
        certain, matched_stop = self._checker.push(self._detokenizer.flush())
        return TextPiece(certain + self._checker.flush(), matched_stop, 0)
