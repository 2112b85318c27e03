"""`Tokenizer`: text to token ids and back. `baton.common.model_files.files` reads its files."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from baton.common.errors import InvalidArgumentError
from baton.common.model_files.files import open_model_files
from baton.common.model_files.tokenizer_steps import byte_level_bytes, step_types, without_marks
from baton.common.request.json_text import utf8_of
from router.requests.input_threads import call_by_length

__all__ = ["Tokenizer"]

_MAX_IDS_AT_ONCE = 4096  # decoded in less than a millisecond


class Tokenizer:
    """A model's tokenizer. `load` makes one.

    Attributes:
        vocab_size: number of token ids, added tokens included.
        added_tokens: texts of the tokens that were added to the vocabulary, by id.
        special_token_ids: those of them that `decode` leaves out by default.
        byte_token_ids: ids of single bytes (`<0x0A>`) in a vocabulary with
            byte fallback, and the bytes; runs of them decode together.
        longest_token_chars: no token stands for more characters of text.
        is_byte_level: whether each token stands for the same bytes everywhere, and the text is
            their UTF-8 text (GPT-2, Llama 3, Qwen).
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.longest_token_chars: int = max(map(len, vocabulary), default=0)
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {i: without_marks(token.content) for i, token in added.items()}
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        bytes_of = {f"<0x{byte:02X}>": byte for byte in range(256)}
        self.byte_token_ids = {
            i: bytes_of[without_marks(text)]
            for text, i in vocabulary.items()
            if text.startswith("<0x") and without_marks(text) in bytes_of
        }
        self.is_byte_level = step_types(backend.decoder) == {"ByteLevel"}
        self._bytes_of = {skips: _TokenBytes(self, skips) for skips in (False, True)}

    @classmethod
    def load(cls, path_or_name: str | Path) -> "Tokenizer":
        """Loads the tokenizer of a model, as `open_model_files` finds it.

        Raises:
            ConfigurationError: there is no such model, or its tokenizer is missing, broken
                or of an unsupported kind.
        """
        return cls(open_model_files(path_or_name).load_tokenizer())

    @cached_property
    def num_leading_special_tokens(self) -> int:
        """How many special tokens `encode` adds at the start of a text."""
        (encoding,) = self._backend.encode_batch_fast(["a"])
        return encoding.special_tokens_mask.index(0)  # 1 for each token that was added

    def encode(self, text: str, add_special_tokens: bool = True, field: str = "text") -> list[int]:
        """The token ids of `text`, by default with the model's special tokens.

        Raises:
            InvalidArgumentError: `text` has no UTF-8 form (a lone surrogate); names `field`.
        """
        (ids,) = self._encode_batch([text], add_special_tokens, field)
        return ids

    def _encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, field: str
    ) -> list[list[int]]:
        """Encodes texts; `field` names them in the error for a text without a UTF-8 form."""
        for text in texts:
            utf8_of(field, text)
        # `encode_batch_fast` releases the GIL, `encode` does not.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary have no text."""
        if len(token_ids) <= _MAX_IDS_AT_ONCE:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:  # releases the GIL, which does not pay for few ids
            (text,) = self._backend.decode_batch(
                [token_ids], skip_special_tokens=skip_special_tokens
            )
        return text

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, field: str = "text"
    ) -> list[int]:
        """Like `encode`; a long text is encoded off the event loop."""
        return await call_by_length(len(text), self.encode, text, add_special_tokens, field)

    async def decode_async(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Like `decode`; many ids are decoded off the event loop."""
        ids = list(token_ids)
        return await call_by_length(len(ids), self.decode, ids, skip_special_tokens)

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of `SamplingParams.bad_words`, chosen as vLLM chooses them.

        Each word is encoded as at the start of a text and as after a space. The second
        sequence is used too if it has as many tokens as the first and begins with another one.

        Raises:
            InvalidArgumentError: a word has no tokens, or no UTF-8 form.
        """
        if not words:
            return ()
        bare = [word.lstrip() for word in words]
        encoded = self._encode_batch([*bare, *(f" {word}" for word in bare)], False, "bad_words")
        sequences = []
        for word, first, spaced in zip(
            words, encoded[: len(bare)], encoded[len(bare) :], strict=True
        ):
            if not first:
                raise InvalidArgumentError.for_field("bad_words", word, "a text that has tokens")
            sequences.append(tuple(first))
            if len(spaced) == len(first) and spaced[0] != first[0]:
                sequences.append(tuple(spaced))
        return tuple(sequences)

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` writes anything for this id; unknown ids have no text."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return False
        return bool(self.token(token_id))

    def bytes_of(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """The bytes that each token of a byte-level vocabulary stands for; unknown ids, and special
        tokens that are skipped, have none.
        """
        return self._bytes_of[skip_special_tokens]

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for an unknown id."""
        token: str | None = self._backend.id_to_token(token_id)
        return token and without_marks(token)


class _TokenBytes(dict[int, bytes]):
    """The bytes of a byte-level vocabulary's tokens, found out when they are first read."""

    def __init__(self, tokenizer: Tokenizer, skips_special: bool) -> None:
        super().__init__()
        self._tokenizer, self._skips_special = tokenizer, skips_special

    def __missing__(self, token_id: int) -> bytes:
        if not self._tokenizer.has_text(token_id, self._skips_special):
            return b""
        value = self[token_id] = byte_level_bytes(self._tokenizer.token(token_id) or "")
        return value
