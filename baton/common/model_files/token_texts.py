"""How vocabularies write tokens. A leaf module that router and engine share.

A byte-level vocabulary (GPT-2, Radford et al. 2019) writes each byte as one letter.

A GGUF file may have the same text under several ids, all of which a model may draw. The
`tokenizers` package knows one id per text, so the text of each further one ends with marks,
which its decoder removes.
"""

from collections import Counter
from collections.abc import Container, Sequence

__all__ = ["DUPLICATE_MARK", "byte_level_bytes", "mark_duplicates", "without_marks"]

DUPLICATE_MARK = "\ufdd0"
"""A noncharacter of Unicode, which no text has that is exchanged between programs."""


def mark_duplicates(tokens: Sequence[str], preferred: Container[int]) -> list[str]:
    """Returns different texts for the tokens of a vocabulary.

    Of tokens with the same text, the last one keeps it, and so is the one that texts are
    encoded with, as in llama.cpp.

    Args:
        tokens: the texts, by id.
        preferred: ids that keep their text before others do, such as those of special tokens.
    """
    texts, counts = list(tokens), Counter[str]()
    if len(set(tokens)) < len(tokens):
        order = sorted(range(len(tokens)), key=lambda token_id: (token_id in preferred, token_id))
        for token_id in reversed(order):
            token = tokens[token_id]
            texts[token_id] = token + DUPLICATE_MARK * counts[token]
            counts[token] += 1
    return texts


def without_marks(text: str) -> str:
    """Returns the text that a token stands for."""
    return text.rstrip(DUPLICATE_MARK)


def byte_level_bytes(token: str) -> bytes:
    """Returns the bytes that a token of a byte-level vocabulary stands for, as its decoder reads
    them: an added token with a letter that stands for no byte is written as its own text.
    """
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode()


def _bytes_of_letters() -> dict[str, int]:
    """Printable bytes of Latin-1 are written as themselves, the others as the letters from U+0100
    on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = [*map(chr, printable), *map(chr, range(0x100, 0x100 + len(others)))]
    return dict(zip(letters, printable + others, strict=True))


_BYTE_OF_LETTER = _bytes_of_letters()
