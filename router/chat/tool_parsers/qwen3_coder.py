"""`Qwen3CoderToolParser`: calls in tags, one per parameter.

The format of Qwen3-Coder and Qwen 3.5:

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>
"""

import json
import re
from collections.abc import Callable
from typing import ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import MAX_NAME_LENGTH, GeneratorToolParser
from router.chat.tool_parsers.call_syntax import CallSyntax
from router.chat.tool_parsers.parameter_types import is_text, json_of, parameter_schema

__all__ = ["Qwen3CoderToolParser"]

_START = "<tool_call>"
_END = "</tool_call>"
_NAME = re.compile(r"[^<>\n]+")


class Qwen3CoderToolParser(GeneratorToolParser):
    """Reads calls between marks and makes JSON of their parameters.

    A parameter is text unless the schema of the request's tool says otherwise. Text is passed on
    as it comes; the value of another type is held back until it is complete.
    """

    needs_special_tokens: ClassVar[bool] = True
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(f"{_START}\n<function=NAME>\n", f"{_START}<function=NAME>"),
        tail="</function>",
        closers=(f"\n{_END}", _END),
        separators=("\n",),
        opener=_START,
        has_json_arguments=False,
    )

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        while (yield from text.copy_until(_START, self.answer.content)):
            text.record(_START)
            yield from text.skip_whitespace()
            while (yield from self._read_call()):
                text.record()
                yield from text.skip_whitespace()
                if (yield from text.skip(_END, or_beginning=True)):
                    text.record()
                    break
            self.answer.content(text.take_record())

    def _read_call(self) -> Steps[bool]:
        """Returns whether there was a whole call. The record has the part that is content."""
        text, answer = self.text, self.answer
        name = yield from self._read_tag("function")
        if not name:
            return False
        text.take_record()
        answer.start_call(name)
        separator = "{"
        while True:
            text.record()
            yield from text.skip_whitespace()
            if (yield from text.skip("</function>")):
                answer.arguments("{}" if separator == "{" else "}")
                return True
            key = yield from self._read_tag("parameter")
            if not key:
                return False
            text.take_record()
            answer.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._read_value(name, key)):
                return False

    def _read_tag(self, kind: str) -> Steps[str]:
        """Reads `<kind=name>` and returns the name; "" if the tag does not come next."""
        text = self.text
        if not (yield from text.skip(f"<{kind}=")):
            return ""
        name = yield from text.read_run(_NAME, MAX_NAME_LENGTH)
        return name if (yield from text.skip(">")) else ""

    def _read_value(self, name: str, key: str) -> Steps[bool]:
        """Reads a value and its end tag. One line break on either side is not part of it."""
        schema = parameter_schema(self.tools, name, key)
        arguments = self.answer.arguments
        yield from self.text.skip("\n")
        if is_text(schema):
            arguments('"')
            sink = _WithoutLastBreak(lambda piece: arguments(_in_string(piece)))
            ended = yield from self.text.copy_until("</parameter>", sink)
            arguments('"' if ended else "")
            return ended
        pieces: list[str] = []
        ended = yield from self.text.copy_until("</parameter>", pieces.append)
        value = "".join(pieces)
        arguments(json_of(value.removesuffix("\n"), schema) if ended else value)
        return ended


class _WithoutLastBreak:
    """Passes text on, but keeps a line break until more text follows it."""

    def __init__(self, sink: Callable[[str], object]) -> None:
        self._sink = sink
        self._held = ""

    def __call__(self, piece: str) -> None:
        piece = self._held + piece
        self._held = "\n" if piece.endswith("\n") else ""
        self._sink(piece.removesuffix("\n"))


def _in_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
