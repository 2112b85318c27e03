"""The steps of a tokenizer, the bytes of byte-level tokens, and marks of texts that several have.

A GGUF file may have the same text under several ids, all of which a model may draw. The
`tokenizers` package knows one id per text, so the text of each further one ends with marks,
which its decoder removes.
"""

import json
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

__all__ = [
    "DUPLICATE_MARK",
    "byte_level_bytes",
    "mark_duplicates",
    "set_byte_level_prefix",
    "set_word_start",
    "step_types",
    "without_marks",
]

DUPLICATE_MARK = "\ufdd0"
"""A noncharacter of Unicode, which no text has that is exchanged between programs."""
_SPACE = "\u2581"
_PARTS = ("normalizers", "pretokenizers", "decoders")
_SENTENCEPIECE = {"Metaspace", "Prepend", "Replace"}


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


def step_types(*steps: Any) -> set[str]:
    """Returns the types of steps and of their parts; None is no step."""
    return {
        part["type"]
        for step in steps
        if step is not None
        for part in _parts(json.loads(step.__getstate__()))
    }


def set_byte_level_prefix(backend: tokenizers.Tokenizer, has_prefix: bool) -> None:
    """Sets whether a byte-level splitter writes a space before a text without one."""
    step = backend.pre_tokenizer
    if step is None:
        return
    state = json.loads(step.__getstate__())
    for part in _parts(state):
        if part["type"] == "ByteLevel":
            part["add_prefix_space"] = has_prefix
    step.__setstate__(json.dumps(state).encode())
    backend.pre_tokenizer = step


def set_word_start(backend: tokenizers.Tokenizer, scheme: str) -> None:
    """Sets where a tokenizer of SentencePiece's kind writes a space before a text without one.

    Args:
        backend: the tokenizer; one with other steps stays as it is.
        scheme: "always" (after each special token too), "first" or "never".
    """
    if not step_types(backend.normalizer, backend.pre_tokenizer) <= _SENTENCEPIECE:
        return
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme=scheme, split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)


def _parts(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a step, or its parts if it is a sequence of others, which may be sequences too."""
    if step["type"] != "Sequence":
        yield step
    for name in _PARTS:
        for part in step.get(name, ()):
            yield from _parts(part)


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
