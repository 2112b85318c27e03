"""`TextPlaces`: where tokens begin in a text, for answers with log-probabilities."""

import codecs

from router.http.token_texts import TokenTexts

__all__ = ["TextPlaces"]

_new_decoder = codecs.getincrementaldecoder("utf-8")


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
