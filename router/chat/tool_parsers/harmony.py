"""`HarmonyToolParser`: messages of gpt-oss that have a function as their recipient."""

from typing import ClassVar

from router.chat.harmony import CALL_ENDS, MESSAGE_START, at_header, read_header
from router.chat.text_input import Steps
from router.chat.tool_parsers.base import GeneratorToolParser
from router.chat.tool_parsers.json_values import copy_value

__all__ = ["HarmonyToolParser"]


class HarmonyToolParser(GeneratorToolParser):
    """Reads calls. All other messages are content with their tags, which `HarmonyReasoningParser`
    has removed before.

    It states no syntax: calls come before the tag that ends the reasoning part for structured
    outputs, which is that of the final message.
    """

    needs_special_tokens: ClassVar[bool] = True

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        has_header = yield from at_header(text)
        while has_header or (yield from text.copy_to((MESSAGE_START,), self.answer.content)):
            has_header = False
            text.record()
            header = yield from read_header(text)
            if header is not None and header.function:
                yield from self._read_arguments(header.function)
            self.answer.content(text.take_record())

    def _read_arguments(self, name: str) -> Steps[None]:
        """Reads the arguments of a call, and its end. The record has what is content."""
        text = self.text
        yield from text.skip_whitespace()
        if (yield from text.peek()) != "{":
            return
        text.take_record()
        self.answer.start_call(name)
        is_whole = yield from copy_value(text, self.answer.arguments)
        text.record()
        if is_whole:
            yield from text.skip_whitespace()
            if (yield from text.skip_any(CALL_ENDS, or_beginning=True)):
                text.record()
