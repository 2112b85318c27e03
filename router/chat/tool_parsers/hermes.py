"""`HermesToolParser`: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`.

The format of Hermes 2 Pro and 3, Qwen 2.5 and Qwen 3.
"""

import re
from typing import ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import CallSyntax, GeneratorToolParser, json_heads, skip_openings
from router.chat.tool_parsers.json_calls import read_calls

__all__ = ["HermesToolParser"]

_START = "<tool_call>"
_END = "</tool_call>"
_BEHIND_CALL = re.compile(r"[\s}\],;`]+")


class HermesToolParser(GeneratorToolParser):
    """Reads calls between tags, with text before, between and after them."""

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
            yield from skip_openings(text)
            while (yield from read_calls(text, self.answer, marked=True)):
                # Models write brackets too many or too few, and several calls behind one tag.
                yield from text.copy(_BEHIND_CALL, lambda _: None)
                if (yield from text.skip(_END, or_beginning=True)):
                    break
                text.record()
            self.answer.content(text.take_record())
