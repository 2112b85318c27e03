"""Tags and code fences that models write around calls."""

import re
from collections.abc import Sequence

from router.chat.text_input import MAX_WHITESPACE, WHITESPACE, Steps, TextInput

__all__ = ["FENCE", "PYTHON_END", "PYTHON_START", "skip_closings", "skip_openings"]

FENCE = "```"
PYTHON_START = "<|python_start|>"
"""The tag before calls of Llama 4; `PYTHON_END` follows them."""
PYTHON_END = "<|python_end|>"
_LANGUAGE = re.compile(r"[\w+\-]+")
_MAX_LANGUAGE_LENGTH = 32


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
    closings = (PYTHON_END, FENCE) if FENCE in openings else (PYTHON_END,)
    text.record()
    yield from text.read_run(between, MAX_WHITESPACE)
    while (yield from text.skip_any(closings, or_beginning=True)):
        text.record()
        yield from text.read_run(between, MAX_WHITESPACE)
