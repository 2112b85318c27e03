"""The checks of `baton doctor`, and what they return.

Each module here has check functions that yield findings. No check changes anything on the
machine. `baton.cli.doctor` runs them all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Finding", "Level"]


class Level(StrEnum):
    """How serious a finding is.

    OK: as it should be. NOTE: Baton runs, but slower or with less room than it could; the text
    names the remedy. PROBLEM: something does not work.
    """

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: the subject, in a word or two.
        level: how serious it is.
        text: the fact, for people.
        facts: the same fact for programs, as JSON values.
    """

    topic: str
    level: Level
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)
