"""`ToolParser`: finds tool calls in generated text, and what all tool parsers share."""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from baton.common.request.answer import ChatDelta, ToolCallDelta
from router.chat.text_input import MAX_WHITESPACE, WHITESPACE, Steps, TextInput

__all__ = [
    "FENCE",
    "MAX_NAME_LENGTH",
    "PYTHON_START",
    "AnswerBuilder",
    "CallSyntax",
    "GeneratorToolParser",
    "TaggedCallsParser",
    "ToolParser",
    "json_heads",
    "skip_closings",
    "skip_openings",
]

MAX_NAME_LENGTH = 256
"""Maximum number of characters of a function's name. A name is held back until it is complete."""
FENCE = "```"
PYTHON_START = "<|python_start|>"
"""The tag before calls of Llama 4; `_PYTHON_END` follows them."""
_PYTHON_END = "<|python_end|>"
_LANGUAGE = re.compile(r"[\w+\-]+")
_MAX_LANGUAGE_LENGTH = 32


class AnswerBuilder:
    """Content and tool calls, taken as one delta per piece of text.

    Whitespace beside a call is no content: neither between two calls, nor before the first call
    if there is no other text, nor after the last call. It is therefore held back until other
    text follows.

    Args:
        new_call_id: makes the id of a call.
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._num_calls = 0
        self._call_ids: set[str] = set()
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []
        self._whitespace = ""
        self._holds_whitespace = True

    def content(self, text: str) -> None:
        """Adds content."""
        if not self._holds_whitespace:
            self._content.append(text)
            return
        self._whitespace += text
        if len(self._whitespace) > MAX_WHITESPACE or not self._whitespace.isspace():
            self._release_whitespace()

    def start_call(self, name: str, call_id: str = "") -> None:
        """Adds a call without arguments.

        Args:
            name: the function's.
            call_id: the call gets a new one if it is empty, or that of an earlier call.
        """
        self._end_call()
        if not call_id or call_id in self._call_ids:
            call_id = self._new_call_id()
        self._call_ids.add(call_id)
        self._calls.append(ToolCallDelta(self._num_calls, call_id, name))
        self._num_calls += 1
        self._whitespace = ""
        self._holds_whitespace = True

    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the latest call."""
        self._arguments.append(text)

    def take(self) -> ChatDelta:
        """Returns what was added since the last time."""
        self._end_call()
        delta = ChatDelta(content="".join(self._content), tool_calls=tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return delta

    def finish(self) -> None:
        """Says that nothing else is added: decides about whitespace that is held back."""
        if not self._num_calls:
            self._release_whitespace()

    def _release_whitespace(self) -> None:
        if self._whitespace:
            self._content.append(self._whitespace)
            self._whitespace = ""
            self._holds_whitespace = False

    def _end_call(self) -> None:
        """Joins the collected arguments to the call that they belong to."""
        if not self._arguments:
            return
        text = "".join(self._arguments)
        self._arguments.clear()
        if self._calls:
            last = self._calls[-1]
            self._calls[-1] = ToolCallDelta(last.index, last.id, last.name, text)
        else:
            self._calls.append(ToolCallDelta(self._num_calls - 1, arguments=text))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The texts around a call of a function.

    A call is one of `heads`, the arguments, `tail`, and perhaps one of `closers`. In heads,
    `NAME` stands for the function's name.

    Attributes:
        heads: the texts before the arguments. Without an opener, the name has quotes in them.
        tail: the text after them.
        closers: the texts that may end the call.
        separators: the texts that may stand between two calls.
        opener: the text that begins calls and nothing else; empty: calls begin like other text, so
            only a whole head shows that there is one.
        prefixes: the texts that may stand before a call: before its opener, or, without one,
            before a call that is a JSON object.
        argument_keys: without an opener, the keys that the arguments may have in such a call.
        has_json_arguments: whether the arguments are a JSON object. If not, they are any text up to
            the tail.
    """

    heads: Sequence[str]
    tail: str
    closers: Sequence[str] = ()
    separators: Sequence[str] = ()
    opener: str = ""
    prefixes: Sequence[str] = ()
    argument_keys: Sequence[str] = ()
    has_json_arguments: bool = True

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Returns the text of calls.

        Args:
            calls: the functions' names, and the arguments as the model writes them.
        """
        closer, separator = "".join(self.closers[:1]), "".join(self.separators[:1])
        texts = [
            self.heads[0].replace("NAME", name) + arguments + self.tail for name, arguments in calls
        ]
        if closer and self.prefixes:  # they are around all calls
            return self.prefixes[0] + separator.join(texts) + closer
        return separator.join([text + closer for text in texts])


def json_heads(prefixes: Sequence[str], key: str) -> tuple[str, ...]:
    """Returns the heads of calls that are JSON objects, with and without spaces.

    Args:
        prefixes: the texts before the object.
        key: the key of the arguments.
    """
    spellings = (f'{{"name": "NAME", "{key}": ', f'{{"name":"NAME","{key}":')
    return tuple(prefix + spelling for prefix in prefixes for spelling in spellings)


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

    @classmethod
    def write_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Returns the text of calls, which the parser reads as these calls.

        Args:
            calls: the functions' names and arguments.

        Returns:
            None if it is not known how the model writes calls.
        """
        syntax = cls.syntax
        if syntax is None or not syntax.has_json_arguments:
            return None
        return syntax.write(
            [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
        )

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


class TaggedCallsParser(GeneratorToolParser):
    """Reads calls between a tag and its end; each call begins with a tag of its own.

    Models forget the tag around calls, so a call's own tag may begin one without it.

    Attributes:
        start: the tag before calls.
        end: the tag behind them; the end of the text may stand for it.
    """

    start: ClassVar[str]
    end: ClassVar[str]

    @property
    @abstractmethod
    def call_start(self) -> str:
        """How a call's own tag begins."""

    @abstractmethod
    def read_call(self, *, is_marked: bool) -> Steps[bool]:
        """Returns whether there was a whole call. The record has the part that is content.

        Args:
            is_marked: whether the tag around calls was there.
        """

    @override
    def read(self) -> Steps[None]:
        text, starts = self.text, (self.start, self.call_start)
        while found := (yield from text.copy_to(starts, self.answer.content)):
            text.record()
            is_marked = found == self.start
            if is_marked:
                text.read(len(found))
                yield from text.skip_whitespace()
            while (yield from self.read_call(is_marked=is_marked)):
                text.record()
                yield from text.skip_whitespace()
                if (yield from text.skip(self.end, or_beginning=True)):
                    text.record()
                    break
            self.answer.content(text.take_record())


def skip_openings(text: TextInput, tags: Sequence[str] = ()) -> Steps[set[str]]:
    """Reads tags and the beginnings of fenced code, with the whitespace around them.

    Returns:
        Which there were: tags, and `FENCE`.
    """
    found = set[str]()
    while True:
        yield from text.skip_whitespace()
        tag = yield from text.skip_any((*tags, FENCE))
        if not tag:
            return found
        found.add(tag)
        if tag == FENCE:
            yield from text.read_run(_LANGUAGE, _MAX_LANGUAGE_LENGTH)


def skip_closings(
    text: TextInput, openings: set[str], between: re.Pattern[str] = WHITESPACE
) -> Steps[None]:
    """Reads the ends of tags and fences behind calls. `text` records what is read behind them.

    Args:
        text: read up to the first text that belongs to no call.
        openings: what was read before the calls.
        between: what may stand between the ends, and behind them.
    """
    closings = (_PYTHON_END, FENCE) if FENCE in openings else (_PYTHON_END,)
    text.record()
    yield from text.read_run(between, MAX_WHITESPACE)
    while (yield from text.skip_any(closings, or_beginning=True)):
        text.record()
        yield from text.read_run(between, MAX_WHITESPACE)
