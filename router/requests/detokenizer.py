"""Detokenizers turn one sequence's token ids into text piece by piece, never half a character.

Joined, the pieces equal the text of all tokens decoded at once. `make_detokenizer` chooses one:

In a *byte-level* vocabulary (GPT-2, Llama 3, Qwen) each token stands for the same bytes
everywhere. Their UTF-8 text is decoded as they come.

In any other vocabulary the text of a token depends on the tokens beside it: a character may be
spread over several tokens, and the first word of a text loses its leading space. Therefore a short
window is decoded twice, without and with the new tokens, and the difference is the new text.
(Text Generation Inference and vLLM call its bounds prefix and read offset.)
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from copy import copy
from os.path import commonprefix

from router.requests.tokenizer import Tokenizer

__all__ = ["ByteLevelDetokenizer", "WindowDetokenizer", "make_detokenizer"]

_REPLACEMENT = "\ufffd"
"""The decoder's text for bytes that are no character, or not yet."""
_MAX_CHARACTER_BYTES = 4
"""The longest UTF-8 sequence; every token that has text has at least one byte."""
_MAX_TAIL_TOKENS = 256
"""About the most tokens of a prompt that are decoded again with the first generated ones."""


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> "ByteLevelDetokenizer | WindowDetokenizer":
    """Makes the detokenizer of one sequence.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: the tokens before the generated ones; the last of them are context.
        skip_special_tokens: special tokens have no text.
        spaces_between_special_tokens: if not, an added token that follows another one is
            written without the space that some decoders put before it.
    """
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
    is_spaced = skip_special_tokens or spaces_between_special_tokens
    return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens, is_spaced)


class ByteLevelDetokenizer:
    """Turns the tokens of a byte-level vocabulary into text as they come.

    Bytes are held back while they may become a character.

    Args:
        tokenizer: the model's tokenizer, which is byte-level.
        prompt_token_ids: the tokens before the generated ones, which may end within a character.
        skip_special_tokens: special tokens have no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._bytes_of = tokenizer.bytes_of(skip_special_tokens)
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
            tail = self._bytes_of[token_id] + tail
        _, num_decoded = utf_8_decode(tail, "replace", False)
        self._held = tail[num_decoded:]
        # The prompt's own text ends with U+FFFD for them.
        self._is_begun_by_prompt = bool(self._held)

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds the next tokens; returns the text that they complete."""
        bytes_of = self._bytes_of
        return self._decode(b"".join([bytes_of[token_id] for token_id in token_ids]))

    def fork(self) -> "ByteLevelDetokenizer":
        """Returns an independent copy."""
        return copy(self)

    def flush(self) -> str:
        """Returns the text that is held back, complete or not. Called at the end."""
        return self._decode(b"", is_end=True)

    def _decode(self, data: bytes, is_end: bool = False) -> str:
        data = self._held + data
        text, num_decoded = utf_8_decode(data, "replace", is_end)
        self._held = data[num_decoded:]
        if self._is_begun_by_prompt and text:
            self._is_begun_by_prompt = False
            text = text.removeprefix(_REPLACEMENT)
        return text


class WindowDetokenizer:
    """Turns the tokens of any vocabulary into text as they come.

    Text is held back while more tokens could change it: within a character and, in
    vocabularies with byte fallback, until a run of byte tokens ends, since one bad
    byte turns the whole run into U+FFFD. The cost per token does not grow with the
    sequence.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: the tokens before the generated ones; the last of them are context.
        skip_special_tokens: special tokens have no text.
        is_spaced: whether an added token that follows another one is written with the space that
            some decoders put before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        is_spaced: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._is_spaced = is_spaced
        self._context = self._tail(prompt_token_ids)  # tokens whose text was returned
        self._pending: list[int] = []  # tokens after them, whose text was not

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds the next tokens; returns the text that they complete."""
        if len(token_ids) > 1 and not self._pending:
            text = self._push_all(token_ids)
            if text is not None:
                return text
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def fork(self) -> "WindowDetokenizer":
        """Returns an independent copy."""
        twin = copy(self)
        twin._pending = self._pending.copy()
        return twin

    def flush(self) -> str:
        """Returns the text that is held back, complete or not. Called at the end."""
        return self._release() if self._pending else ""

    def _push_all(self, token_ids: Sequence[int]) -> str | None:
        """Adds tokens at once, which costs less than one by one; returns their text.

        Returns None, and adds nothing, if a further token could change the text.
        """
        has_text, skips = self._tokenizer.has_text, self._skips_special
        self._pending = [token_id for token_id in token_ids if has_text(token_id, skips)]
        if self._pending and self._is_spaced and not self._may_change():
            return self._release()
        self._pending = []
        return None

    def _push_one(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id, self._skips_special):
            return ""
        self._pending.append(token_id)
        return "" if self._may_change() else self._release()

    def _may_change(self) -> bool:
        """Whether a further token could change the text of the pending ones."""
        if self._pending[-1] in self._tokenizer.byte_token_ids:
            return True
        # Bytes before the last four cannot belong to an incomplete character.
        nearby = self._context[-_MAX_CHARACTER_BYTES:] + self._pending[-_MAX_CHARACTER_BYTES:]
        end = self._decode(nearby[-_MAX_CHARACTER_BYTES:])
        return end.endswith(_REPLACEMENT)

    def _release(self) -> str:
        """Returns the pending tokens' text; the tokens become the context."""
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        # A prompt may end within a character, whose text the new tokens then change.
        num_known = len(commonprefix([before, after]))  # noqa: RUF071 - characters are meant
        text = after[num_known:]
        if not self._is_spaced:
            text = self._without_space(text)
        if text:
            self._context, self._pending = self._pending, []
        return text

    def _tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, which the text after it depends on.

        Of a longer run of bytes only the last ones count, from the start of a character on: each
        candidate decodes them.
        """
        bytes_of, tail = self._tokenizer.byte_token_ids, list[int]()
        for token_id in reversed(prompt_token_ids):
            if len(tail) > _MAX_CHARACTER_BYTES and tail[-1] not in bytes_of:
                break
            num_over = len(tail) - _MAX_TAIL_TOKENS
            if num_over >= 0 and not (
                num_over < _MAX_CHARACTER_BYTES and _continues_character(bytes_of[tail[-1]])
            ):
                break
            if self._tokenizer.has_text(token_id, self._skips_special):
                tail.append(token_id)
        return tail[::-1]

    def _without_space(self, text: str) -> str:
        """Removes the decoder's space between two added tokens from the pending tokens' text."""
        added = self._tokenizer.added_tokens
        is_second = bool(self._context) and self._context[-1] in added
        if is_second and text.startswith(f" {added.get(self._pending[0], text)}"):
            return text[1:]
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skips_special)


def _continues_character(byte: int) -> bool:
    """Whether a byte is one after the first of a character in UTF-8."""
    return byte & 0xC0 == 0x80
