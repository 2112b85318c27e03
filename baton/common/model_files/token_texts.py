"""Texts of tokens that are in a vocabulary twice.

A GGUF file may have the same text under several ids, all of which a model may draw. The
`tokenizers` package knows one id per text, so the text of each further one ends with marks,
which its decoder removes. A leaf module that router and engine share.
"""

from collections import Counter
from collections.abc import Container, Sequence

__all__ = ["DUPLICATE_MARK", "mark_duplicates", "without_marks"]

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
