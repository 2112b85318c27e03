"""Tool parsers for calls in tags that have attributes: MiniMax M2 and DeepSeek V3.2.

MiniMax M2 writes:

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="a">1</parameter>
    </invoke>
    </minimax:tool_call>

DeepSeek V3.2 writes `function_calls` in place of `minimax:tool_call`, a token before the name of
each tag, and behind the name of each parameter whether it is a text: `string="true"`.
"""

import re
from typing import ClassVar

from typing_extensions import override

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import MAX_NAME_LENGTH, CallSyntax, TaggedCallsParser
from router.chat.tool_parsers.parameter_schemas import NO_TEXT, TEXT, Accepted, FunctionSchema
from router.chat.tool_parsers.parameter_types import ParameterWriter

__all__ = ["DeepSeekV32ToolParser", "InvokeToolParser", "MiniMaxM2ToolParser"]

_NAME = re.compile(r'[^"<>\n]+')
_DSML = "\uff5cDSML\uff5c"


def _syntax(start: str, end: str, mark: str = "") -> CallSyntax:
    return CallSyntax(
        heads=(f'<{mark}invoke name="NAME">\n', f'<{mark}invoke name="NAME">'),
        tail=f"</{mark}invoke>\n",
        closers=(end,),
        opener=f'<{mark}invoke name="',
        prefixes=(f"{start}\n", start),
        has_json_arguments=False,
    )


class InvokeToolParser(TaggedCallsParser):
    """Reads calls in tags and makes JSON of their parameters.

    A parameter is text unless its tag or the schema of the request's tool says otherwise. Without
    the tag before all calls, a function that the request offers is called.

    Attributes:
        mark: what stands before the names of the other tags.
    """

    needs_special_tokens: ClassVar[bool] = True
    mark: ClassVar[str] = ""

    @property
    @override
    def call_start(self) -> str:
        return f'<{self.mark}invoke name="'

    @override
    def read_call(self, *, is_marked: bool) -> Steps[bool]:
        text = self.text
        name = yield from self._read_name("invoke")
        is_called = bool(name) and (is_marked or self.is_offered(name))
        if not is_called or not (yield from text.skip(">")):
            return False
        text.record()
        self.answer.start_call(name)
        arguments = ParameterWriter(self.answer.arguments, FunctionSchema(self.tools, name))
        while not (yield from self._is_over(arguments)):
            if not (yield from self._read_parameter(arguments)):
                if not (yield from text.peek()):
                    text.record()  # a tag that the end of the text cuts is no content
                return False
        arguments.finish()
        return True

    def _is_over(self, arguments: ParameterWriter) -> Steps[bool]:
        """Reads the end tag of a call. Returns whether the call is over, also without the tag."""
        text = self.text
        yield from text.skip_whitespace()
        if (yield from text.skip(f"</{self.mark}invoke>", or_beginning=True)):
            return True
        return bool(arguments.names) and not (yield from text.peek())

    def _read_parameter(self, arguments: ParameterWriter) -> Steps[bool]:
        """Returns whether there was a whole parameter."""
        text = self.text
        name = yield from self._read_name("parameter")
        if not name:
            return False
        accepted = yield from self._read_kind()
        if not (yield from text.skip(">")):
            return False
        text.record()
        arguments.begin(name, accepted)
        is_whole = yield from text.copy_until(f"</{self.mark}parameter>", arguments.add)
        arguments.end(is_whole=is_whole)
        text.record()
        return is_whole

    def _read_name(self, tag: str) -> Steps[str]:
        """Reads a tag up to its name and the quotes around it; returns "" if it is another one."""
        text = self.text
        if not (yield from text.skip(f'<{self.mark}{tag} name="')):
            yield from text.skip(f'<{self.mark}{tag} name="', or_beginning=True)
            return ""
        name = yield from text.read_run(_NAME, MAX_NAME_LENGTH)
        return name if (yield from text.skip('"')) else ""

    def _read_kind(self) -> Steps[Accepted | None]:
        """Reads whether a parameter is a text; returns None if its tag does not say."""
        text = self.text
        if (yield from text.skip(' string="true"', or_beginning=True)):
            return TEXT
        is_other = yield from text.skip(' string="false"', or_beginning=True)
        return NO_TEXT if is_other else None


class MiniMaxM2ToolParser(InvokeToolParser):
    """The tags of MiniMax M2."""

    start = "<minimax:tool_call>"
    end = "</minimax:tool_call>"
    syntax: ClassVar[CallSyntax | None] = _syntax(start, end)


class DeepSeekV32ToolParser(InvokeToolParser):
    """The tags of DeepSeek V3.2."""

    start = f"<{_DSML}function_calls>"
    end = f"</{_DSML}function_calls>"
    mark = _DSML
    syntax: ClassVar[CallSyntax | None] = _syntax(start, end, mark)
