"""Messages of gpt-oss in the harmony format, which several parsers read.

    <|start|>assistant<|channel|>analysis<|message|>Let me see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>

An answer begins with a header whose role is in the prompt. The recipient stands behind the role or
behind the channel. Source: https://github.com/openai/harmony, docs/format.md.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from router.chat.text_input import Steps, TextInput

__all__ = [
    "CALL_ENDS",
    "MESSAGE_START",
    "MessageHeader",
    "at_header",
    "copy_message",
    "read_header",
]

MESSAGE_START = "<|start|>"
CALL_ENDS = ("<|call|>", "<|end|>")
_ENDS = (*CALL_ENDS, "<|return|>")
_CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_HEADER_MARKS = (_CHANNEL, _CONSTRAIN, _MESSAGE)
_BEGINNINGS = (MESSAGE_START, *_HEADER_MARKS, " to=", "to=")
_PLAIN = re.compile(r"[^<\n]+")
_CHANNEL_NAME = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.:/\-]+)")
_MAX_HEADER_LENGTH = 512
_TO_MODEL = "assistant"
_FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """The header of a message.

    Attributes:
        channel: analysis, commentary or final; empty: it has none.
        function: the function that the message calls; empty: it calls none.
    """

    channel: str
    function: str

    @classmethod
    def of(cls, text: str) -> "MessageHeader":
        """Returns the header with the given text."""
        channel, recipient = _CHANNEL_NAME.search(text), _RECIPIENT.search(text)
        name = recipient[1] if recipient else ""
        return cls(
            channel[1] if channel else "",
            "" if name == _TO_MODEL else name.removeprefix(_FUNCTIONS),
        )


def at_header(text: TextInput) -> Steps[bool]:
    """Returns whether the text may go on with a header, as it does at the beginning of an answer
    and behind each message.
    """
    for beginning in _BEGINNINGS:
        if (yield from text.has_next(beginning)):
            return True
    return False


def read_header(text: TextInput) -> Steps[MessageHeader | None]:
    """Reads a header, up to the content of its message; None: what was read is no header."""
    yield from text.skip(MESSAGE_START)
    header = ""
    while len(header) < _MAX_HEADER_LENGTH:
        mark = yield from text.skip_any(_HEADER_MARKS)
        if mark == _MESSAGE:
            return MessageHeader.of(header)
        part = mark or (yield from text.read_run(_PLAIN, _MAX_HEADER_LENGTH - len(header)))
        if not part:
            break
        header += part
    return None


def copy_message(
    text: TextInput, sink: Callable[[str], object], *, keeps_end: bool = False
) -> Steps[None]:
    """Reads the content of a message, and what ends it: a tag with the end of the text or another
    message behind it, or the other message alone. Any other tag is content.

    Args:
        text: read up to the next message.
        sink: called with each piece of the content.
        keeps_end: whether the sink gets the tag that ends the message, too.
    """
    while (mark := (yield from text.copy_to((*_ENDS, MESSAGE_START), sink))) in _ENDS:
        text.read(len(mark))
        is_end = not (yield from text.peek()) or (yield from text.has_next(MESSAGE_START))
        if keeps_end or not is_end:
            sink(mark)
        if is_end:
            return
