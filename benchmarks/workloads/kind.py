"""What a kind of workload says of itself: its flags, and the function that makes it."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigurationError
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
    """Token counts, uniform from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigurationError(f"length range is {self}; it must be 1 <= MIN <= MAX")

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, source: random.Random) -> int:
        """A count of the range."""
        return source.randint(self.low, self.high)


def parse_length_range(text: str) -> LengthRange:
    """Reads `N`, or `MIN:MAX`.

    Raises:
        ConfigurationError: it is neither, or no range of positive numbers.
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
        name: of the keyword argument; dashes for underscores make the flag.
        parse: turns the flag's text into its value.
        default: as text, in the way it is typed; None: the flag may be left out.
        help: what it says, without the default.
        metavar: what stands for the value in the help.
        is_required: whether the kind cannot do without.
    """

    name: str
    parse: Callable[[str], Any]
    default: str | None
    help: str
    metavar: str = "N"
    is_required: bool = False

    @property
    def option(self) -> str:
        """As it is typed."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of workload.

    Attributes:
        help: what it is, in a line.
        build: makes the workload of `vocab_size`, `seed` and the values of the flags.
        flags: of this kind; kinds may share flags of the same name.
    """

    help: str
    build: Callable[..., Workload]
    flags: tuple[Flag, ...]


def num_requests_flag(default: int) -> Flag:
    """How many requests."""
    return Flag("num_requests", int, str(default), "requests")


def input_len_flag(default: str) -> Flag:
    """Lengths of prompts, or of the part of a prompt that is its own."""
    return Flag(
        "input_len",
        parse_length_range,
        default,
        "tokens of a prompt, or of its own part",
        "N|MIN:MAX",
    )


def output_len_flag(default: str) -> Flag:
    """Lengths of outputs."""
    return Flag("output_len", parse_length_range, default, "tokens to generate", "N|MIN:MAX")


def draw_tokens(source: random.Random, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """`num_tokens` ids, uniform over the vocabulary."""
    return tuple(source.choices(range(vocab_size), k=num_tokens))


def refuse_below(least: float, **values: float) -> None:
    """Refuses numbers that are too small, or none.

    Raises:
        ConfigurationError: names the flag and its value.
    """
    for name, value in values.items():
        if not least <= value < math.inf:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{flag} is {value}; it must be >= {least:g}")
