"""Values of parameters that models write as plain text: from text and a schema to JSON."""

import json

from router.chat.text_input import TextInput
from router.chat.tool_parsers.parameter_schemas import Accepted
from router.chat.tool_parsers.scalars import is_json_number, json_of_number
from router.chat.tool_parsers.value_reader import ValueReader

__all__ = ["json_of"]

_NULLS = ("null", "none")
_BOOLEANS = ("true", "false")


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
