"""`Llama3JsonToolParser`: `{"name": "f", "parameters": {...}}`, with or without `<|python_tag|>`.

The format of Llama 3.1, 3.2, 3.3 and 4. Several calls are separated by semicolons.
"""

import re
from typing import ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import GeneratorToolParser
from router.chat.tool_parsers.call_syntax import CallSyntax, json_heads
from router.chat.tool_parsers.json_calls import read_calls

__all__ = ["Llama3JsonToolParser"]

_TAG = "<|python_tag|>"
_SEPARATORS = re.compile(r"[\s;,]+")
_MAX_SEPARATORS = 256


class Llama3JsonToolParser(GeneratorToolParser):
    """Reads calls at the beginning of the text, behind other calls, and behind tags.

    Behind the tag, models write program code too, which is content.
    """

    needs_special_tokens: ClassVar[bool] = True
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=json_heads(("", _TAG), "parameters"),
        tail="}",
        separators=("; ", ";"),
        prefixes=(_TAG,),
        argument_keys=("parameters",),
    )

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        text.record()
        while True:
            yield from text.skip_whitespace()
            yield from text.skip(_TAG)
            yield from text.skip_whitespace()
            if (yield from read_calls(text, self.answer, marked=False)):
                text.record()
                yield from text.read_run(_SEPARATORS, _MAX_SEPARATORS)
                continue
            self.answer.content(text.take_record())
            if not (yield from text.copy_until(_TAG, self.answer.content)):
                return
            text.record(_TAG)
