"""Turns of an engine that another engine may hold, without files."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.runner import NoTurns

__all__ = ["HeldTurns"]


@dataclass(slots=True)
class HeldTurns(NoTurns):
    """Turns that another engine may hold.

    Attributes:
        is_held: whether another engine has its turn, until this one has waited often enough.
        in_waits: calls during this engine's next waits, each of which wakes it.
        is_taken: whether this engine has its turn.
        timeouts_s: of this engine's waits.
    """

    is_held: bool = False
    in_waits: list[Callable[[], object]] = field(default_factory=list)
    is_taken: bool = False
    timeouts_s: list[float] = field(default_factory=list)

    def take(self, woken: threading.Event | None = None, timeout_s: float = math.inf) -> bool:
        assert not self.is_taken
        if self.is_held and woken is not None:
            self.timeouts_s.append(timeout_s)
            if self.in_waits:
                self.in_waits.pop(0)()
            else:
                self.is_held = False
        self.is_taken = not self.is_held
        return self.is_taken

    def end(self) -> None:
        self.is_taken = False
