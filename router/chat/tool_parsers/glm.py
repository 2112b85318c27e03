"""Tool parsers of GLM.

GLM-4.5, 4.6 and 4.7 write a name and tags for each argument; GLM-4.7 writes no line breaks:

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

GLM-4-0414 writes a name and JSON in the next line. Between two calls stands the token before
messages of the assistant:

    f
    {"a": 1}<|assistant|>
    g
    {}
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import MAX_NAME_LENGTH, CallSyntax, GeneratorToolParser
from router.chat.tool_parsers.json_values import copy_value
from router.chat.tool_parsers.parameter_schemas import FunctionSchema
from router.chat.tool_parsers.parameter_types import ParameterWriter

__all__ = ["Glm4ToolParser", "GlmToolParser"]

_START = "<tool_call>"
_END = "</tool_call>"
_KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"
_ASSISTANT = "<|assistant|>"
_RESULT = "<|observation|>"
"""The token behind the last call of GLM-4-0414."""
_NAME = re.compile(r"[\w.:/\-]+")
_KEY_NAME = re.compile(r"[^<]+")


class GlmToolParser(GeneratorToolParser):
    """Reads calls in tags and makes JSON of their arguments.

    A value is text unless the schema of the request's tool says otherwise.
    """

    needs_special_tokens: ClassVar[bool] = True
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(f"{_START}NAME\n", f"{_START}NAME"),
        tail=_END,
        separators=("\n",),
        opener=_START,
        has_json_arguments=False,
    )

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        while (yield from text.copy_until(_START, self.answer.content)):
            text.record(_START)
            yield from self._read_call()
            self.answer.content(text.take_record())

    def _read_call(self) -> Steps[None]:
        """Reads a call. The record has the part that is content."""
        text = self.text
        yield from text.skip_whitespace()
        name = yield from text.read_run(_NAME, MAX_NAME_LENGTH)
        yield from text.skip_whitespace()
        is_over = yield from text.skip(_END)
        if not name or not (is_over or (yield from text.has_next(_KEY))):
            return
        text.record()
        self.answer.start_call(name)
        arguments = ParameterWriter(self.answer.arguments, FunctionSchema(self.tools, name))
        while not is_over and (yield from self._read_argument(arguments)):
            text.record()
            yield from text.skip_whitespace()
            is_over = yield from text.skip(_END, or_beginning=True)
            is_over = is_over or not (yield from text.peek())
        if is_over:
            arguments.finish()
        if is_over or not (yield from text.peek()):
            text.record()  # a tag, perhaps cut by the end of the text, is no content

    def _read_argument(self, arguments: ParameterWriter) -> Steps[bool]:
        """Returns whether there was a whole argument."""
        text = self.text
        if not (yield from self._skip_tag(_KEY)):
            return False
        key = yield from text.read_run(_KEY_NAME, MAX_NAME_LENGTH)
        if not key.strip() or not (yield from self._skip_tag(_KEY_END)):
            return False
        yield from text.skip_whitespace()
        if not (yield from self._skip_tag(_VALUE)):
            return False
        text.take_record()
        arguments.begin(key.strip())
        is_whole = yield from text.copy_until(_VALUE_END, arguments.add)
        arguments.end(is_whole=is_whole)
        return is_whole

    def _skip_tag(self, tag: str) -> Steps[bool]:
        """Reads a tag. Returns False if there is none; its beginning at the text's end is read."""
        if (yield from self.text.skip(tag)):
            return True
        yield from self.text.skip(tag, or_beginning=True)
        return False


class Glm4ToolParser(GeneratorToolParser):
    """Reads a name and JSON at the beginning of each message. There is a call only of a function
    that the request offers.
    """

    needs_special_tokens: ClassVar[bool] = True

    @classmethod
    def write_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Returns the text of calls, each of which is a message."""
        texts = [
            f"{name}\n{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in calls
        ]
        return f"{_ASSISTANT}\n".join(texts)

    def read(self) -> Steps[None]:
        """Reads the text."""
        text, has_message = self.text, True
        while has_message:
            text.record()
            if (yield from self._read_call()):
                text.record()
                yield from text.skip_whitespace()
                if (yield from text.skip(_RESULT, or_beginning=True)):
                    text.record()
            self.answer.content(text.take_record())
            has_message = yield from text.copy_until(_ASSISTANT, self.answer.content)

    def _read_call(self) -> Steps[bool]:
        """Returns whether there was a whole call. The record has the part that is content."""
        text = self.text
        yield from text.skip_whitespace()
        name = yield from text.read_run(_NAME, MAX_NAME_LENGTH)
        if not name or not self.is_offered(name) or not (yield from text.skip("\n")):
            return False
        yield from text.skip_whitespace()
        if (yield from text.peek()) != "{":
            return False
        text.take_record()
        self.answer.start_call(name)
        is_whole = yield from copy_value(text, self.answer.arguments)
        text.record()
        return is_whole
