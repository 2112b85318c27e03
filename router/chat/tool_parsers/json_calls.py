"""Reads calls that are JSON objects: `{"name": "f", "arguments": {...}}`."""

from collections.abc import Callable

from router.chat.answer_builder import AnswerBuilder
from router.chat.text_input import Steps, TextInput
from router.chat.tool_parsers.base import MAX_NAME_LENGTH
from router.chat.tool_parsers.json_values import (
    copy_string_rest,
    copy_unescaped,
    copy_value,
    read_string,
)

__all__ = ["read_calls"]

_ARGUMENTS = ("arguments", "parameters")
_BETWEEN_CALLS = " \t\r\n,"
_OTHER_KEYS = ("type", "id", "index")


def read_calls(text: TextInput, answer: AnswerBuilder, *, marked: bool) -> Steps[bool]:
    """Reads one call, or an array of calls.

    Args:
        text: it records from the text that is content if there is no call. After a malformed
            call, it is read up to where the mistake is.
        answer: gets the calls, and the record of an array's malformed part. A cut array's
            last comma is dropped.
        marked: whether a mark says that this is a call. Without one, an object with a key that
            no call has is content as soon as the key is read, and so is one without arguments.

    Returns:
        Whether there was a call. If not, `text` still records.
    """
    first = yield from text.peek()
    if first == "[":
        return (yield from _read_array(text, answer, marked))
    return first == "{" and (yield from _CallReader(text, answer, marked).read())


def _read_array(text: TextInput, answer: AnswerBuilder, marked: bool) -> Steps[bool]:
    found = False
    text.read()
    while True:
        yield from text.skip_whitespace()
        if not (yield from _CallReader(text, answer, marked).read()):
            break
        found = True
        text.record()
        yield from text.skip_whitespace()
        if (yield from text.skip("]")):
            return True
        if not (yield from text.skip(",")):
            break
    if found:
        is_cut = not (yield from text.peek())
        rest = text.take_record()
        if not is_cut or rest.strip(_BETWEEN_CALLS):
            answer.content(rest)
    return found


class _CallReader:
    """Reads one call.

    The call is reported when its name is known and its arguments begin. Until then its text is
    held back: it is content if the object turns out to be no call.
    """

    def __init__(self, text: TextInput, answer: AnswerBuilder, marked: bool) -> None:
        self._text = text
        self._answer = answer
        self._marked = marked
        self._name: str | None = None
        # Arguments that come before the name.
        self._held: list[str] | None = None
        self._started = False

    def read(self) -> Steps[bool]:
        """Returns whether the text was a call, complete or not."""
        if not (yield from self._text.skip("{")):
            return False
        while True:
            yield from self._text.skip_whitespace()
            if (yield from self._text.skip("}")):
                self._end()
                return self._started
            if not (yield from self._read_member()):
                return self._started
            yield from self._text.skip_whitespace()
            yield from self._text.skip(",")

    def _read_member(self) -> Steps[bool]:
        """Reads a key and its value. Returns False if they are malformed or of no call."""
        text = self._text
        key = yield from read_string(text, MAX_NAME_LENGTH)
        yield from text.skip_whitespace()
        if key is None or not (yield from text.skip(":")):
            return False
        yield from text.skip_whitespace()
        if key == "name" and self._name is None:
            return (yield from self._read_name())
        if key in _ARGUMENTS and not self._started and self._held is None:
            return (yield from self._read_arguments())
        if self._marked or self._started or key in _OTHER_KEYS:
            return (yield from copy_value(text, lambda _: None))
        return False

    def _read_name(self) -> Steps[bool]:
        self._name = yield from read_string(self._text, MAX_NAME_LENGTH)
        if self._name and self._held is not None:
            self._start("".join(self._held))
        return bool(self._name)

    def _read_arguments(self) -> Steps[bool]:
        first = yield from self._text.peek()
        if not first or (first not in '{"' and not self._marked):
            return False
        sink: Callable[[str], object] = self._answer.arguments
        if self._name is None:
            self._held = []
            sink = self._held.append
        else:
            self._start("")
        if first == '"':
            return (yield from self._read_quoted_arguments(sink))
        return (yield from copy_value(self._text, sink))

    def _read_quoted_arguments(self, sink: Callable[[str], object]) -> Steps[bool]:
        """Reads arguments given as a string, which stands for the text of an object."""
        self._text.read()
        if (yield from self._text.skip('"')):
            sink("{}")
            return True
        if (yield from self._text.peek()) == "{":
            return (yield from copy_unescaped(self._text, sink))
        sink('"')
        return (yield from copy_string_rest(self._text, sink))

    def _start(self, arguments: str) -> None:
        self._text.take_record()
        self._answer.start_call(self._name or "")
        self._answer.arguments(arguments)
        self._started = True

    def _end(self) -> None:
        """Reports a call without arguments."""
        if self._marked and self._name and not self._started:
            self._start("{}")
