"""Finds a model's chat templates and special tokens, in the places that `transformers` reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.file_access import find_files, read_text
from baton.common.model_files.files import open_model_files
from baton.common.model_files.tokenizer_settings import SPECIAL_TOKEN_ROLES

__all__ = ["TemplateSource", "TemplateText", "find_templates", "read_override"]

_FILE = "chat_template.jinja"
_MORE_FILES = "additional_chat_templates"
_CONFIG = "tokenizer_config.json"
_DEFAULT = "default"
_MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
_NOT_IN_PATHS = "{}\n"


@dataclass(frozen=True, slots=True)
class TemplateText:
    """A template's text, and where it is written, for errors."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The chat format that a model states.

    Attributes:
        templates: its templates by name; empty if it has none. The names that are used are
            "default" and "tool_use".
        special_tokens: texts of special tokens by name, such as "bos_token"; variables of the
            templates.
    """

    templates: Mapping[str, TemplateText] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def find_templates(model: str) -> TemplateSource:
    """Reads the templates and special tokens of a checkpoint folder, a GGUF file or a Hub
    repository.

    Template files come before the entry of `tokenizer_config.json`.

    Raises:
        ConfigurationError: there is no such model, or a file of it cannot be read.
    """
    files = open_model_files(model)
    try:
        settings = files.read_settings()
        templates = _from_files(files.path) or _from_settings(settings, str(files.locate(_CONFIG)))
        return TemplateSource(templates, _special_tokens(settings))
    except _MALFORMED as error:
        raise ConfigurationError(
            f"cannot read the chat template of {files.path}: {error}"
        ) from error


def read_override(value: str) -> TemplateText:
    """Returns the template that `--chat-template` names: a file, or the template's own text.

    Raises:
        ConfigurationError: it is neither.
    """
    try:
        return TemplateText(Path(value).read_text(encoding="utf-8"), value)
    except (OSError, ValueError) as error:
        is_text = any(character in value for character in _NOT_IN_PATHS)
        if is_text and not isinstance(error, UnicodeDecodeError):
            return TemplateText(value, "--chat-template")
        raise ConfigurationError(
            f"--chat-template is {value!r}; it must be the path of a file that can be read, "
            f"or the text of a template: {error}"
        ) from error


def _from_files(folder: Path) -> dict[str, TemplateText]:
    files = {_DEFAULT: folder / _FILE}
    files |= {path.stem: path for path in find_files(folder / _MORE_FILES, "*.jinja")}
    return {
        name: TemplateText(text, str(path))
        for name, path in files.items()
        if (text := read_text(path)) is not None
    }


def _from_settings(settings: Mapping[str, Any], origin: str) -> dict[str, TemplateText]:
    """The entry `chat_template`: one text, or a list of templates with names."""
    entry = settings.get("chat_template")
    if entry is None:
        return {}
    try:
        named = {_DEFAULT: entry} if isinstance(entry, str) else _named(entry)
    except (LookupError, TypeError):
        reason = f"chat_template is {entry!r}; it must be a text, or texts with names"
        raise ValueError(reason) from None
    return {
        name: TemplateText(_text(text), f"{origin}, chat_template {name!r}")
        for name, text in named.items()
    }


def _named(entry: Any) -> dict[str, Any]:
    if isinstance(entry, dict):
        return entry
    return {template["name"]: template["template"] for template in entry}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a chat template must be a text, not {type(value).__name__}")
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Tokens named by role, then those of the model's own names (`image_token`)."""
    roles = [f"{role}_token" for role in SPECIAL_TOKEN_ROLES]
    tokens = {name: _token_text(settings[name]) for name in roles if settings.get(name) is not None}
    own = {
        name: value
        for name, value in settings.items()
        if name.endswith("_token") and name not in roles and isinstance(value, str)
    }
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):
        own |= {name: _token_text(token) for name, token in extra.items()}
    return tokens | own


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else _text(token)
