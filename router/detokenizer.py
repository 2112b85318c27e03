"""Token ids to text, piece by piece, never half a character.

The text of a token depends on its neighbours: a character may be spread over
several tokens, and the first word of a text loses its leading space. So a short
window is decoded twice, without and with the new tokens, and the difference is
the new text: the prefix and read offsets of Text Generation Inference and vLLM.
Joined, the pieces are what decoding everything at once would give.
"""

from collections.abc import Sequence
from copy import copy
from os.path import commonprefix

from router.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

# What a decoder writes for bytes that are no character, or not yet.
_REPLACEMENT = "\ufffd"
# The longest UTF-8 sequence; every token that has text has at least one byte.
_MAX_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """The text of one sequence's generated tokens, as they come.

    Special tokens have no text. Text is held back while more tokens could change
    it: within a character, and, in vocabularies with byte fallback, until a run
    of byte tokens ends, since one bad byte turns the whole run into U+FFFD.
    The cost per token does not grow with the sequence.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: what the generated tokens follow; its end is context.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = self._tail(prompt_token_ids)  # tokens whose text is out
        self._pending: list[int] = []  # tokens after them, whose text is not

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that they complete."""
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def fork(self) -> "IncrementalDetokenizer":
        """A detokenizer that goes on from here by itself."""
        twin = copy(self)
        twin._pending = self._pending.copy()
        return twin

    def flush(self) -> str:
        """Returns what is held back, as it stands. Call it at the end."""
        return self._release() if self._pending else ""

    def _push_one(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id):
            return ""
        self._pending.append(token_id)
        return "" if self._may_change() else self._release()

    def _may_change(self) -> bool:
        """Whether a further token could change the text of the pending ones."""
        if self._pending[-1] in self._tokenizer.byte_token_ids:
            return True
        # Bytes before the last four cannot belong to a character still open.
        nearby = self._context[-_MAX_CHARACTER_BYTES:] + self._pending[-_MAX_CHARACTER_BYTES:]
        end = self._tokenizer.decode(nearby[-_MAX_CHARACTER_BYTES:])
        return end.endswith(_REPLACEMENT)

    def _release(self) -> str:
        """The pending tokens' text; they become the context."""
        before = self._tokenizer.decode(self._context)
        after = self._tokenizer.decode(self._context + self._pending)
        # A prompt may end in half a character, which the new tokens then change.
        num_known = len(commonprefix([before, after]))  # noqa: RUF071 - characters are meant
        text = after[num_known:]
        if text:
            self._context, self._pending = self._pending, []
        return text

    def _tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The end of the prompt that the text after it depends on."""
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if len(tail) > _MAX_CHARACTER_BYTES and tail[-1] not in self._tokenizer.byte_token_ids:
                break
            if self._tokenizer.has_text(token_id):
                tail.append(token_id)
        return tail[::-1]
