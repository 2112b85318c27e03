"""`AnswerParts`: an answer as a sequence of parts, for APIs whose streams number them.

A part is a run of reasoning, a run of text, or one tool call. One part is open at a time. The
Responses API calls parts output items, Anthropic's API calls them content blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from baton.common.request.answer import CandidateOutput, TokenCounts, ToolCallDelta

__all__ = ["AnswerParts", "LogprobsOf", "Part", "PartAdded", "PartClosed", "PartKind", "PartOpened"]

LogprobsOf = Callable[[CandidateOutput], Sequence[dict[str, Any]]]
"""Returns the log-probabilities of an output's tokens, as OpenAI's chat API writes them."""


class PartKind(Enum):
    """Kinds of parts."""

    REASONING = "reasoning"
    TEXT = "text"
    TOOL_CALL = "tool_call"


@dataclass(slots=True)
class Part:
    """One part of an answer, with the text that it has so far.

    Attributes:
        kind: what it is.
        index: its number in the answer, from 0.
        call: the first delta of a tool call, which has its id and name.
        is_complete: whether the model ended it; false while it is open, and if a limit cut it.
        logprobs: of the tokens of a text, if the request asks for them.
    """

    kind: PartKind
    index: int
    call: ToolCallDelta | None = None
    is_complete: bool = False
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text; of a tool call, the JSON of its arguments."""
        return "".join(self._pieces)

    def append(self, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        """Adds text and its tokens' log-probabilities."""
        self._pieces.append(text)
        self.logprobs.extend(logprobs)


@dataclass(frozen=True, slots=True)
class PartOpened:
    """A part begins; it has no text yet."""

    part: Part


@dataclass(frozen=True, slots=True)
class PartAdded:
    """A part has new text."""

    part: Part
    text: str
    logprobs: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class PartClosed:
    """A part is over."""

    part: Part


Step = PartOpened | PartAdded | PartClosed


class AnswerParts:
    """Splits an answer's outputs into parts.

    Args:
        logprobs_of: makes the log-probabilities of text; None: there are none.

    Attributes:
        parts: all parts so far, by index.
        finish_reason: why the answer ended; None until it has.
        matched_stop: the stop text or token that ended it.
        usage: token counts; None until the last output.
    """

    def __init__(self, logprobs_of: LogprobsOf | None = None) -> None:
        self.parts: list[Part] = []
        self.finish_reason: str | None = None
        self.matched_stop: str | int | None = None
        self.usage: TokenCounts | None = None
        self._logprobs_of = logprobs_of
        self._waiting_logprobs: list[dict[str, Any]] = []
        self._open: Part | None = None

    def push(self, output: CandidateOutput) -> list[Step]:
        """Adds an output; returns what it changes, in order."""
        delta, steps = output.delta, list[Step]()
        self._take_logprobs(output)
        calls = delta.tool_calls
        if calls and calls[0].id is None:  # its end; text of the same delta follows it
            self._add_call(steps, calls[0])
            calls = calls[1:]
        if delta.reasoning:
            self._add(steps, PartKind.REASONING, delta.reasoning)
        if delta.content:
            self._add(steps, PartKind.TEXT, delta.content)
        for call in calls:
            self._add_call(steps, call)
        if output.finish_reason is not None:
            self.finish_reason, self.matched_stop = output.finish_reason, output.matched_stop
            if self._waiting_logprobs and self._open is not None:
                self._add_last_logprobs(steps, self._open)
        if output.usage is not None:
            self.usage = output.usage
        return steps

    def finish(self) -> list[Step]:
        """Closes the last part. Called once the outputs have ended."""
        steps = list[Step]()
        is_call = self._open is not None and self._open.call is not None
        is_complete = self.finish_reason == "tool_calls" or (
            self.finish_reason == "stop" and not is_call  # a stop text cuts a call
        )
        self._close(steps, is_complete)
        return steps

    def _take_logprobs(self, output: CandidateOutput) -> None:
        """Keeps log-probabilities until text comes: a token's text may be held back. Those of
        reasoning and of calls are dropped; a chunk that has text, too, counts as text.
        """
        if self._logprobs_of is None:
            return
        self._waiting_logprobs += self._logprobs_of(output)
        if not output.delta.content and (output.delta.reasoning or output.delta.tool_calls):
            self._waiting_logprobs = []

    def _add_last_logprobs(self, steps: list[Step], part: Part) -> None:
        """Adds those of tokens without text, such as the end of the sequence, to the text."""
        if part.kind is PartKind.TEXT:
            self._add(steps, PartKind.TEXT, "")

    def _add(self, steps: list[Step], kind: PartKind, text: str) -> None:
        part = self._open
        if part is None or part.kind is not kind:
            part = self._start(steps, Part(kind, len(self.parts)))
        logprobs: Sequence[dict[str, Any]] = ()
        if kind is PartKind.TEXT:
            logprobs, self._waiting_logprobs = self._waiting_logprobs, []
        part.append(text, logprobs)
        steps.append(PartAdded(part, text, logprobs))

    def _add_call(self, steps: list[Step], call: ToolCallDelta) -> None:
        part = self._open
        if part is None or part.call is None or part.call.index != call.index:
            assert call.id is not None, "a call's deltas are not interrupted by other parts"
            part = self._start(steps, Part(PartKind.TOOL_CALL, len(self.parts), call))
        if call.arguments:
            part.append(call.arguments, ())
            steps.append(PartAdded(part, call.arguments))

    def _start(self, steps: list[Step], part: Part) -> Part:
        self._close(steps, is_complete=True)
        self._open = part
        self.parts.append(part)
        steps.append(PartOpened(part))
        return part

    def _close(self, steps: list[Step], is_complete: bool) -> None:
        if self._open is not None:
            self._open.is_complete = is_complete
            steps.append(PartClosed(self._open))
            self._open = None
