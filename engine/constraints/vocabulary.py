"""`Vocabulary`: the bytes that each token of a model adds to its text.

Read from the `tokenizers` backend of the model's folder, for both grammar backends alike.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from baton.common.errors import ConfigurationError
from baton.common.model_files.tokenizer_steps import byte_level_bytes, step_types, without_marks

__all__ = ["Mask", "Vocabulary", "bits_of"]

Mask = npt.NDArray[np.int32]
"""One row of a table of masks: bit i % 32 of word i // 32 says whether token i may come next."""

_WORD_START = "\u2581"  # Metaspace writes a space as this character
_BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


@dataclass(frozen=True)
class Vocabulary:
    """The token table that grammars are compiled against.

    Attributes:
        tokens: the bytes of each token id that the model has logits for. Special tokens, and
            ids that the tokenizer does not know, have none: no text contains them.
        special_tokens: names of special tokens, by id.
        eos_token_ids: the model's end-of-sequence ids; at least one.
    """

    tokens: tuple[bytes, ...]
    special_tokens: Mapping[int, str]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, backend: tokenizers.Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> "Vocabulary":
        """Reads the table of a tokenizer.

        Args:
            backend: the model's tokenizer.
            vocab_size: the model's number of logits, which may be more or fewer than the
                tokenizer's tokens.
            eos_token_ids: the model's.

        Raises:
            ConfigurationError: the tokenizer's tokens have no bytes of their own, or the model
                has no end-of-sequence token.
        """
        eos = tuple(sorted({i for i in eos_token_ids if i < vocab_size}))
        if not eos:
            raise ConfigurationError(
                "structured outputs need an end-of-sequence token; the model has none"
            )
        to_bytes = _bytes_of_token(backend)
        added = backend.get_added_tokens_decoder()
        tokens = [b""] * vocab_size
        for text, token_id in backend.get_vocab(with_added_tokens=False).items():
            if token_id < vocab_size and token_id not in added:
                tokens[token_id] = to_bytes(without_marks(text))
        special = {}
        for token_id, token in added.items():
            if token_id >= vocab_size:
                continue
            if token.special or token_id in eos:
                special[token_id] = token.content
            else:
                tokens[token_id] = without_marks(token.content).encode()
        for token_id in eos:
            tokens[token_id] = b""
        return cls(tuple(tokens), special, eos)

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self.tokens)

    @property
    def num_mask_words(self) -> int:
        """Length of a mask: one bit per token id, in int32 words."""
        return -(-self.size // 32)

    @cached_property
    def meaningless_bits(self) -> tuple[npt.NDArray[np.intp], Mask]:
        """The bits of a mask that stand for no token with text though a grammar may set them:
        those of end-of-sequence tokens, and those past the vocabulary.
        """
        return bits_of((*self.eos_token_ids, *range(self.size, 32 * self.num_mask_words)))

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """For each byte that is a token's whole text, the first such token."""
        token_ids: dict[int, int] = {}
        for token_id, text in enumerate(self.tokens):
            if len(text) == 1:
                token_ids.setdefault(text[0], token_id)
        return token_ids

    @cached_property
    def sorted_tokens(self) -> list[bytes]:
        """All different token bytes, in order, to look up extensions of a text."""
        return sorted(set(self.tokens) - {b""})

    def to_json(self) -> str:
        """A text from which `from_json` makes an equal table."""
        return json.dumps(
            {
                "tokens": [token.decode("latin-1") for token in self.tokens],
                "special_tokens": list(self.special_tokens.items()),
                "eos_token_ids": self.eos_token_ids,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Makes the table that `to_json` wrote."""
        data = json.loads(text)
        return cls(
            tokens=tuple(token.encode("latin-1") for token in data["tokens"]),
            special_tokens={int(i): name for i, name in data["special_tokens"]},
            eos_token_ids=tuple(data["eos_token_ids"]),
        )


def bits_of(token_ids: Iterable[int]) -> tuple[npt.NDArray[np.intp], Mask]:
    """Returns the words of a mask that contain the tokens, each once, and their bits in them."""
    bits: dict[int, int] = {}
    for token_id in token_ids:
        bits[token_id // 32] = bits.get(token_id // 32, 0) | 1 << token_id % 32
    values = np.array(list(bits.values()), dtype=np.uint32).view(np.int32)
    return np.array(list(bits), dtype=np.intp), values


def _bytes_of_token(backend: tokenizers.Tokenizer) -> Any:
    """Returns the function from a token's text in the vocabulary to its bytes."""
    kinds = step_types(backend.decoder)
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return lambda token: _BYTE_TOKENS.get(token) or token.replace(_WORD_START, " ").encode()
    raise ConfigurationError(
        f"structured outputs support byte-level and byte-fallback tokenizers; this one decodes "
        f"with {', '.join(sorted(kinds)) or 'nothing'}"
    )
