"""`Kind`: a kind of workload, with its flags and the function that builds it."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.common.errors import ConfigurationError
from benchmarks.request import Workload

__all__ = [
    "Flag",
    "Kind",
    "LengthRange",
    "draw_tokens",
    "input_len_flag",
    "num_requests_flag",
    "output_len_flag",
    "parse_length_range",
    "refuse_below",
]


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A uniform range of token counts from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigurationError(f"length range is {self}; it must be 1 <= MIN <= MAX")

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, source: random.Random) -> int:
        """Draws a count from the range."""
        return source.randint(self.low, self.high)


def parse_length_range(text: str) -> LengthRange:
    """Reads `N`, or `MIN:MAX`.

    Raises:
        ConfigurationError: the text is neither, or no range of positive numbers.
    """
    low, _, high = text.partition(":")
    try:
        return LengthRange(int(low), int(high or low))
    except ValueError:
        raise ConfigurationError(f"length is {text!r}; it must be N or MIN:MAX") from None


@dataclass(frozen=True, slots=True)
class Flag:
    """A command-line flag of a kind of workload.

    Attributes:
        name: name of the keyword argument. With dashes for underscores it is the flag's name.
        parse: converts the flag's text to its value.
        default: the default as text; None for none.
        help: the help text, without the default.
        metavar: the placeholder for the value in the help.
        is_required: whether the flag must be set.
    """

    name: str
    parse: Callable[[str], Any]
    default: str | None
    help: str
    metavar: str = "N"
    is_required: bool = False

    @property
    def option(self) -> str:
        """The flag as it is typed."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of workload.

    Attributes:
        help: a description in one line.
        build: returns the workload for `vocab_size`, `seed` and the values of the flags.
        flags: the flags of this kind. Kinds may share flags of the same name.
    """

    help: str
    build: Callable[..., Workload]
    flags: tuple[Flag, ...]


def num_requests_flag(default: int) -> Flag:
    """Returns the flag for the number of requests."""
    return Flag("num_requests", int, str(default), "requests")


def input_len_flag(default: str) -> Flag:
    """Returns the flag for lengths of prompts, or of the part that a prompt does not share."""
    return Flag(
        "input_len",
        parse_length_range,
        default,
        "tokens of a prompt, or of its own part",
        "N|MIN:MAX",
    )


def output_len_flag(default: str) -> Flag:
    """Returns the flag for lengths of outputs."""
    return Flag("output_len", parse_length_range, default, "tokens to generate", "N|MIN:MAX")


def draw_tokens(source: random.Random, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Draws `num_tokens` token ids, uniform over the vocabulary."""
    return tuple(source.choices(range(vocab_size), k=num_tokens))


def refuse_below(least: float, **values: float) -> None:
    """Checks that numbers are at least `least`.

    Raises:
        ConfigurationError: a number is smaller; names the flag and its value.
    """
    for name, value in values.items():
        if not least <= value < math.inf:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{flag} is {value}; it must be >= {least:g}")
