"""Which process is disturbed, when, and how: a schedule that depends on the seed alone. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KINDS", "Event", "has_ended", "make_schedule"]

KINDS = ("kill", "freeze", "drain")
_RESTART_S = 15.0
"""How long a process that was killed or stopped may be down, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Event:
    """One disturbance.

    Attributes:
        at_s: seconds after the first request.
        kind: kill (SIGKILL), freeze (SIGSTOP, later SIGCONT) or drain (SIGTERM).
        target: the process's name, for example "decode-0".
    """

    at_s: float
    kind: str
    target: str


def make_schedule(
    targets: Sequence[str],
    kinds: Sequence[str],
    *,
    interval_s: float,
    duration_s: float,
    seed: int,
    rolling: int = 0,
) -> list[Event]:
    """Returns events at a steady interval within the duration.

    Args:
        targets: names of processes.
        kinds: some of `KINDS`; each event draws one of them and one target.
        interval_s: seconds between two events.
        duration_s: seconds until the last request is sent.
        seed: of the draws.
        rolling: if above 0, every target is restarted that many times instead; the times are then
            the earliest ones.
    """
    if rolling:
        chosen = [("drain", target) for _ in range(rolling) for target in targets]
    else:
        draws = random.Random(seed)
        count = max(0, int(duration_s / interval_s))
        chosen = [(draws.choice(kinds), draws.choice(targets)) for _ in range(count)]
    return [Event(interval_s * (i + 1), *each) for i, each in enumerate(chosen)]


def has_ended(events: Sequence[Event], target: str, since_s: float) -> bool:
    """Returns whether a process was killed or stopped so late that it was down at `since_s`, in
    seconds after the first request, or went down since then.
    """
    return any(
        event.target == target and event.kind != "freeze" and event.at_s >= since_s - _RESTART_S
        for event in events
    )
