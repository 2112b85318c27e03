"""`StructuredOutputs`: the form that a generated text must have.

A leaf module like `baton.sampling_params`. Names and meanings are those of vLLM's
`StructuredOutputsParams`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from baton.errors import InvalidArgumentError

__all__ = ["MAX_CHOICES", "MAX_JSON_DEPTH", "MAX_REGEX_BYTES", "MAX_SOURCE_BYTES"]
__all__ += ["StructuredOutputs"]

MAX_SOURCE_BYTES = 256 * 1024
"""The most UTF-8 bytes of a schema, a grammar, a structural tag, or all choices together."""
MAX_REGEX_BYTES = 16 * 1024
MAX_CHOICES = 4096
MAX_JSON_DEPTH = 64
"""How deeply a schema or structural tag may nest objects and arrays."""
_MAX_WHITESPACE_PATTERN_BYTES = 256

_FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of a generated text. Exactly one of the first six fields is set.

    Attributes:
        json: the text is JSON that this schema accepts: a JSON text or a dict. Kept as a
            compact JSON text; the order of its keys is the order of properties.
        json_object: the text is a JSON object. False means the same as None.
        regex: the whole text matches this regular expression.
        choice: the text is one of these.
        grammar: the text belongs to this grammar: Lark as llguidance reads it, or, if a rule
            is written with `::=`, the EBNF of llama.cpp (GBNF).
        structural_tag: JSON that says which parts of the text are constrained, such as the
            arguments of a tool call: a JSON text or a dict. Kept as a compact JSON text.
        disable_any_whitespace: JSON has no whitespace between its tokens.
        whitespace_pattern: a regular expression for whitespace between the tokens of JSON.

    Raises:
        InvalidArgumentError: a field is malformed, too large, or excludes another; names it.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidArgumentError(
                f"structured_outputs sets {', '.join(given) or 'no form'}; "
                f"set exactly one of {', '.join(_FORMS)}"
            )
        _CHECKS[given[0]](self)
        self._check_whitespace()

    @property
    def form(self) -> str:
        """The name of the field that is set, such as `"regex"`."""
        return next(name for name in _FORMS if getattr(self, name) is not None)

    @property
    def key(self) -> bytes:
        """A digest of the content: equal for equal constraints, in every process."""
        content = [[field.name, getattr(self, field.name)] for field in fields(self)]
        return hashlib.sha256(json.dumps(content).encode()).digest()

    def _check_json(self) -> None:
        object.__setattr__(self, "json", _compact_json("json", self.json))

    def _check_structural_tag(self) -> None:
        text = _compact_json("structural_tag", self.structural_tag)
        object.__setattr__(self, "structural_tag", text)

    def _check_json_object(self) -> None:
        if self.json_object is not True:
            raise _error("json_object", f"is {self.json_object!r}; it must be true")

    def _check_regex(self) -> None:
        _check_text("regex", self.regex, MAX_REGEX_BYTES)

    def _check_grammar(self) -> None:
        _check_text("grammar", self.grammar, MAX_SOURCE_BYTES)

    def _check_choice(self) -> None:
        choices = self.choice
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise _error("choice", "must be a list of texts")
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise _error("choice", f"has {len(choices)} entries; it must have 1 to {MAX_CHOICES}")
        num_bytes = sum(_check_text("choice", text, MAX_SOURCE_BYTES) for text in choices)
        if num_bytes > MAX_SOURCE_BYTES:
            limit = f"at most {MAX_SOURCE_BYTES} are allowed together"
            raise _error("choice", f"has {num_bytes} bytes of UTF-8; {limit}")
        object.__setattr__(self, "choice", tuple(dict.fromkeys(choices)))

    def _check_whitespace(self) -> None:
        if self.whitespace_pattern is None:
            return
        _check_text("whitespace_pattern", self.whitespace_pattern, _MAX_WHITESPACE_PATTERN_BYTES)
        if self.disable_any_whitespace:
            raise _error("whitespace_pattern", "is set with disable_any_whitespace; unset one")
        if self.form not in ("json", "json_object"):
            raise _error("whitespace_pattern", f"has no meaning for {self.form}; unset it")


_CHECKS = {
    "json": StructuredOutputs._check_json,
    "json_object": StructuredOutputs._check_json_object,
    "regex": StructuredOutputs._check_regex,
    "choice": StructuredOutputs._check_choice,
    "grammar": StructuredOutputs._check_grammar,
    "structural_tag": StructuredOutputs._check_structural_tag,
}


def _error(field: str, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"structured_outputs.{field} {problem}")


def _check_text(field: str, text: Any, most_bytes: int) -> int:
    """Returns how many bytes of UTF-8 a text has; refuses what no text of a model can match."""
    if not isinstance(text, str):
        raise _error(field, f"must be a text, not {type(text).__name__}")
    if not text:
        raise _error(field, "is empty")
    if "\0" in text:
        raise _error(field, "contains a NUL character")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        problem = f"is not valid Unicode: lone surrogate at character {error.start}"
        raise _error(field, problem) from None
    if num_bytes > most_bytes:
        raise _error(field, f"has {num_bytes} bytes of UTF-8; at most {most_bytes} are allowed")
    return num_bytes


def _compact_json(field: str, source: Any) -> str:
    """Returns the JSON text of an object, without whitespace, its keys in their order."""
    if isinstance(source, str):
        _check_text(field, source, MAX_SOURCE_BYTES)
        source = _parse_json(field, source)
    if not isinstance(source, Mapping):
        raise _error(field, f"must be a JSON object, not {type(source).__name__}")
    try:
        _check_depth(field, source)
        text = json.dumps(source, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(field, f"is not JSON: {error}") from None
    _check_text(field, text, MAX_SOURCE_BYTES)
    return text


def _parse_json(field: str, text: str) -> Any:
    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON value")

    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _error(field, f"is not JSON: {error}") from None


def _check_depth(field: str, source: Any) -> None:
    level = [source]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, Mapping | list | tuple)
            for child in (value.values() if isinstance(value, Mapping) else value)
        ]
    if any(isinstance(value, Mapping | list | tuple) for value in level):
        raise _error(field, f"nests more than {MAX_JSON_DEPTH} levels deep")
