"""`Llama3JsonToolParser`: `{"name": "f", "parameters": {...}}`, with or without a tag before it.

The format of Llama 3.1, 3.2, 3.3 and 4. Several calls are separated by semicolons. The tags are
`<|python_tag|>`, and for Llama 4 `<|python_start|>` and `<|python_end|>`.
"""

import re
from typing import ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import (
    FENCE,
    PYTHON_START,
    CallSyntax,
    GeneratorToolParser,
    json_heads,
    skip_closings,
    skip_openings,
)
from router.chat.tool_parsers.json_calls import read_calls

__all__ = ["Llama3JsonToolParser"]

_TAGS = ("<|python_tag|>", PYTHON_START)
_STARTS = (*_TAGS, FENCE, "{", "[", "}")
_SEPARATORS = re.compile(r"[\s;,]+")


class Llama3JsonToolParser(GeneratorToolParser):
    """Reads calls at the beginning of the text, behind other calls, and behind tags.

    Elsewhere in the text, also in fenced code, JSON is a call only if it names a function that
    the request offers, and is no part of other JSON. Behind a tag, models write program code too,
    which is content.
    """

    needs_special_tokens: ClassVar[bool] = True
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=json_heads(("",), "parameters"),
        tail="}",
        separators=("; ", ";"),
        prefixes=_TAGS,
        argument_keys=("parameters",),
    )

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        text.record()
        openings = set[str]()
        any_name = True
        while True:
            openings |= yield from skip_openings(text, _TAGS)
            any_name = any_name or not openings.isdisjoint(_TAGS)
            accepts = None if any_name else self.is_offered
            if (yield from read_calls(text, self.answer, marked=False, accepts=accepts)):
                yield from skip_closings(text, openings, _SEPARATORS)
                any_name = True
                continue
            rest = text.take_record()
            self.answer.content(rest)
            if not (yield from self._copy_to_start(_num_open_objects(rest))):
                return
            text.record()
            openings.clear()
            any_name = False

    def _copy_to_start(self, num_open: int) -> Steps[bool]:
        """Passes content on up to where a call may begin. Returns False if no call can.

        Args:
            num_open: the number of JSON objects that the text is in.
        """
        text, content = self.text, self.answer.content
        while start := (yield from text.copy_to(_STARTS, content)):
            if start not in ("{", "[", "}") or (start != "}" and not num_open):
                return True
            if start == "{":
                num_open += 1
            elif start == "}":
                num_open = max(num_open - 1, 0)
            content(text.read())
        return False


def _num_open_objects(text: str) -> int:
    """Returns how many JSON objects are open behind a text that has been taken for a call."""
    return max(text.count("{") - text.count("}"), 0) if '"' in text else 0
