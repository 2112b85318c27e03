"""Tool parsers for calls in Python: `[f(a=1), g(b="x")]`.

The format of Llama 3.2 and 4, Gemma 3 and other models. The arguments, which are Python literals,
become JSON. Llama 4 may write `<|python_start|>` before the list, and `<|python_end|>` behind it.
LFM2 and OLMo 3 have tags of their own around calls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import (
    MAX_NAME_LENGTH,
    PYTHON_START,
    CallSyntax,
    GeneratorToolParser,
    skip_closings,
    skip_openings,
)
from router.chat.tool_parsers.json_calls import read_calls
from router.chat.tool_parsers.value_reader import ValueReader, skip_blanks

__all__ = [
    "Lfm2ToolParser",
    "Olmo3ToolParser",
    "PythonicToolParser",
    "TaggedPythonicToolParser",
]

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"\w+")


class PythonicToolParser(GeneratorToolParser):
    """Reads a list that begins at the first character that is no whitespace.

    A call is reported when its name and the name of its first argument, or its end, are read.
    """

    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=("[NAME(",), tail=")]", has_json_arguments=False
    )

    @classmethod
    def write_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Returns the list of calls."""
        texts = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            for name, arguments in calls
        ]
        return f"[{', '.join(texts)}]"

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        text.record()
        openings = yield from skip_openings(text, (PYTHON_START,))
        if (yield from text.skip("[")) and (yield from self._read_list()):
            yield from skip_closings(text, openings)
        self.answer.content(text.take_record())

    def _read_list(self) -> Steps[bool]:
        """Reads calls and the closing bracket. If not, the record has what is content."""
        text = self.text
        yield from skip_blanks(text)
        while (yield from self._read_call()):
            text.record()
            yield from skip_blanks(text)
            has_more = yield from text.skip(",")
            yield from skip_blanks(text)
            if (yield from text.skip("]")):
                return True
            if not has_more:
                return False
        return False

    def _read_call(self) -> Steps[bool]:
        """Returns whether there was a whole call. The record has the part that is content."""
        text = self.text
        name = yield from text.read_run(_NAME, MAX_NAME_LENGTH)
        if not name or not (yield from text.skip("(")):
            return False
        yield from skip_blanks(text)
        if (yield from text.skip(")")):
            self._start(name, "{}")
            return True
        key = yield from self._read_key()
        if not key:
            return False
        self._start(name, "{")
        return (yield from self._read_arguments(key))

    def _read_arguments(self, key: str) -> Steps[bool]:
        """Reads the arguments behind the first one's name, and the closing parenthesis."""
        text, answer = self.text, self.answer
        while True:
            answer.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from ValueReader(text, answer.arguments, is_python=True).read()):
                return False
            text.record()
            yield from skip_blanks(text)
            more = yield from text.skip(",")
            yield from skip_blanks(text)
            if (yield from text.skip(")")):
                answer.arguments("}")
                return True
            key = (yield from self._read_key()) if more else ""
            if not key:
                return False
            text.take_record()
            answer.arguments(", ")

    def _read_key(self) -> Steps[str]:
        """Reads the name of an argument, with the equals sign. Returns "" if there is none."""
        text = self.text
        key = yield from text.read_run(_KEY, MAX_NAME_LENGTH)
        yield from skip_blanks(text)
        if not (yield from text.skip("=")):
            return ""
        yield from skip_blanks(text)
        return key

    def _start(self, name: str, arguments: str) -> None:
        self.text.take_record()
        self.answer.start_call(name)
        self.answer.arguments(arguments)


class TaggedPythonicToolParser(PythonicToolParser):
    """Reads calls between tags, with text before, between and after them.

    The calls are a list, or one follows the other. A model that is told to write JSON writes an
    array of JSON objects between the same tags.

    Attributes:
        start: the tag before calls.
        end: the tag behind them; the end of the text may stand for it.
    """

    needs_special_tokens: ClassVar[bool] = True
    start: ClassVar[str]
    end: ClassVar[str]

    @classmethod
    def write_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Returns the list of calls, between the tags."""
        return f"{cls.start}{super().write_calls(calls)}{cls.end}"

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        while (yield from text.copy_until(self.start, self.answer.content)):
            text.record(self.start)
            yield from skip_blanks(text)
            if (yield from self._read_calls()):
                text.record()
                yield from text.skip_whitespace()
                if (yield from text.skip(self.end, or_beginning=True)):
                    text.record()
            self.answer.content(text.take_record())

    def _read_calls(self) -> Steps[bool]:
        """Returns whether only whole calls were read. If not, the record has what is content."""
        text = self.text
        for beginning in ("[{", "{"):
            if (yield from text.has_next(beginning)):
                return (yield from read_calls(text, self.answer, marked=True))
        if (yield from text.skip("[")):
            return (yield from self._read_list())
        while (yield from self._read_call()):
            text.record()
            yield from skip_blanks(text)
            if (yield from text.has_next(self.end, or_beginning=True)):
                return True
        return False


class Lfm2ToolParser(TaggedPythonicToolParser):
    """`<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>`."""

    start = "<|tool_call_start|>"
    end = "<|tool_call_end|>"
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(f"{start}[NAME(",),
        tail=")]",
        closers=(end,),
        opener=start,
        has_json_arguments=False,
    )


class Olmo3ToolParser(TaggedPythonicToolParser):
    """`<function_calls>`, one call per line, and `</function_calls>`."""

    start = "<function_calls>"
    end = "</function_calls>"
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(f"{start}\nNAME(", f"{start}NAME("),
        tail=f")\n{end}",
        separators=("\n",),
        opener=start,
        has_json_arguments=False,
    )
