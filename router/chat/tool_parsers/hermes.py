"""Tool parsers for calls that are JSON objects behind a tag.

`<tool_call>{"name": "f", "arguments": {...}}</tool_call>` is the format of Hermes 2 Pro and 3,
Qwen 2.5, Qwen 3, SmolLM3 and Granite 4. Granite 3 and Phi-4-mini have an array of calls behind
tags of their own.
"""

import re
from typing import ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import CallSyntax, GeneratorToolParser, json_heads, skip_openings
from router.chat.tool_parsers.json_calls import read_calls

__all__ = [
    "GraniteToolParser",
    "HermesToolParser",
    "Phi4MiniToolParser",
    "TaggedJsonToolParser",
]

_START = "<tool_call>"
_END = "</tool_call>"
_PIPED_START = "<|tool_call|>"
"""The tag of Granite 3 and Phi-4-mini; it is a token of their vocabularies."""
_BEHIND_CALL = re.compile(r"[\s}\],;`]+")


class TaggedJsonToolParser(GeneratorToolParser):
    """Reads calls, or arrays of calls, between tags, with text before, between and after them.

    Attributes:
        starts: the tags of which one stands before calls.
        end: the tag behind them; it may be missing.
    """

    needs_special_tokens: ClassVar[bool] = True
    starts: ClassVar[tuple[str, ...]]
    end: ClassVar[str]

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        while start := (yield from text.copy_to(self.starts, self.answer.content)):
            text.record()
            text.read(len(start))
            yield from skip_openings(text)
            while (yield from read_calls(text, self.answer, marked=True)):
                # Models write brackets too many or too few, and several calls behind one tag.
                yield from text.copy(_BEHIND_CALL, lambda _: None)
                if (yield from text.skip(self.end, or_beginning=True)):
                    break
                text.record()
            self.answer.content(text.take_record())


class HermesToolParser(TaggedJsonToolParser):
    """`<tool_call>` and `</tool_call>`."""

    starts = (_START,)
    end = _END
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=json_heads((f"{_START}\n", _START), "arguments"),
        tail="}",
        closers=(f"\n{_END}", _END),
        separators=("\n",),
        opener=_START,
    )


class GraniteToolParser(TaggedJsonToolParser):
    """An array behind `<|tool_call|>` (Granite 3), or behind `<tool_call>`, which some of these
    models write instead. No tag ends the array.
    """

    starts = (_PIPED_START, _START)
    end = _END
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=json_heads((f"{_PIPED_START}[", f"{_PIPED_START} ["), "arguments"),
        tail="}",
        closers=("]",),
        opener=_PIPED_START,
    )


class Phi4MiniToolParser(TaggedJsonToolParser):
    """An array between `<|tool_call|>` and `<|/tool_call|>`, or behind `functools`, which the
    model's first template asked for.
    """

    starts = (_PIPED_START, "functools[")
    end = "<|/tool_call|>"
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=json_heads((f"{_PIPED_START}[",), "arguments"),
        tail="}",
        closers=(f"]{end}",),
        opener=_PIPED_START,
    )
