"""Tool parsers of DeepSeek and Kimi K2: calls between special tokens, in a list between two others.

DeepSeek V3 and R1 write the kind of a tool, its name and fenced arguments:

    <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f
    ```json
    {"a": 1}
    ```<|tool_call_end|><|tool_calls_end|>

DeepSeek V3.1 writes the name and the arguments alone:

    <|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"a": 1}<|tool_call_end|><|tool_calls_end|>

DeepSeek's tokens have full-width bars, and blocks in place of underscores. Kimi K2 has other
tokens, and an id in place of a name: `functions.f:0` for the first call, which is of `f`.
"""

import re
from typing import ClassVar

from typing_extensions import override

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import (
    FENCE,
    MAX_NAME_LENGTH,
    CallSyntax,
    GeneratorToolParser,
    skip_openings,
)
from router.chat.tool_parsers.json_values import copy_value

__all__ = ["DeepSeekV3ToolParser", "DeepSeekV31ToolParser", "KimiK2ToolParser"]


def _token(name: str) -> str:
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


_LIST_START = _token("tool calls begin")
_LIST_END = _token("tool calls end")
_START = _token("tool call begin")
_END = _token("tool call end")
_SEPARATOR = _token("tool sep")
_NAME = re.compile(r"[\w.:/\-]+")
_KIMI_START, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_LIST_START, _KIMI_LIST_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_MAX_KIMI_INDEX = 9  # of a call in a constrained answer


class DeepSeekV3ToolParser(GeneratorToolParser):
    """Reads calls with text before, between and after them. Both forms are read.

    Attributes:
        list_start: the token before calls.
        list_end: the token behind them.
        start: the token before a call.
        end: the token behind it.
        separator: the token before its arguments, or behind the kind of the tool.
    """

    needs_special_tokens: ClassVar[bool] = True
    list_start: ClassVar[str] = _LIST_START
    list_end: ClassVar[str] = _LIST_END
    start: ClassVar[str] = _START
    end: ClassVar[str] = _END
    separator: ClassVar[str] = _SEPARATOR
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
        text, starts = self.text, (self.list_start, self.start)
        while start := (yield from text.copy_to(starts, self.answer.content)):
            text.record()
            if start == self.list_start:
                text.read(len(start))
                yield from text.skip_whitespace()
            while (yield from self._read_call()):
                if (yield from text.skip(self.list_end, or_beginning=True)):
                    text.record()
                    break
            self.answer.content(text.take_record())

    def _read_call(self) -> Steps[bool]:
        """Returns whether there was a whole call. The record has the part that may be content."""
        text = self.text
        if not (yield from text.skip(self.start)):
            return False
        name = yield from self._read_name()
        yield from skip_openings(text)
        if not name or (yield from text.peek()) != "{":
            return False
        text.take_record()
        self._start_call(name)
        is_whole = yield from copy_value(text, self.answer.arguments)
        text.record()
        if not is_whole:
            return False
        yield from text.skip_whitespace()
        while (yield from text.skip_any((FENCE, self.end), or_beginning=True)):
            text.record()
            yield from text.skip_whitespace()
        return True

    def _start_call(self, name: str) -> None:
        self.answer.start_call(name)

    def _read_name(self) -> Steps[str]:
        """Reads a name, perhaps with the kind of the tool before it, up to the arguments."""
        text = self.text
        yield from text.skip_whitespace()
        name = yield from text.read_run(_NAME, MAX_NAME_LENGTH)
        yield from text.skip_whitespace()
        if not (yield from text.skip(self.separator)):
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


class KimiK2ToolParser(DeepSeekV3ToolParser):
    """Reads calls of Kimi K2, whose ids are those that the model writes: results refer to them."""

    list_start: ClassVar[str] = _KIMI_LIST_START
    list_end: ClassVar[str] = _KIMI_LIST_END
    start: ClassVar[str] = _KIMI_START
    end: ClassVar[str] = _KIMI_END
    separator: ClassVar[str] = _KIMI_SEPARATOR
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=tuple(
            f"{_KIMI_START}functions.NAME:{index}{_KIMI_SEPARATOR}"
            for index in range(_MAX_KIMI_INDEX + 1)
        ),
        tail=_KIMI_END,
        closers=(_KIMI_LIST_END,),
        opener=_KIMI_START,
        prefixes=(_KIMI_LIST_START,),
    )

    @override
    def _start_call(self, name: str) -> None:
        match = _KIMI_ID.fullmatch(name)
        assert match is not None, "names are not empty"
        self.answer.start_call(match[1], "" if name == match[1] else name)
