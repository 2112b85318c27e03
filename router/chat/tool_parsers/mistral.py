"""`MistralToolParser`: `[TOOL_CALLS]`, then an array of calls, or a name and arguments.

Tokenizers up to version 7 have `[TOOL_CALLS][{"name": "f", "arguments": {...}}]`. Since version
11 each call has its own mark: `[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{...}`, where the id and
`[ARGS]` may be missing.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import (
    MAX_NAME_LENGTH,
    CallSyntax,
    GeneratorToolParser,
    json_heads,
)
from router.chat.tool_parsers.json_calls import read_calls
from router.chat.tool_parsers.json_values import copy_value

__all__ = ["MistralToolParser"]

_START = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"
_NAME = re.compile(r"[\w.:/\-]+")
_ID_CHARACTERS = re.compile(r"[0-9A-Za-z_\-]+")
_MAX_ID_LENGTH = 64
_ALPHANUMERIC = string.ascii_letters + string.digits


class MistralToolParser(GeneratorToolParser):
    """Reads the calls behind each tag."""

    needs_special_tokens: ClassVar[bool] = True
    syntax: ClassVar[CallSyntax | None] = CallSyntax(
        heads=(
            *(f"{_START}NAME{_ARGUMENTS}", f"{_START}NAME"),
            *json_heads((f"{_START}[", f"{_START} ["), "arguments"),
        ),
        tail="",
        closers=("}]",),
        opener=_START,
    )

    @staticmethod
    def _new_call_id() -> str:
        # Mistral's templates refuse other ids in the messages of later requests.
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    @classmethod
    def write_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Returns the text of calls, in the form of version 11."""
        return "".join(
            [
                f"{_START}{name}{_ARGUMENTS}{json.dumps(arguments, ensure_ascii=False)}"
                for name, arguments in calls
            ]
        )

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        while (yield from text.copy_until(_START, self.answer.content)):
            text.record(_START)
            yield from text.skip_whitespace()
            in_json = (yield from text.peek()) in ("[", "{")
            if in_json:
                found = yield from read_calls(text, self.answer, marked=True)
            else:
                found = yield from self._read_named_call()
            if not found:
                self.answer.content(text.take_record())

    def _read_named_call(self) -> Steps[bool]:
        """Reads a name and arguments. Returns False, with the record going on, if it is no call."""
        text = self.text
        name = yield from text.read_run(_NAME, MAX_NAME_LENGTH)
        call_id = ""
        if (yield from text.skip(_CALL_ID)):
            call_id = yield from text.read_run(_ID_CHARACTERS, _MAX_ID_LENGTH)
        yield from text.skip(_ARGUMENTS)
        yield from text.skip_whitespace()
        if not name or (yield from text.peek()) != "{":
            return False
        text.take_record()
        self.answer.start_call(name, call_id)
        yield from copy_value(text, self.answer.arguments)
        return True
