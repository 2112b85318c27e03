"""The statements of a checkpoint folder about its tokenizer, besides the vocabulary.

These are in tokenizer_config.json, in the older files beside it, and in the defaults of the class
that `transformers.AutoTokenizer` makes. A leaf module that router and workers share.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken

from baton.common.file_access import has_file, read_text

__all__ = [
    "SPECIAL_TOKEN_ROLES",
    "described_tokens",
    "extra_tokens",
    "named_tokens",
    "read_json",
    "read_settings",
    "token_text",
]

SPECIAL_TOKEN_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Tokens named by role (`bos_token`) are special, even if their description says otherwise."""
_ROLE_ENTRIES = tuple(f"{role}_token" for role in SPECIAL_TOKEN_ROLES)
_GPT2, _LLAMA, _QWEN2 = "GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer"
_BYTE_LEVEL = re.compile(r'"type"\s*:\s*"ByteLevel"')
_END_OF_TEXT = "<|endoftext|>"
# Tokens that a class of `transformers` 5 has unless the files name others.
_DEFAULT_TOKENS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        _GPT2: dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
        _LLAMA: {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        _QWEN2: dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END_OF_TEXT),
    }
)
_CLASS_BY_MODEL_TYPE = MappingProxyType(
    {
        "gpt2": _GPT2,
        "opt": _GPT2,
        "qwen2": _QWEN2,
        "qwen3": _QWEN2,
    }
)


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json, completed by the older files that it replaces.

    `tokenizer_class` is the class that `AutoTokenizer` of `transformers` 5 makes; None stands for
    one that takes tokenizer.json as it is. Tokens that no file names are those of the class.

    Raises:
        TypeError, ValueError: a file is not a JSON object, or names a token by something else
            than a text or a description; names the file or the entry.
        UnreadableFileError: a file is there and cannot be read.
    """
    settings = _read_named(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= _read_named(folder / "special_tokens_map.json")
        added = _read_named(folder / "added_tokens.json")
        settings["added_tokens_decoder"] = _described(added, settings)
    class_name = _class_name(folder, settings, _read_named(folder / "config.json"))
    return {**_DEFAULT_TOKENS.get(class_name or "", {}), **settings, "tokenizer_class": class_name}


def _read_named(path: Path) -> dict[str, Any]:
    """Reads a file like `read_json`; errors of its content name it."""
    try:
        return read_json(path)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path.name} is not readable JSON: {error}") from error


def _described(ids: Mapping[str, int], settings: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns descriptions of the tokens of added_tokens.json; those that are named are special."""
    named = {token.content for token in (*named_tokens(settings), *extra_tokens(settings))}
    return {
        token_id: {"content": text, "special": text in named, "normalized": text not in named}
        for text, token_id in ids.items()
    }


def _class_name(folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Returns the class of a folder's tokenizer, by the rules of `AutoTokenizer`."""
    file = folder / "tokenizer.json"
    name = _stated_class_name(settings, config)
    if name is None and not has_file(file) and has_file(folder / "vocab.json"):
        return _GPT2  # the one class that is built from vocab.json and merges.txt
    if name == _LLAMA and _BYTE_LEVEL.search(read_text(file) or ""):
        return None  # Llama 3's tokenizer under Llama 2's name
    return name


def _stated_class_name(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    model_type = config.get("model_type")
    stated = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if model_type == "qwen2" or stated is None:  # files of Qwen2 models name wrong classes
        return _CLASS_BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    return None if model_type == "mistral" else str(stated).removesuffix("Fast")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no such file.

    Raises:
        UnreadableFileError: the file is there and cannot be read.
        TypeError: it does not have an object.
        ValueError: it is not JSON.
    """
    text = read_text(path)
    if text is None:
        return {}
    content = json.loads(text)
    if not isinstance(content, dict):
        raise TypeError(f"{path} does not contain a JSON object")
    return content


def described_tokens(settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yields the added tokens that are described with their ids, in the order of these."""
    entry = "added_tokens_decoder"
    tokens = settings[entry]
    if not isinstance(tokens, dict):
        raise ValueError(f"{entry} is {tokens!r}; it must be an object")
    if not all(token_id.isdecimal() for token_id in map(str, tokens)):
        raise ValueError(f"{entry} has the ids {list(tokens)}; they must be integers")
    for token_id in sorted(tokens, key=int):
        yield _added_token(f"{entry}, {token_id}", tokens[token_id])


def named_tokens(settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yields the tokens that are special by their name: those of the roles, and those that the
    model has names for, such as `image_token`.
    """
    entries = {entry: settings.get(entry) for entry in _ROLE_ENTRIES}
    entries |= {
        entry: token
        for entry, token in settings.items()
        if entry.endswith("_token") and isinstance(token, str)
    }
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):
        entries |= {f"extra_special_tokens, {name}": token for name, token in extra.items()}
    for entry, token in entries.items():
        if token is not None and token != "":
            yield _added_token(entry, token, special=True)


def extra_tokens(settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yields the tokens of the list `extra_special_tokens`, or of its older name. They are special
    unless the tokenizer has them as something else.
    """
    names = ("extra_special_tokens", "additional_special_tokens")
    entry = next((name for name in names if settings.get(name)), names[0])
    tokens = settings.get(entry) or []
    if not isinstance(tokens, list | dict):
        raise ValueError(f"{entry} is {tokens!r}; it must be a list or an object")
    if isinstance(tokens, list):
        yield from (_added_token(entry, token, special=True) for token in tokens)


def token_text(token: str | Mapping[str, Any]) -> str:
    """Returns the text of a token that is given as itself or as a description."""
    return token if isinstance(token, str) else str(token["content"])


def _added_token(entry: str, token: Any, **overrides: bool) -> AddedToken:
    """Makes the token that an entry names or describes."""
    if isinstance(token, str):
        return AddedToken(token, **overrides)
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        raise ValueError(f"{entry} is {token!r}; it must be a text or an object with a content")
    flags = {name: value for name, value in token.items() if name not in ("__type", "id")}
    try:
        return AddedToken(**(flags | overrides))
    except (TypeError, ValueError) as error:  # a flag is not a bool
        raise ValueError(f"{entry} is {token!r}: {error}") from None
