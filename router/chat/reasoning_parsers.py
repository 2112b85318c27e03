"""Reasoning parsers: they separate the reasoning part of an answer from its content."""

from abc import ABC, abstractmethod
from typing import ClassVar

from baton.common.flags.plugins import load_plugin
from baton.common.request.answer import ChatDelta
from router.chat.harmony import at_header, copy_message, read_header
from router.chat.text_input import Steps, TextInput

__all__ = [
    "DeepSeekR1ReasoningParser",
    "Gemma4ReasoningParser",
    "GraniteReasoningParser",
    "HarmonyReasoningParser",
    "MarkedReasoningParser",
    "MistralReasoningParser",
    "Qwen3ReasoningParser",
    "ReasoningParser",
    "SeedOssReasoningParser",
    "reasoning_parser",
]


class ReasoningParser(ABC):
    """Divides the text of one candidate into reasoning and content.

    Args:
        starts_inside: whether the text begins inside of the reasoning part; None: as the
            model's answers do.

    Attributes:
        needs_special_tokens: whether the tags are special tokens, which the text lacks unless
            the request is run with `skip_special_tokens=False`.
    """

    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, starts_inside: bool | None = None) -> None:
        self.starts_inside = starts_inside

    @classmethod
    @abstractmethod
    def is_open_after(cls, prompt: str) -> bool | None:
        """Returns whether a prompt leaves the reasoning part open: the parser's `starts_inside`.

        A chat template may write the tag that opens the part, or both tags.

        Returns:
            None if the prompt does not decide it.
        """

    @abstractmethod
    def push(self, text: str) -> ChatDelta:
        """Returns the reasoning and content in further text.

        Text that may be a part of a tag is held back. The deltas of all pushes, put together,
        must not depend on how the text is cut into pieces.
        """

    @abstractmethod
    def finish(self) -> ChatDelta:
        """Returns what was held back. The text is complete; called once."""


class MarkedReasoningParser(ReasoningParser):
    """A reasoning part between two tags, at the beginning of the answer.

    A start tag is read even if the part is open already. A part without an end tag goes on to
    the end of the text.

    Attributes:
        start: the tag before the part.
        end: the tag after it.
        other_starts: texts that count as the start tag, too.
        other_ends: texts that count as the end tag, too.
        opens_itself: whether answers begin inside of the part without a start tag.
    """

    start: ClassVar[str]
    end: ClassVar[str]
    other_starts: ClassVar[tuple[str, ...]] = ()
    other_ends: ClassVar[tuple[str, ...]] = ()
    opens_itself: ClassVar[bool] = False

    def __init__(self, starts_inside: bool | None = None) -> None:
        super().__init__(self.opens_itself if starts_inside is None else starts_inside)
        self._text = TextInput()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._steps = self._run()

    @classmethod
    def is_open_after(cls, prompt: str) -> bool | None:
        """Looks at the prompt's end only: earlier messages may mention the tags."""
        last = prompt.rstrip()
        if last.endswith((cls.end, *cls.other_ends)):
            return False
        return last.endswith((cls.start, *cls.other_starts)) or None

    def push(self, text: str) -> ChatDelta:
        """Returns the reasoning and content in further text."""
        self._text.push(text)
        return self._advance()

    def finish(self) -> ChatDelta:
        """Returns what was held back."""
        self._text.end()
        return self._advance()

    def _advance(self) -> ChatDelta:
        next(self._steps, None)
        delta = ChatDelta(content="".join(self._content), reasoning="".join(self._reasoning))
        self._content.clear()
        self._reasoning.clear()
        return delta

    def _run(self) -> Steps[None]:
        text, is_open = self._text, self.starts_inside
        text.record()
        yield from text.skip_whitespace()
        if (yield from text.skip_any((self.start, *self.other_starts))):
            text.take_record()
            is_open = True
        if is_open:
            self._reasoning.append(text.take_record())
            end = yield from text.copy_to((self.end, *self.other_ends), self._reasoning.append)
            text.read(len(end))
        self._content.append(text.take_record())
        yield from self._read_content()

    def _read_content(self) -> Steps[None]:
        """Reads the text behind the reasoning part."""
        yield from self._text.copy_rest(self._content.append)


class DeepSeekR1ReasoningParser(MarkedReasoningParser):
    """`<think>` and `</think>`; without tags the whole text is reasoning."""

    start = "<think>"
    end = "</think>"
    opens_itself = True


class Qwen3ReasoningParser(MarkedReasoningParser):
    """`<think>` and `</think>`; without tags the whole text is content."""

    start = "<think>"
    end = "</think>"


class SeedOssReasoningParser(MarkedReasoningParser):
    """`<seed:think>` and `</seed:think>`; without tags the whole text is content."""

    start = "<seed:think>"
    end = "</seed:think>"
    needs_special_tokens = True


class MistralReasoningParser(MarkedReasoningParser):
    """`[THINK]` and `[/THINK]`, which are special tokens."""

    start = "[THINK]"
    end = "[/THINK]"
    needs_special_tokens = True


class GraniteReasoningParser(MarkedReasoningParser):
    """The sentences that Granite 3.2 writes before its two parts, and the tags of Granite 3.3.

    Granite 3.3 has `<response>` and `</response>` around the content, too.
    """

    start = "Here is my thought process:"
    end = "Here is my response:"
    other_starts = ("Here's my thought process:", "<think>")
    other_ends = ("Here's my response:", "</think>")

    def _read_content(self) -> Steps[None]:
        text = self._text
        text.record()
        yield from text.skip_whitespace()
        if (yield from text.skip("<response>")):
            text.record()
            yield from text.copy_until("</response>", self._content.append)
            text.record()
            yield from text.skip_whitespace()
            if not (yield from text.peek()):
                text.record()
        self._content.append(text.take_record())
        yield from text.copy_rest(self._content.append)


class Gemma4ReasoningParser(MarkedReasoningParser):
    """The channel `thought`, between special tokens."""

    start = "<|channel>thought"
    end = "<channel|>"
    needs_special_tokens = True


class HarmonyReasoningParser(MarkedReasoningParser):
    """Messages of gpt-oss in the channel `analysis`.

    Several messages of a kind are separated by a line break. Messages with a recipient are passed
    on with their tags, for the parser of calls; the contents of all others are the answer's.

    Its tags are those of an answer without calls: for structured outputs and budgets, the
    reasoning part ends where the final message begins.
    """

    start = "<|channel|>analysis<|message|>"
    end = "<|end|><|start|>assistant<|channel|>final<|message|>"
    needs_special_tokens = True

    def _run(self) -> Steps[None]:
        text = self._text
        seen = set[str]()
        if self.starts_inside:
            seen.add("analysis")
            yield from copy_message(text, self._reasoning.append)
        while (yield from text.peek()):
            text.record()
            header = None
            if (yield from at_header(text)):
                header = yield from read_header(text)
            written = text.take_record()
            if header is None or header.function:
                self._content.append(written)
                yield from copy_message(text, self._content.append, keeps_end=header is not None)
                continue
            is_reasoning = header.channel == "analysis"
            parts = self._reasoning if is_reasoning else self._content
            kind = "analysis" if is_reasoning else "content"
            if kind in seen:
                parts.append("\n")
            seen.add(kind)
            yield from copy_message(text, parts.append)


_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1ReasoningParser,
    "deepseek_v3": Qwen3ReasoningParser,
    "gemma4": Gemma4ReasoningParser,
    "glm45": Qwen3ReasoningParser,
    "granite": GraniteReasoningParser,
    "mistral": MistralReasoningParser,
    "olmo3": Qwen3ReasoningParser,
    "openai_gptoss": HarmonyReasoningParser,
    "qwen3": Qwen3ReasoningParser,
    "seed_oss": SeedOssReasoningParser,
}


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """Returns a parser's class.

    Args:
        name: of a parser above, of an entry point, or `module:Class`.

    Raises:
        ConfigurationError: there is none of this name, or it cannot be imported.
    """
    return load_plugin(
        name, ReasoningParser, "--reasoning-parser", "baton.reasoning_parsers", _PARSERS
    )
