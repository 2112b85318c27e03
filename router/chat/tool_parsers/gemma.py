"""Tool parsers of Gemma: `call:f{a:1,b:<|"|>x<|"|>}` between tags.

Keys have no quotes, and strings stand between two special tokens, without escapes. Gemma 4 and
FunctionGemma have different tokens.
"""

import re
from typing import ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import MAX_NAME_LENGTH, CallSyntax, GeneratorToolParser
from router.chat.tool_parsers.value_reader import ValueReader

__all__ = ["FunctionGemmaToolParser", "Gemma4ToolParser", "GemmaToolParser"]

_CALL = "call:"
_NAME = re.compile(r"[\w.:/\-]+")


class GemmaToolParser(GeneratorToolParser):
    """Reads calls between tags, with text before, between and after them.

    Attributes:
        start: the tag before a call.
        end: the tag behind it; the end of the text may stand for it.
        quote: the token before and behind a string.
    """

    needs_special_tokens: ClassVar[bool] = True
    start: ClassVar[str]
    end: ClassVar[str]
    quote: ClassVar[str]

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        while (yield from text.copy_until(self.start, self.answer.content)):
            text.record(self.start)
            if (yield from self._read_call()):
                text.record()
                yield from text.skip_whitespace()
                if (yield from text.skip(self.end, or_beginning=True)):
                    text.record()
            self.answer.content(text.take_record())

    def _read_call(self) -> Steps[bool]:
        """Returns whether there was a whole call. If not, the record has what is content."""
        text = self.text
        yield from text.skip_whitespace()
        if not (yield from text.skip(_CALL)):
            return False
        name = yield from text.read_run(_NAME, MAX_NAME_LENGTH)
        if not name or (yield from text.peek()) != "{":
            return False
        text.take_record()
        self.answer.start_call(name)
        arguments = ValueReader(text, self.answer.arguments, is_python=False, quote=self.quote)
        return (yield from arguments.read())


class Gemma4ToolParser(GemmaToolParser):
    """The tokens of Gemma 4."""

    start = "<|tool_call>"
    end = "<tool_call|>"
    quote = '<|"|>'
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(f"{start}{_CALL}NAME{{",), tail=f"}}{end}", opener=start, has_json_arguments=False
    )


class FunctionGemmaToolParser(GemmaToolParser):
    """The tokens of FunctionGemma."""

    start = "<start_function_call>"
    end = "<end_function_call>"
    quote = "<escape>"
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(f"{start}{_CALL}NAME{{",), tail=f"}}{end}", opener=start, has_json_arguments=False
    )
