"""The tokenizer files of a checkpoint folder, read with the `tokenizers` package alone.

The result encodes and decodes like `transformers.AutoTokenizer` of the same folder, without
importing it: the router must not load torch. `tokenizer.json` contains everything; an older
GPT-2 or OPT folder has `vocab.json` and `merges.txt`, and its special tokens in
`tokenizer_config.json`. A leaf module that router and workers share.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from baton.common.errors import ConfigurationError
from baton.common.file_access import UnreadableFileError, has_file, missing_files_error
from baton.common.model_files.named_models import split_revision
from baton.common.model_files.tokenizer_settings import (
    described_tokens,
    extra_tokens,
    named_tokens,
    read_json,
    read_settings,
    token_text,
)
from baton.common.model_files.tokenizer_steps import (
    set_byte_level_prefix,
    set_word_start,
    step_types,
)

__all__ = [
    "eos_token_id",
    "load_tokenizer",
    "resolve_folder",
    "vocabulary_digest",
]

_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_DIGEST_CHARS = 32
_MALFORMED = (AttributeError, KeyError, RecursionError, TypeError, ValueError)
_GPT2, _LLAMA, _QWEN2 = "GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer"


def resolve_folder(path_or_name: str | Path) -> Path:
    """Returns the local folder; downloads the tokenizer files, chat templates and
    generation_config.json of a Hub repository.

    Raises:
        ConfigurationError: there is no such folder or repository.
    """
    folder = Path(path_or_name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        name, revision = split_revision(str(path_or_name))
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except (OSError, ValueError) as error:
        reason = type(error).__name__
        if isinstance(error, OSError) and error.filename is not None:  # of the cache
            reason = f"{error.strerror}: {error.filename}"
        raise ConfigurationError(
            f"{path_or_name} is neither a folder nor a Hub repository that can be reached "
            f"({reason})"
        ) from error


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Loads the tokenizer of a checkpoint folder, with truncation and padding turned off.

    Raises:
        ConfigurationError: the tokenizer files are missing, broken or of an unsupported kind.
    """
    backend = _read_backend(folder)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    try:
        if has_file(folder / "tokenizer.json"):
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            settings = read_settings(folder)
            _add_tokens(backend, settings)
            _apply_prefix_space(backend, settings)
            backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
            return backend
        if has_file(folder / "vocab.json") and has_file(folder / "merges.txt"):
            return _load_gpt2(folder)
    except ConfigurationError:
        raise
    except Exception as error:  # `tokenizers` raises plain Exception for broken files
        raise ConfigurationError(f"cannot read the tokenizer in {folder}: {error}") from error
    raise missing_files_error(folder, _missing_files(folder))


def eos_token_id(folder: Path) -> int | None:
    """Returns the id of the end-of-sequence token that a checkpoint folder's tokenizer names.

    Returns:
        The id; None if the folder has no tokenizer or a malformed one, or it names no such token.

    Raises:
        UnreadableFileError: a file is there and cannot be read.
    """
    try:
        token = read_settings(folder).get("eos_token")
        if not token:
            return None
        vocabulary = _read_vocabulary(folder, with_added_tokens=True)
        known = vocabulary.get(token_text(token))
        # A token that no file has an id for gets one when the tokenizer is built, which is slow.
        is_id = type(known) is int
        return known if is_id else load_tokenizer(folder).token_to_id(token_text(token))
    except UnreadableFileError:
        raise
    except (ConfigurationError, *_MALFORMED):
        return None  # a model is served to clients that send token ids without its tokenizer


def vocabulary_digest(folder: Path) -> str:
    """Returns a hex digest of the ids and texts of a checkpoint folder's vocabulary.

    Everything else is left out, since folders of the same tokenizer may differ in it: the form of
    the files, and added tokens, of which fine-tuned checkpoints often have more.

    Returns:
        The digest; empty if the folder has no tokenizer, or a malformed one.

    Raises:
        UnreadableFileError: a file is there and cannot be read.
    """
    try:
        vocabulary = _read_vocabulary(folder)
    except _MALFORMED:
        return ""  # `load_tokenizer` says what is wrong, where a tokenizer is needed
    if not vocabulary:
        return ""
    by_id = json.dumps(sorted((i, text) for text, i in vocabulary.items()))
    return hashlib.sha256(by_id.encode()).hexdigest()[:_DIGEST_CHARS]


def _read_vocabulary(folder: Path, *, with_added_tokens: bool = False) -> dict[str, int]:
    """The vocabulary that `load_tokenizer` loads, by default without the added tokens; empty if
    there is none.
    """
    if not has_file(folder / "tokenizer.json"):
        return read_json(folder / "vocab.json") if has_file(folder / "merges.txt") else {}
    content = read_json(folder / "tokenizer.json")
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # of texts with their scores
        vocabulary = {text: i for i, (text, _) in enumerate(vocabulary)}
    added = content.get("added_tokens", ()) if with_added_tokens else ()
    return {**vocabulary, **{token["content"]: token["id"] for token in added}}


def _missing_files(folder: Path) -> str:
    if not has_file(folder / "tokenizer.model"):
        return "has no tokenizer: neither tokenizer.json nor vocab.json and merges.txt"
    return (
        "has tokenizer.model but no tokenizer.json; convert it once with: "
        "pip install sentencepiece && python -c 'from transformers import AutoTokenizer as T; "
        f'T.from_pretrained("{folder}").save_pretrained("{folder}")\''
    )


def _load_gpt2(folder: Path) -> tokenizers.Tokenizer:
    """Byte-level BPE from `vocab.json` and `merges.txt`."""
    settings = read_settings(folder)
    if settings["tokenizer_class"] != _GPT2:
        raise ConfigurationError(
            f"{folder} has no tokenizer.json, and {settings['tokenizer_class']} cannot be built "
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
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    return backend


def _apply_prefix_space(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Makes texts begin with a space where tokenizer_config.json and the class say so.

    The class decides in `transformers` 5, which also replaces the other steps of tokenizer.json by
    its own; these stay, since they are those that the model was trained with.
    """
    name, stated = settings["tokenizer_class"], settings.get("add_prefix_space")
    if "ByteLevel" in step_types(backend.pre_tokenizer, backend.decoder):
        if name in (_GPT2, _QWEN2):
            set_byte_level_prefix(backend, bool(stated))
    elif name == _LLAMA and isinstance(backend.model, models.BPE):
        has_prefix = stated is None or bool(stated)
        scheme = ("always" if settings.get("legacy") else "first") if has_prefix else "never"
        set_word_start(backend, scheme)


def _bos_eos_template(
    backend: tokenizers.Tokenizer, settings: dict[str, Any]
) -> processors.TemplateProcessing:
    """Adds BOS and EOS where `add_bos_token` and `add_eos_token` say so."""
    bos, eos = (
        [token_text(token)] if (token := settings.get(f"{role}_token")) and is_added else []
        for role, is_added in (
            ("bos", settings.get("add_bos_token")),
            ("eos", settings.get("add_eos_token")),
        )
    )
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}],
    )


def _add_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Adds the tokens of `settings` that `backend` lacks or has with other flags."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    tokens = {token.content: token for token in described_tokens(settings)}
    for token in named_tokens(settings):
        before = tokens.get(token.content) or known.get(token.content)
        tokens[token.content] = token if before is None else _as_special(before)
    for token in extra_tokens(settings):
        if token.content not in known:
            tokens.setdefault(token.content, token)
    backend.add_tokens(
        [token for text, token in tokens.items() if not _is_same(token, known.get(text))]
    )


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(**token.__getstate__() | {"special": True})


def _is_same(token: AddedToken, other: AddedToken | None) -> bool:
    """Whether two tokens with the same text have the same flags."""
    return other is not None and token.__getstate__() == other.__getstate__()
