"""The tokenizer files of a checkpoint folder, read with the `tokenizers` package alone.

The result encodes and decodes like `transformers.AutoTokenizer` of the same folder, without
importing it: the router must not load torch. `tokenizer.json` contains everything; an older
GPT-2 or OPT folder has `vocab.json` and `merges.txt`, and its special tokens in
`tokenizer_config.json`. A leaf module that router and workers share.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from baton.errors import ConfigurationError
from baton.hub_names import split_revision

__all__ = [
    "SPECIAL_TOKEN_ROLES",
    "eos_token_id",
    "load_tokenizer",
    "read_json",
    "read_settings",
    "resolve_folder",
    "vocabulary_digest",
]

_FILES = (
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
SPECIAL_TOKEN_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Tokens named by role (`bos_token`) are special, even if their description says otherwise."""
_EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
_DIGEST_CHARS = 32
_UNREADABLE = (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError)
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_GPT2_END_OF_TEXT = "<|endoftext|>"


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
        raise ConfigurationError(
            f"{path_or_name} is neither a folder nor a Hub repository that can be reached "
            f"({type(error).__name__})"
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
        if (folder / "tokenizer.json").is_file():
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            _add_tokens(backend, read_settings(folder))
            return backend
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return _load_gpt2(folder)
    except ConfigurationError:
        raise
    except Exception as error:  # `tokenizers` raises plain Exception for broken files
        raise ConfigurationError(f"cannot read the tokenizer in {folder}: {error}") from error
    raise ConfigurationError(_missing_files_message(folder))


def eos_token_id(folder: Path) -> int | None:
    """Returns the id of the end-of-sequence token that a checkpoint folder's tokenizer names.

    Returns:
        The id; None if the folder has no tokenizer that can be read, or it names no such token.
    """
    try:
        token = read_settings(folder).get("eos_token")
        return load_tokenizer(folder).token_to_id(_content(token)) if token else None
    except (ConfigurationError, *_UNREADABLE):
        return None  # a model is served to clients that send token ids without its tokenizer


def vocabulary_digest(folder: Path) -> str:
    """Returns a hex digest of the ids and texts of a checkpoint folder's vocabulary.

    Everything else is left out, since folders of the same tokenizer may differ in it: the form of
    the files, and added tokens, of which fine-tuned checkpoints often have more.

    Returns:
        The digest; empty if the folder has no tokenizer, or one that cannot be read.
    """
    try:
        vocabulary = _read_vocabulary(folder)
    except _UNREADABLE:
        return ""  # `load_tokenizer` says what is wrong, where a tokenizer is needed
    if not vocabulary:
        return ""
    by_id = json.dumps(sorted((i, text) for text, i in vocabulary.items()))
    return hashlib.sha256(by_id.encode()).hexdigest()[:_DIGEST_CHARS]


def _read_vocabulary(folder: Path) -> dict[str, int]:
    """The vocabulary that `load_tokenizer` loads, without added tokens; empty if there is none."""
    if (folder / "tokenizer.json").is_file():
        vocabulary = read_json(folder / "tokenizer.json")["model"]["vocab"]
        if isinstance(vocabulary, list):  # of texts with their scores
            return {text: i for i, (text, _) in enumerate(vocabulary)}
        return dict(vocabulary)
    return read_json(folder / "vocab.json") if (folder / "merges.txt").is_file() else {}


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
    settings |= read_settings(folder)
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


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns `tokenizer_config.json`, completed by the older files that it replaces.

    Raises:
        TypeError, ValueError: a file is not a JSON object.
    """
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json(folder / "special_tokens_map.json")
        added = read_json(folder / "added_tokens.json")
        settings["added_tokens_decoder"] = {i: {"content": text} for text, i in added.items()}
    return settings


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no such file.

    Raises:
        OSError: the file cannot be read.
        TypeError: it does not have an object.
        ValueError: it is not JSON.
    """
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError(f"{path} does not contain a JSON object")
    return content


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
    named = [settings.get(f"{role}_token") for role in SPECIAL_TOKEN_ROLES]
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
