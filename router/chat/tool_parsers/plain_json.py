"""Parsers of answers that are nothing but JSON: calls by themselves, and forced calls.

The forms are those of `baton.common.request.response_format.fields_of_tools`.
"""

from typing import ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import (
    CallSyntax,
    GeneratorToolParser,
    json_heads,
    skip_closings,
    skip_openings,
)
from router.chat.tool_parsers.json_calls import read_calls
from router.chat.tool_parsers.json_values import copy_value

__all__ = ["ForcedCallsParser", "JsonToolParser", "NamedCallParser"]


class JsonToolParser(GeneratorToolParser):
    """Reads calls that begin at the first character that is no whitespace, fenced or not.

    Calls are objects with `name` and `arguments` or `parameters`.
    """

    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(*json_heads(("",), "arguments"), *json_heads(("",), "parameters")),
        tail="}",
        closers=("]",),
        separators=(", ", ","),
        prefixes=("[",),
        argument_keys=("arguments", "parameters"),
    )

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        text.record()
        openings = yield from skip_openings(text)
        if (yield from read_calls(text, self.answer, marked=False)):
            yield from skip_closings(text, openings)
        self.answer.content(text.take_record())


class ForcedCallsParser(GeneratorToolParser):
    """Reads an array of calls, which `tool_choice: required` forces.

    A call begins when its name is complete. What a limit has left of a call before that is no
    content, and is dropped.
    """

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        text.record()
        yield from text.skip_whitespace()
        yield from read_calls(text, self.answer, marked=True, is_forced=True)
        rest = text.take_record()
        if (yield from text.peek()):
            self.answer.content(rest)


class NamedCallParser(GeneratorToolParser):
    """Makes the text the arguments of one call, as a `tool_choice` that names a function forces it.

    Args:
        name: the function's.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        yield from text.skip_whitespace()
        if (yield from text.peek()):
            self.answer.start_call(self._name)
            yield from copy_value(text, self.answer.arguments)
