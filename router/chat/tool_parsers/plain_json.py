"""`JsonToolParser`: an answer that is a JSON array of calls, or one call."""

from typing import ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import GeneratorToolParser
from router.chat.tool_parsers.call_syntax import CallSyntax, json_heads
from router.chat.tool_parsers.json_calls import read_calls

__all__ = ["JsonToolParser"]


class JsonToolParser(GeneratorToolParser):
    """Reads calls that begin at the first character that is no whitespace.

    Calls are objects with `name` and `arguments` or `parameters`. The array of calls that
    `tool_choice: required` forces has this form, for every model.
    """

    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(*json_heads(("[", ""), "arguments"), *json_heads(("[", ""), "parameters")),
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
        yield from text.skip_whitespace()
        if not (yield from read_calls(text, self.answer, marked=False)):
            self.answer.content(text.take_record())
