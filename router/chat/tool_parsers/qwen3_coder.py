"""Tool parsers for calls in tags, one per parameter.

The format of Qwen3-Coder and Qwen 3.5; Seed-OSS has other tags around a call:

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>
"""

import re
from typing import ClassVar

from typing_extensions import override

from router.chat.text_input import Steps, TextInput
from router.chat.tool_parsers.base import (
    MAX_NAME_LENGTH,
    CallSyntax,
    TaggedCallsParser,
)
from router.chat.tool_parsers.parameter_schemas import FunctionSchema
from router.chat.tool_parsers.parameter_types import ParameterWriter
from router.chat.tool_parsers.scalars import Sink

__all__ = ["Qwen3CoderToolParser", "SeedOssToolParser"]

_FUNCTION = "<function"
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter"
_PARAMETER_END = "</parameter>"
_NAME = re.compile(r"[^<>\n]+")
_AROUND_NAME = "\"' \t\r"


def _syntax(start: str, end: str) -> CallSyntax:
    return CallSyntax(
        heads=(f"{start}\n<function=NAME>\n", f"{start}<function=NAME>"),
        tail=_FUNCTION_END,
        closers=(f"\n{end}", end),
        separators=("\n",),
        opener=start,
        has_json_arguments=False,
    )


class Qwen3CoderToolParser(TaggedCallsParser):
    """Reads calls in tags and makes JSON of their parameters.

    A parameter is text unless the schema of the request's tool says otherwise. Text is passed on
    as it comes; the value of another type is held back until it is complete.

    Models forget tags. Without `<tool_call>`, a function that the request offers is called if a
    parameter or the end of the call follows.

    Attributes:
        start: the tag before a call.
        end: the tag behind it.
        has_breaks: whether a value has a line break on either side that is not part of it.
    """

    needs_special_tokens: ClassVar[bool] = True
    start: ClassVar[str] = "<tool_call>"
    end: ClassVar[str] = "</tool_call>"
    has_breaks: ClassVar[bool] = True
    syntax: ClassVar[CallSyntax | None] = _syntax(start, end)

    @property
    @override
    def call_start(self) -> str:
        return _FUNCTION

    @override
    def read_call(self, *, is_marked: bool) -> Steps[bool]:
        name = yield from _read_tag(self.text, _FUNCTION)
        if not name or not (is_marked or (yield from self._is_called(name))):
            return False
        self.text.take_record()
        self.answer.start_call(name)
        schema = FunctionSchema(self.tools, name)
        arguments = ParameterWriter(self.answer.arguments, schema)
        reader = _ParameterReader(self.text, arguments, schema, type(self))
        return (yield from reader.read())

    def _is_called(self, name: str) -> Steps[bool]:
        """Returns whether the tag of a function begins a call. Other text only mentions it."""
        if not self.is_offered(name):
            return False
        yield from self.text.skip_whitespace()
        for tag in (_PARAMETER, _FUNCTION_END):
            if (yield from self.text.has_next(tag)):
                return True
        return False


class SeedOssToolParser(Qwen3CoderToolParser):
    """The tags of Seed-OSS."""

    start = "<seed:tool_call>"
    end = "</seed:tool_call>"
    has_breaks = False
    syntax: ClassVar[CallSyntax | None] = _syntax(start, end)


class _ParameterReader:
    """Reads the parameters of one call, and the end of the call.

    A value without its end tag ends before another parameter of the function that the call does
    not have yet, and before the end of the call if no text follows it.

    Args:
        text: read up to the end of the call.
        arguments: gets the parameters.
        schema: the function's.
        form: has the tags around a call.
    """

    def __init__(
        self,
        text: TextInput,
        arguments: ParameterWriter,
        schema: FunctionSchema,
        form: type[Qwen3CoderToolParser],
    ) -> None:
        self._text = text
        self._form = form
        self._arguments = arguments
        self._schema = schema
        self._is_over = False

    def read(self) -> Steps[bool]:
        """Returns whether the call ended. The record has the part that is content."""
        text = self._text
        name = ""
        while not self._is_over:
            if not name:
                text.record()
                yield from text.skip_whitespace()
                if (yield from self._is_end()):
                    break
                name = yield from _read_tag(text, _PARAMETER)
            if not name:
                yield from self._drop_cut_tag()
                return False
            text.take_record()
            self._arguments.begin(name)
            is_whole, name = yield from self._read_value()
            if not is_whole:
                return False
        self._arguments.finish()
        return True

    def _is_end(self) -> Steps[bool]:
        """Reads the end tag. Returns whether the call is over, also without the tag."""
        text = self._text
        if (yield from text.skip(_FUNCTION_END, or_beginning=True)):
            return True
        for tag in (self._form.end, self._form.start, _FUNCTION):
            if (yield from text.has_next(tag)):
                return True
        return bool(self._arguments.names) and not (yield from text.peek())

    def _drop_cut_tag(self) -> Steps[None]:
        """Drops the beginning of a tag that the end of the text cuts: it is no content."""
        text = self._text
        if not (yield from text.has_next(_PARAMETER)):
            yield from text.skip(_PARAMETER, or_beginning=True)
        if not (yield from text.peek()):
            text.record()

    def _read_value(self) -> Steps[tuple[bool, str]]:
        """Reads a value and what ends it.

        Returns:
            Whether the value ended, and the name of the next parameter if its tag was read.
        """
        sink: Sink = self._arguments.add
        if self._form.has_breaks:
            yield from self._text.skip("\n")
            sink = _WithoutLastBreak(sink)
        is_whole, next_name = yield from self._copy_value(sink)
        self._arguments.end(is_whole=is_whole)
        return is_whole, next_name

    def _copy_value(self, sink: Sink) -> Steps[tuple[bool, str]]:
        """Copies the text of a value, and reads what ends it; returns as `_read_value` does."""
        text = self._text
        ends = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, self._form.end)
        while tag := (yield from text.copy_to(ends, sink)):
            if tag == _PARAMETER_END:
                text.read(len(tag))
                return True, ""
            text.record()
            next_name = ""
            if tag == _PARAMETER:
                next_name = yield from self._read_next_name()
            else:
                self._is_over = yield from self._read_end(tag)
            rest = text.take_record()
            if next_name or self._is_over:
                return True, next_name
            sink(rest)
        return False, ""

    def _read_next_name(self) -> Steps[str]:
        """Reads a tag within a value; returns its name if it can be the next parameter's."""
        name = yield from _read_tag(self._text, _PARAMETER)
        is_next = name not in self._arguments.names and self._schema.may_have(name)
        return name if is_next else ""

    def _read_end(self, tag: str) -> Steps[bool]:
        """Reads end tags within a value; returns whether nothing but calls follows."""
        text = self._text
        text.read(len(tag))
        yield from text.skip_whitespace()
        if tag == _FUNCTION_END and (yield from text.skip(self._form.end, or_beginning=True)):
            yield from text.skip_whitespace()
        return not (yield from text.peek()) or (yield from text.has_next(self._form.start))


class _WithoutLastBreak:
    """Passes text on, but keeps a line break until more text follows it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""

    def __call__(self, piece: str) -> None:
        piece = self._held + piece
        self._held = "\n" if piece.endswith("\n") else ""
        self._sink(piece.removesuffix("\n"))


def _read_tag(text: TextInput, tag: str) -> Steps[str]:
    """Reads `<tag=name>` and returns the name; "" if the tag does not come next.

    Models write blanks and quotes around the name.
    """
    if not (yield from text.skip(tag)):
        return ""
    yield from text.skip_whitespace()
    if not (yield from text.skip("=")):
        return ""
    yield from text.skip_whitespace()
    name = yield from text.read_run(_NAME, MAX_NAME_LENGTH)
    yield from text.skip_whitespace()
    return name.strip(_AROUND_NAME) if (yield from text.skip(">")) else ""
