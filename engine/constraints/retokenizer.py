"""`Retokenizer`: the tokens of text that a grammar forces ("jump-forward decoding").

Tokens that were sent are never changed, so forced text can only be appended. The text is
always right: the bytes of the appended tokens are a prefix of the forced text. Their
tokenization is the tokenizer's own for everything generated so far, if that is so already.

The last bytes of the forced text may become part of a token that reaches into text that the
model has yet to choose. The tokenizer's tokens before such a token are its tokens of the text
before it (merges do not cross a boundary that remains), so the tokens that are kept are those
that begin the tokenization of every prefix of the text at which such a token can start.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from os.path import commonprefix

import tokenizers

from baton.common.model_files.tokenizer_steps import step_types
from engine.constraints.matcher import Matcher
from engine.constraints.vocabulary import Vocabulary

__all__ = ["Retokenizer"]

# Tokens before the forced text that are tokenized with it. Fewer are tried if the sequence's
# tokens are not the tokenizer's own.
_WINDOWS = (16, 4, 1)


class Retokenizer:
    """Tokenizes forced text as the model's tokenizer would have.

    Args:
        backend: the model's tokenizer, without truncation and padding.
        vocabulary: its token table.
    """

    def __init__(self, backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._encode = _make_encoder(backend)
        self._longest = max(map(len, vocabulary.sorted_tokens), default=0)

    def forced_tokens(self, matcher: Matcher, token_ids: Sequence[int]) -> list[int]:
        """Returns the tokens that can be appended to a sequence without drawing them.

        They may be fewer than the forced text has, or none, if their tokenization depends on
        what follows. If only some of them are appended, the next call returns the others.

        Args:
            matcher: the sequence's; it has accepted all its generated tokens.
            token_ids: the sequence, prompt included.
        """
        text = _without_partial_end(matcher.forced_text())
        if not text:
            return []
        window, tokens = self._align(token_ids, text)
        if not tokens:
            return []
        twin = matcher.fork()
        if not twin.replay(tokens):
            return []
        return tokens if twin.is_terminated else self._certain(window, text, tokens)

    def _align(self, token_ids: Sequence[int], text: bytes) -> tuple[list[int], list[int]]:
        """Returns the tokens before the forced text that are tokenized with it, and its own."""
        for width in _WINDOWS:
            window = self._window(token_ids, width)
            tokens = self._tokenize_after(window, text)
            if window and tokens:
                return window, tokens
        return [], self._tokenize(text)

    def _window(self, token_ids: Sequence[int], width: int) -> list[int]:
        """Returns the last tokens, from a whole character on; special tokens end the search."""
        window: list[int] = []
        for token_id in reversed(token_ids[-width:]):
            if not 0 <= token_id < self._vocabulary.size or not self._vocabulary.tokens[token_id]:
                break
            window.insert(0, token_id)
        while window and _is_within_character(self._vocabulary.tokens[window[0]]):
            del window[0]
        return window

    def _certain(self, window: list[int], text: bytes, tokens: list[int]) -> list[int]:
        """Returns the leading tokens that stay whatever text follows."""
        kept = tokens
        for end in self._open_ends(text):
            if not kept:
                break
            prefix = self._tokenize_after(window, _without_partial_end(text[:end]))
            kept = list(commonprefix([kept, prefix]))  # noqa: RUF071 - of lists
        return kept

    def _open_ends(self, text: bytes) -> Iterator[int]:
        """Yields where a token can start that is longer than the rest of the text."""
        table = self._vocabulary.sorted_tokens
        for end in range(max(0, len(text) - self._longest + 1), len(text)):
            rest = text[end:]
            index = bisect_right(table, rest)
            if index < len(table) and table[index].startswith(rest):
                yield end

    def _tokenize_after(self, window: list[int], text: bytes) -> list[int]:
        """Returns the tokens of a text after others; none if the others would change."""
        tokens = self._tokenize(self._bytes_of(window) + text)
        return tokens[len(window) :] if tokens[: len(window)] == window else []

    def _tokenize(self, text: bytes) -> list[int]:
        """Returns the tokenizer's tokens; none if their bytes are not the text's."""
        try:
            token_ids = self._encode(text.decode())
        except UnicodeDecodeError:
            return []
        return token_ids if self._bytes_of(token_ids) == text else []

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes:
        tokens = self._vocabulary.tokens
        return b"".join([tokens[i] if i < len(tokens) else b"" for i in token_ids])


def _make_encoder(backend: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
    """Returns the function from text within a text to its tokens.

    Tokenizers with Metaspace write a space before each text that they encode, so their BPE
    model is called alone.
    """
    if "ByteLevel" in step_types(backend.decoder):
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
    return lambda text: [token.id for token in backend.model.tokenize(text.replace(" ", "\u2581"))]


def _is_within_character(text: bytes) -> bool:
    """Whether a text begins with a continuation byte of UTF-8."""
    return text[0] & 0xC0 == 0x80


def _without_partial_end(text: bytes) -> bytes:
    """Returns a text without an incomplete character at its end."""
    for size in range(1, min(4, len(text) + 1)):
        byte = text[-size]
        if byte >= 0xC0:  # the first byte of a character of 2, 3 or 4
            is_partial = size < 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return text[:-size] if is_partial else text
        if byte < 0x80:
            break
    return text
