"""Text to token ids and back, with the `tokenizers` package alone.

Reads the files of a Hugging Face checkpoint folder and gives the same results as
`transformers.AutoTokenizer` for the same folder, without importing it: the router
process must not load torch. `tokenizer.json` contains everything; an older GPT-2 or
OPT folder has `vocab.json` and `merges.txt`, and its special tokens in
`tokenizer_config.json`.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from baton.errors import ConfigurationError, InvalidArgumentError

__all__ = ["MAX_INLINE_LENGTH", "Tokenizer", "read_json", "resolve_folder"]

MAX_INLINE_LENGTH = 4096
"""Characters or token ids that the event loop handles itself; a thread handles longer prompts,
which would delay other requests.
"""

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
# Tokens named by role (`bos_token`) are special, even if their description says otherwise.
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_GPT2_END_OF_TEXT = "<|endoftext|>"
_MOST_IDS_AT_ONCE = 4096  # decoded in less than a millisecond


class Tokenizer:
    """A model's tokenizer. `load` makes one.

    Attributes:
        vocab_size: number of token ids, added tokens included.
        added_tokens: texts of the tokens that were added to the vocabulary, by id.
        special_token_ids: those of them that `decode` leaves out by default.
        byte_token_ids: ids of single bytes (`<0x0A>`) in a vocabulary with
            byte fallback; runs of them decode together.
        longest_token_chars: no token stands for more characters of text.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.longest_token_chars: int = max(
            map(len, backend.get_vocab(with_added_tokens=True)), default=0
        )
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {i: token.content for i, token in added.items()}
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        byte_ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_token_ids = frozenset(i for i in byte_ids if i is not None)

    @classmethod
    def load(cls, path_or_name: str | Path) -> "Tokenizer":
        """Loads the tokenizer of a checkpoint folder or of a Hub repository.

        Raises:
            ConfigurationError: there is no such folder or repository, or its
                tokenizer files are missing, broken or of an unsupported kind.
        """
        return cls(_load_backend(resolve_folder(path_or_name)))

    @cached_property
    def num_leading_special_tokens(self) -> int:
        """How many special tokens `encode` adds at the start of a text."""
        (encoding,) = self._backend.encode_batch_fast(["a"])
        return encoding.special_tokens_mask.index(0)  # 1 for each token that was added

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`, by default with the model's special tokens.

        Raises:
            InvalidArgumentError: `text` has no UTF-8 form (a lone surrogate).
        """
        (ids,) = self._encode_batch([text], add_special_tokens, "text")
        return ids

    def _encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, field: str
    ) -> list[list[int]]:
        """Encodes texts; `field` names them in the error for a text without a UTF-8 form."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidArgumentError(
                    f"{field} is not valid Unicode: lone surrogate at character {error.start}"
                ) from None
        # `encode_batch_fast` releases the GIL, `encode` does not.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary have no text."""
        if len(token_ids) <= _MOST_IDS_AT_ONCE:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:  # releases the GIL, which does not pay for few ids
            (text,) = self._backend.decode_batch(
                [token_ids], skip_special_tokens=skip_special_tokens
            )
        return text

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Like `encode`; a long text is encoded off the event loop."""
        if len(text) <= MAX_INLINE_LENGTH:
            return self.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens)

    async def decode_async(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Like `decode`; many ids are decoded off the event loop."""
        if len(token_ids) <= MAX_INLINE_LENGTH:
            return self.decode(list(token_ids), skip_special_tokens)
        return await asyncio.to_thread(self.decode, list(token_ids), skip_special_tokens)

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

    async def encode_bad_words_async(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Like `encode_bad_words`; many words are encoded off the event loop."""
        if sum(map(len, words)) <= MAX_INLINE_LENGTH:
            return self.encode_bad_words(words)
        return await asyncio.to_thread(self.encode_bad_words, words)

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` writes anything for this id; unknown ids have no text."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return False
        return bool(self._backend.id_to_token(token_id))


def resolve_folder(path_or_name: str | Path) -> Path:
    """Returns the local folder; downloads the files of a Hub repository that the router reads.

    Raises:
        ConfigurationError: there is no such folder or repository.
    """
    folder = Path(path_or_name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path_or_name), allow_patterns=list(_FILES)))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path_or_name} is neither a folder nor a Hub repository that can be reached "
            f"({type(error).__name__})"
        ) from error


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    try:
        if (folder / "tokenizer.json").is_file():
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            _add_tokens(backend, _read_settings(folder))
            return backend
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return _load_gpt2(folder)
    except ConfigurationError:
        raise
    except Exception as error:  # `tokenizers` raises plain Exception for broken files
        raise ConfigurationError(f"cannot read the tokenizer in {folder}: {error}") from error
    raise ConfigurationError(_missing_files_message(folder))


def _missing_files_message(folder: Path) -> str:
    if not (folder / "tokenizer.model").is_file():
        return f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json and merges.txt"
    return (
        f"{folder} has tokenizer.model but no tokenizer.json; convert it once with: "
        "pip install sentencepiece && python -c 'from transformers import AutoTokenizer as T; "
        f'T.from_pretrained("{folder}").save_pretrained("{folder}")\''
    )


def _load_gpt2(folder: Path) -> tokenizers.Tokenizer:
    """Byte-level BPE from `vocab.json` and `merges.txt`."""
    settings = {f"{name}_token": _GPT2_END_OF_TEXT for name in ("bos", "eos", "unk")}
    settings |= _read_settings(folder)
    tokenizer_class = settings.get("tokenizer_class", _GPT2_CLASSES[0])
    if tokenizer_class not in _GPT2_CLASSES:
        raise ConfigurationError(
            f"{folder} has no tokenizer.json, and {tokenizer_class} cannot be built "
            "from vocab.json and merges.txt"
        )
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(settings.get("add_prefix_space", False))
    )
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, settings)
    backend.post_processor = _bos_eos_template(backend, settings)
    return backend


def _bos_eos_template(
    backend: tokenizers.Tokenizer, settings: dict[str, Any]
) -> processors.TemplateProcessing:
    """Adds BOS and EOS where `add_bos_token` and `add_eos_token` say so."""
    bos = [_content(settings["bos_token"])] if settings.get("add_bos_token") else []
    eos = [_content(settings["eos_token"])] if settings.get("add_eos_token") else []
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}],
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """Reads `tokenizer_config.json`, completed by the older files that it replaces."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json(folder / "special_tokens_map.json")
        added = read_json(folder / "added_tokens.json")
        settings["added_tokens_decoder"] = {i: {"content": text} for text, i in added.items()}
    return settings


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no such file.

    Raises:
        TypeError, ValueError: the file has something else.
    """
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _add_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Adds the tokens of `settings` that `backend` lacks or does not know as special."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, AddedToken] = {}
    for token in _described_tokens(settings):
        before = missing.get(token.content) or known.get(token.content)
        if before is None or (token.special and not before.special):
            missing[token.content] = token
    backend.add_tokens(list(missing.values()))


def _described_tokens(settings: dict[str, Any]) -> Iterator[AddedToken]:
    """Yields added tokens in the order of their ids, then those that are named by role."""
    by_id = {int(i): token for i, token in settings["added_tokens_decoder"].items()}
    for _, token in sorted(by_id.items()):
        yield _as_added_token(token)
    named = [settings.get(f"{role}_token") for role in _ROLES]
    for name in _EXTRA_TOKENS:
        extra = settings.get(name) or []
        named.extend(extra.values() if isinstance(extra, dict) else extra)
    for token in filter(None, named):
        yield _as_added_token(token, special=True)


def _as_added_token(token: str | dict[str, Any], **overrides: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, **overrides)
    flags = {name: value for name, value in token.items() if name not in ("__type", "id")}
    return AddedToken(**(flags | overrides))


def _content(token: str | dict[str, Any]) -> str:
    """The text of a token given as itself or as a description."""
    return str(token["content"]) if isinstance(token, dict) else token
