"""`ToolParser`: finds tool calls in generated text, which arrives in pieces."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from baton.common.request.answer import ChatDelta
from router.chat.answer_builder import AnswerBuilder
from router.chat.text_input import Steps, TextInput
from router.chat.tool_parsers.call_syntax import CallSyntax

__all__ = ["MAX_NAME_LENGTH", "GeneratorToolParser", "ToolParser"]

MAX_NAME_LENGTH = 256
"""Maximum number of characters of a function's name. A name is held back until it is complete."""


class ToolParser(ABC):
    """Divides the text of one candidate into content and tool calls.

    Malformed output of a model is no error: it is content, or the arguments of a call as far as
    they came.

    Args:
        tools: the tools of the request, as in OpenAI's chat API. A call of another tool is
            reported all the same; the client decides about it.

    Attributes:
        needs_special_tokens: whether the tags of calls are special tokens, which the text lacks
            unless the request is run with `skip_special_tokens=False`.
        syntax: how the model writes calls. None: it is not known, so that a form of the text
            excludes calls, and no form constrains the calls of strict tools.
    """

    needs_special_tokens: ClassVar[bool] = False
    syntax: ClassVar[CallSyntax | None] = None

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools
        self._names = {tool.get("function", {}).get("name") for tool in tools}

    def is_offered(self, name: str) -> bool:
        """Returns whether the request offers a function, or, without tools, may offer it."""
        return not self._names or name in self._names

    @abstractmethod
    def push(self, text: str) -> ChatDelta:
        """Returns what further text adds to the answer.

        Text that may be the beginning of a call is held back. The deltas of all pushes, put
        together, must not depend on how the text is cut into pieces.
        """

    @abstractmethod
    def finish(self) -> ChatDelta:
        """Returns what was held back. The text is complete; called once."""


class GeneratorToolParser(ToolParser):
    """A tool parser that reads its text in a generator.

    Attributes:
        text: what `read` reads.
        answer: what `read` adds to.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self.text = TextInput()
        self.answer = AnswerBuilder(self._new_call_id)
        self._steps = self._run_all()

    def push(self, text: str) -> ChatDelta:
        """Returns what further text adds to the answer."""
        self.text.push(text)
        next(self._steps, None)
        return self.answer.take()

    def finish(self) -> ChatDelta:
        """Returns what was held back."""
        self.text.end()
        next(self._steps, None)
        self.answer.finish()
        return self.answer.take()

    @staticmethod
    def _new_call_id() -> str:
        """Returns a random id for a call."""
        return f"call_{secrets.token_hex(12)}"

    @abstractmethod
    def read(self) -> Steps[None]:
        """Reads the text. What it leaves unread is content."""

    def _run_all(self) -> Steps[None]:
        yield from self.read()
        self.text.take_record()
        yield from self.text.copy_rest(self.answer.content)
