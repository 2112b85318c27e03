"""`StructuredOutputs`: the form that a generated text must have.

A leaf module like `baton.common.request.sampling_params`. Names and meanings are those of vLLM's
`StructuredOutputsParams`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import MAX_JSON_BYTES, check_text, compact_json
from baton.common.request.json_values import array_at, boolean_at
from baton.common.request.response_format import fields_of_response_format, fields_of_tools
from baton.common.request.schema_parts import MAX_PARTS, SchemaPart, value_at
from baton.common.short_texts import short_name, short_repr

__all__ = [
    "MAX_CHOICES",
    "MAX_REGEX_BYTES",
    "MAX_SOURCE_BYTES",
    "StructuredOutputs",
    "StructuredOutputsParams",
]

MAX_SOURCE_BYTES = MAX_JSON_BYTES
"""The most UTF-8 bytes of a schema, a grammar, a structural tag, or all choices together."""
MAX_REGEX_BYTES = 16 * 1024
MAX_CHOICES = 4096
_MAX_WHITESPACE_PATTERN_BYTES = 256
_MAX_NAMED_FIELDS = 3

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
        parts: the schemas within `json` or `structural_tag` that the client sent in fields of
            their own. `of_tools` sets them.

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
    parts: Sequence[SchemaPart] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        stated = [name for name in _FORMS if getattr(self, name) is not None]
        if len(stated) != 1:
            raise InvalidArgumentError(
                f"structured_outputs sets {', '.join(stated) or 'no form'}; "
                f"set exactly one of {', '.join(_FORMS)}"
            )
        self._check_form()
        self._check_whitespace()
        self._check_parts()

    @classmethod
    def of(cls, value: "StructuredOutputs | Mapping[str, Any]") -> "StructuredOutputs":
        """The value, or the one that a mapping of its fields describes, as in JSON.

        Raises:
            InvalidArgumentError: it is neither, or a field is unknown or malformed; names it.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            limit = "a StructuredOutputs or a mapping of its fields"
            raise InvalidArgumentError.for_field("structured_outputs", value, limit)
        names = [field.name for field in fields(cls) if field.compare]
        for name in value:
            if name not in names:
                raise InvalidArgumentError(
                    f"structured_outputs has no field {short_repr(name)}; it has {', '.join(names)}"
                )
        return cls(**value)

    @classmethod
    def of_response_format(cls, response_format: Mapping[str, Any]) -> "StructuredOutputs | None":
        """The form that OpenAI's `response_format` states; None for `{"type": "text"}`.

        Args:
            response_format: its `type` is `text`, `json_object`, `json_schema` or, as in vLLM,
                `structural_tag`. A schema is enforced whatever `strict` says.

        Raises:
            InvalidArgumentError: a part is unknown or malformed; names it.
        """
        form = fields_of_response_format(response_format)
        return None if form is None else cls(**form)

    @classmethod
    def of_tools(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None,
        parallel_tool_calls: bool = True,
        schema_fields: Sequence[str] = (),
    ) -> "StructuredOutputs | None":
        """The form of the tool calls that OpenAI's `tool_choice` forces, as in vLLM.

        Args:
            tools: the tools, as OpenAI describes functions.
            tool_choice: "required": the text is a JSON array of objects with the `name` and the
                `parameters` of a tool. A named function: the text is the JSON object of its
                parameters. "auto", "none" and None force nothing.
            parallel_tool_calls: False: the array of "required" has one call.
            schema_fields: the client's fields of the tools' schemas, for errors; empty: those of
                OpenAI's chat API.

        Returns:
            The form; None if no call is forced.

        Raises:
            InvalidArgumentError: a part is unknown or malformed; names it.
        """
        form = fields_of_tools(tools, tool_choice, parallel_tool_calls, schema_fields)
        return None if form is None else cls(**form)

    @property
    def form(self) -> str:
        """The name of the field that is set, such as `"regex"`."""
        return next(name for name in _FORMS if getattr(self, name) is not None)

    @property
    def client_field(self) -> str:
        """The client's fields that state the form, for errors."""
        names = list(dict.fromkeys(short_name(part.field) for part in self.parts)) or [
            _name(self.form)
        ]
        further = len(names) - _MAX_NAMED_FIELDS
        return ", ".join(names[:_MAX_NAMED_FIELDS]) + (
            f" and {further} more" if further > 0 else ""
        )

    @property
    def key(self) -> bytes:
        """A digest of the content: equal for equal constraints, in every process."""
        content = sorted(asdict(self).items())
        return hashlib.sha256(json.dumps(content).encode()).digest()

    def _check_form(self) -> None:
        match form := self.form:
            case "json" | "structural_tag":
                object.__setattr__(self, form, compact_json(_name(form), getattr(self, form)))
            case "json_object":
                if self.json_object is not True:
                    raise _error(form, f"is {short_repr(self.json_object)}; it must be true")
            case "regex":
                check_text(_name(form), self.regex, MAX_REGEX_BYTES)
            case "grammar":
                check_text(_name(form), self.grammar, MAX_SOURCE_BYTES)
            case "choice":
                self._check_choice()

    def _check_choice(self) -> None:
        choices = array_at(_name("choice"), self.choice)
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise _error("choice", f"has {len(choices)} entries; it must have 1 to {MAX_CHOICES}")
        num_bytes = sum(check_text(_name("choice"), text, MAX_SOURCE_BYTES) for text in choices)
        if num_bytes > MAX_SOURCE_BYTES:
            limit = f"at most {MAX_SOURCE_BYTES} are allowed together"
            raise _error("choice", f"has {num_bytes} bytes of UTF-8; {limit}")
        object.__setattr__(self, "choice", tuple(dict.fromkeys(choices)))

    def _check_parts(self) -> None:
        if not self.parts:
            return
        if len(self.parts) > MAX_PARTS:
            raise _error("parts", f"has {len(self.parts)} entries; at most {MAX_PARTS} are allowed")
        if self.form not in ("json", "structural_tag"):
            raise _error("parts", f"has no meaning for {self.form}; unset it")
        document = json.loads(getattr(self, self.form))
        for part in self.parts:
            try:
                value_at(document, part.pointer)
            except LookupError:
                limit = f"a JSON pointer into {self.form}"
                raise _error(
                    "parts", f"has {short_repr(part.pointer)}; it must be {limit}"
                ) from None
        object.__setattr__(self, "parts", tuple(self.parts))

    def _check_whitespace(self) -> None:
        boolean_at(_name("disable_any_whitespace"), self.disable_any_whitespace)
        if self.whitespace_pattern is None:
            return
        check_text(
            _name("whitespace_pattern"), self.whitespace_pattern, _MAX_WHITESPACE_PATTERN_BYTES
        )
        if self.disable_any_whitespace:
            raise _error("whitespace_pattern", "is set with disable_any_whitespace; unset one")
        if self.form not in ("json", "json_object"):
            raise _error("whitespace_pattern", f"has no meaning for {self.form}; unset it")


StructuredOutputsParams = StructuredOutputs
"""vLLM's name of the class."""


def _error(field: str, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{_name(field)} {problem}")


def _name(field: str) -> str:
    """The name of a field in errors."""
    return f"structured_outputs.{field}"
