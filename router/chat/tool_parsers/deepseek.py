"""Tool parsers of DeepSeek: calls between special tokens, in a list between two others.

DeepSeek V3 and R1 write the kind of a tool, its name and fenced arguments:

    <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f
    ```json
    {"a": 1}
    ```<|tool_call_end|><|tool_calls_end|>

DeepSeek V3.1 writes the name and the arguments alone:

    <|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"a": 1}<|tool_call_end|><|tool_calls_end|>

The tokens have full-width bars, and blocks in place of underscores.
"""

import re
from typing import ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import (
    FENCE,
    MAX_NAME_LENGTH,
    CallSyntax,
    GeneratorToolParser,
    skip_openings,
)
from router.chat.tool_parsers.json_values import copy_value

__all__ = ["DeepSeekV3ToolParser", "DeepSeekV31ToolParser"]


def _token(name: str) -> str:
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


_LIST_START = _token("tool calls begin")
_LIST_END = _token("tool calls end")
_START = _token("tool call begin")
_END = _token("tool call end")
_SEPARATOR = _token("tool sep")
_NAME = re.compile(r"[\w.:/\-]+")


class DeepSeekV3ToolParser(GeneratorToolParser):
    """Reads calls with text before, between and after them. Both forms are read."""

    needs_special_tokens: ClassVar[bool] = True
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(f"{_START}function{_SEPARATOR}NAME\n```json\n",),
        tail=f"\n```{_END}",
        closers=(_LIST_END,),
        separators=("\n",),
        opener=_START,
        prefixes=(_LIST_START,),
    )

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        while start := (yield from text.copy_to((_LIST_START, _START), self.answer.content)):
            text.record()
            if start == _LIST_START:
                text.read(len(start))
                yield from text.skip_whitespace()
            while (yield from self._read_call()):
                if (yield from text.skip(_LIST_END, or_beginning=True)):
                    text.record()
                    break
            self.answer.content(text.take_record())

    def _read_call(self) -> Steps[bool]:
        """Returns whether there was a whole call. The record has the part that may be content."""
        text = self.text
        if not (yield from text.skip(_START)):
            return False
        name = yield from self._read_name()
        yield from skip_openings(text)
        if not name or (yield from text.peek()) != "{":
            return False
        text.take_record()
        self.answer.start_call(name)
        is_whole = yield from copy_value(text, self.answer.arguments)
        text.record()
        if not is_whole:
            return False
        yield from text.skip_whitespace()
        while (yield from text.skip_any((FENCE, _END), or_beginning=True)):
            text.record()
            yield from text.skip_whitespace()
        return True

    def _read_name(self) -> Steps[str]:
        """Reads a name, perhaps with the kind of the tool before it, up to the arguments."""
        text = self.text
        yield from text.skip_whitespace()
        name = yield from text.read_run(_NAME, MAX_NAME_LENGTH)
        if not (yield from text.skip(_SEPARATOR)):
            return ""
        yield from text.skip_whitespace()
        return (yield from text.read_run(_NAME, MAX_NAME_LENGTH)) or name


class DeepSeekV31ToolParser(DeepSeekV3ToolParser):
    """The same, for models that write the form of DeepSeek V3.1."""

    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(f"{_START}NAME{_SEPARATOR}",),
        tail=_END,
        closers=(_LIST_END,),
        opener=_START,
        prefixes=(_LIST_START,),
    )
