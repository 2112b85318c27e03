"""Parameters whose values models write as plain text: from texts and a schema to JSON."""

import json

from router.chat.text_input import TextInput
from router.chat.tool_parsers.parameter_schemas import Accepted, FunctionSchema
from router.chat.tool_parsers.scalars import Sink, escape, is_json_number, json_of_number
from router.chat.tool_parsers.value_reader import ValueReader

__all__ = ["ParameterWriter", "json_of"]

_NULLS = ("null", "none")
_BOOLEANS = ("true", "false")


class ParameterWriter:
    """Writes the arguments of one call, parameter by parameter.

    Text is written as it comes; the value of another type when it is complete.

    Args:
        sink: called with each piece of the arguments' JSON.
        schema: the function's.

    Attributes:
        names: the parameters that have begun.
    """

    def __init__(self, sink: Sink, schema: FunctionSchema) -> None:
        self._sink = sink
        self._schema = schema
        self._accepted = Accepted()
        self._pieces: list[str] = []
        self.names: set[str] = set()

    def begin(self, name: str, accepted: Accepted | None = None) -> None:
        """Begins a parameter.

        Args:
            name: the parameter's.
            accepted: what its value may be; None: what the schema accepts.
        """
        self._sink(f'{", " if self.names else "{"}"{escape(name)}": ')
        self.names.add(name)
        self._accepted = self._schema.accepted(name) if accepted is None else accepted
        if self._accepted.is_any_text:
            self._sink('"')

    def add(self, piece: str) -> None:
        """Adds text to the parameter's value."""
        if self._accepted.is_any_text:
            self._sink(escape(piece))
        else:
            self._pieces.append(piece)

    def end(self, *, is_whole: bool) -> None:
        """Ends the parameter's value. One that is not whole is written as it is."""
        if self._accepted.is_any_text:
            self._sink('"' if is_whole else "")
            return
        value = "".join(self._pieces)
        self._pieces.clear()
        self._sink(json_of(value, self._accepted) if is_whole else value)

    def finish(self) -> None:
        """Ends the arguments."""
        self._sink("}" if self.names else "{}")


def json_of(value: str, accepted: Accepted) -> str:
    """Returns the JSON for a value: the first reading of its text that its schema accepts.

    The readings are null, true, false or a literal of JSON or Python, then the text itself. If
    none is accepted, the value is text if some text would be, or else what it can be read as.

    Args:
        value: what the model wrote.
        accepted: what the parameter's schema accepts.
    """
    written = value.strip()
    literal = _literal(written)
    texts = [text for text in (value, written) if accepted.accepts(text)]
    is_text = bool(texts) and literal is not None and _is_rather_text(written, literal)
    if literal is not None and not is_text and _accepts(accepted, literal):
        return literal if "number" in accepted.types else _without_fraction(literal)
    if literal is None or accepted.may_be_text:
        return json.dumps(texts[0] if texts else value, ensure_ascii=False)
    return literal


def _accepts(accepted: Accepted, literal: str) -> bool:
    try:
        return accepted.accepts(json.loads(literal))
    except RecursionError:
        return False


def _is_rather_text(written: str, literal: str) -> bool:
    """Whether a literal is text where text is accepted: in quotes, or a number such as 007."""
    is_odd_number = json_of_number(written) == literal and not is_json_number(written)
    return is_odd_number or literal.startswith('"')


def _without_fraction(literal: str) -> str:
    """Returns an integer as JSON Schema has it, without a fraction of zero or an exponent."""
    value = json.loads(literal)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else literal


def _literal(written: str) -> str | None:
    """Returns the JSON of a literal of JSON or Python; None for other text."""
    word = written.lower()
    if word in _NULLS:
        return "null"
    if word in _BOOLEANS:
        return word
    try:
        if is_json_number(written):
            return json_of_number(written)
        return json.dumps(json.loads(written), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return _python_literal(written)


def _python_literal(written: str) -> str | None:
    text = TextInput()
    text.push(written)
    text.end()
    pieces: list[str] = []
    try:
        next(ValueReader(text, pieces.append, is_python=True).read())
    except StopIteration as stop:
        if stop.value and not text.num_unread:
            return "".join(pieces)
    return None
