"""`TokenTexts`: texts and bytes of single tokens. `TextPlaces`: where they begin in a text."""

import codecs
import re

from baton.common.model_files.tokenizer_steps import byte_level_bytes
from router.requests.tokenizer import Tokenizer

__all__ = ["TextPlaces", "TokenTexts"]

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR = "a"
"""Decoded before a token, because the first token of a text may lose its leading space."""
_new_decoder = codecs.getincrementaldecoder("utf-8")


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


class TextPlaces:
    """Counts the characters of a text token by token. A token may have a part of a character; the
    tokens of one character have the place of that character.

    Args:
        texts: the texts of the model's tokens.

    Attributes:
        place: characters before the next token, without one that is not complete.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self.place = 0
        self._texts = texts
        self._decoder = _new_decoder(errors="replace")
        self._run, self._run_place = bytearray(), 0  # byte tokens that decode together

    def push(self, token_id: int) -> int:
        """Adds a token that the text has; returns the place at which it begins."""
        data = self._texts.bytes_of(token_id)
        if self._texts.is_byte(token_id):
            self._run_place = self._run_place if self._run else self.place
            self._run += data
        else:
            self._end_run()
        is_broken = bool(self._decoder.getstate()[0]) and not _continues_character(data)
        begin = self.place + is_broken
        self.place += len(self._decoder.decode(data))
        return begin

    def move(self, place: int) -> None:
        """Continues at another place."""
        self.place = place
        self._run.clear()
        self._decoder.reset()

    def _end_run(self) -> None:
        """Ends a run of byte tokens: a bad byte makes each byte of its run a character."""
        try:
            self._run.decode()
        except UnicodeDecodeError:
            self.move(self._run_place + len(self._run))
        self._run.clear()


def _continues_character(data: bytes) -> bool:
    """Whether bytes begin with one that is not the first of a character in UTF-8."""
    return bool(data) and data[0] & 0xC0 == 0x80
