"""`TokenTexts`: the text and the bytes of single tokens, for answers with log-probabilities."""

import re

from baton.common.model_files.token_texts import byte_level_bytes
from router.requests.tokenizer import Tokenizer

__all__ = ["TokenTexts"]

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR = "a"
"""Decoded before a token, because the first token of a text may lose its leading space."""


class TokenTexts:
    """Texts and bytes of a model's tokens; kept, since answers repeat them.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
        self._anchor_text = tokenizer.decode(self._anchor, skip_special_tokens=False)
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        """The token's text within a text; bytes that are no character are U+FFFD."""
        return self._lookup(token_id)[0]

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes. Those of several tokens joined are the UTF-8 of their text."""
        return self._lookup(token_id)[1]

    def is_special(self, token_id: int) -> bool:
        """Whether texts lack the token by default."""
        return token_id in self._tokenizer.special_token_ids

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a single byte, runs of which decode together."""
        return token_id in self._tokenizer.byte_token_ids

    def _lookup(self, token_id: int) -> tuple[str, bytes]:
        known = self._known.get(token_id)
        if known is None:
            text = self._decode(token_id)
            known = text, self._bytes(token_id, text)
            self._known[token_id] = known
        return known

    def _decode(self, token_id: int) -> str:
        both = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
        if self._anchor and both.startswith(self._anchor_text):
            return both[len(self._anchor_text) :]
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _bytes(self, token_id: int, text: str) -> bytes:
        if _REPLACEMENT not in text:
            return text.encode()
        written = self._tokenizer.token(token_id) or ""
        byte = _BYTE_TOKEN.fullmatch(written)
        if byte:
            return bytes([int(byte[1], 16)])
        data = byte_level_bytes(written)
        return text.encode() if data == written.encode() else data
