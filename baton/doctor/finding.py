"""`Finding`: one fact that `baton doctor` tells, and whether it is as it should be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Finding", "Level"]


class Level(StrEnum):
    """OK; a NOTE costs speed or room, and says what to do; a PROBLEM stops something."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: what it is about, a word or two.
        level: how it is.
        text: the fact, for a person.
        facts: the same for a program; values that JSON has.
    """

    topic: str
    level: Level
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)
