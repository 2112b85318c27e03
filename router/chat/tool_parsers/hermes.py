"""`HermesToolParser`: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`.

The format of Hermes 2 Pro and 3, Qwen 2.5 and Qwen 3.
"""

import re
from typing import ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import GeneratorToolParser
from router.chat.tool_parsers.call_syntax import CallSyntax, json_heads
from router.chat.tool_parsers.json_calls import read_calls

__all__ = ["HermesToolParser"]

_START = "<tool_call>"
_END = "</tool_call>"
_EXTRA_BRACKETS = re.compile(r"[\s}\]]+")


class HermesToolParser(GeneratorToolParser):
    """Reads calls between marks, with text before, between and after them."""

    needs_special_tokens: ClassVar[bool] = True
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=json_heads((f"{_START}\n", _START), "arguments"),
        tail="}",
        closers=(f"\n{_END}", _END),
        separators=("\n",),
        opener=_START,
    )

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        while (yield from text.copy_until(_START, self.answer.content)):
            text.record(_START)
            yield from text.skip_whitespace()
            if not (yield from read_calls(text, self.answer, marked=True)):
                self.answer.content(text.take_record())
                continue
            # Models close a bracket too many, or none.
            yield from text.copy(_EXTRA_BRACKETS, lambda _: None)
            yield from text.skip(_END, or_beginning=True)
