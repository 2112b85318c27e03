"""Reads calls that are JSON objects: `{"name": "f", "arguments": {...}}`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from router.chat.text_input import Steps, TextInput
from router.chat.tool_parsers.base import MAX_NAME_LENGTH, AnswerBuilder
from router.chat.tool_parsers.json_values import copy_quoted_value, copy_value, read_string

__all__ = ["read_calls"]

_ARGUMENTS = ("arguments", "parameters")
_BETWEEN_CALLS = " \t\r\n,"
_OTHER_KEYS = ("type", "id", "index")

Accepts: TypeAlias = Callable[[str], bool]


def read_calls(
    text: TextInput,
    answer: AnswerBuilder,
    *,
    marked: bool,
    accepts: Accepts | None = None,
    is_forced: bool = False,
) -> Steps[bool]:
    """Reads one call, or an array of calls.

    Args:
        text: it records from the text that is content if there is no call. After a malformed
            call, it is read up to where the mistake is.
        answer: gets the calls, and the record of an array's malformed part. A cut array's
            last comma is dropped.
        marked: whether a mark says that this is a call. Without one, an object with a key that
            no call has is content as soon as the key is read, and so is one without arguments.
        accepts: whether a function of this name may be called. An object that names another one
            is content. None: every function may.
        is_forced: whether the text has no other form. A call then begins with its name, and the
            cut beginning of a call is dropped.

    Returns:
        Whether there was a call. If not, `text` still records; otherwise it does not.
    """
    rules = _Rules(marked, accepts, is_forced)
    first = yield from text.peek()
    if first == "[":
        text.read()
        return (yield from _read_array(text, answer, rules))
    return first == "{" and (yield from _CallReader(text, answer, rules).read())


@dataclass(frozen=True, slots=True)
class _Rules:
    """Rules for what counts as a call; the fields are arguments of `read_calls`."""

    marked: bool
    accepts: Accepts | None
    is_forced: bool


def _read_array(text: TextInput, answer: AnswerBuilder, rules: _Rules) -> Steps[bool]:
    """Reads calls behind the opening bracket."""
    found = False
    while True:
        yield from text.skip_whitespace()
        if not (yield from _CallReader(text, answer, rules).read()):
            break
        found = True
        text.record()
        yield from text.skip_whitespace()
        if (yield from text.skip("]")):
            text.take_record()
            return True
        if not (yield from text.skip(",")):
            break
    if found:
        is_cut = not (yield from text.peek())
        rest = text.take_record()
        if not is_cut or (rest.strip(_BETWEEN_CALLS) and not rules.is_forced):
            answer.content(rest)
    return found


class _CallReader:
    """Reads one call.

    The call is reported when its name is known and its arguments begin. Until then its text is
    held back: it is content if the object turns out to be no call.
    """

    def __init__(self, text: TextInput, answer: AnswerBuilder, rules: _Rules) -> None:
        self._text = text
        self._answer = answer
        self._rules = rules
        self._name: str | None = None
        # Arguments that come before the name.
        self._held: list[str] = []
        self._has_arguments = False
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
        if key in _ARGUMENTS and not self._has_arguments:
            return (yield from self._read_arguments())
        if self._rules.marked or self._started or key in _OTHER_KEYS:
            return (yield from copy_value(text, lambda _: None))
        return False

    def _read_name(self) -> Steps[bool]:
        name = yield from read_string(self._text, MAX_NAME_LENGTH)
        accepts = self._rules.accepts
        if not name or (accepts is not None and not accepts(name)):
            return False
        self._name = name
        if self._has_arguments or self._rules.is_forced:
            self._start("".join(self._held))
        return True

    def _read_arguments(self) -> Steps[bool]:
        first = yield from self._text.peek()
        if not first or (first not in "{\"'" and not self._rules.marked):
            return False
        self._has_arguments = True
        sink: Callable[[str], object] = self._answer.arguments
        if self._name is None:
            sink = self._held.append
        elif not self._started:
            self._start("")
        if first in ("'", '"'):
            return (yield from copy_quoted_value(self._text, sink))
        return (yield from copy_value(self._text, sink))

    def _start(self, arguments: str) -> None:
        self._text.take_record()
        self._answer.start_call(self._name or "")
        self._answer.arguments(arguments)
        self._started = True

    def _end(self) -> None:
        """Reports a call without arguments."""
        if self._rules.marked and self._name and not self._has_arguments:
            if not self._started:
                self._start("")
            self._answer.arguments("{}")
