"""`GroupTransfer`: what one request looks up, loads, saves and hands over. Pure.

`SequenceGroup.transfer` holds it. Only the modules of `engine.kv_transfer` change it; other
packages read it.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.handoff import KvHandoff

__all__ = ["GroupTransfer", "new_handoff_id", "overlap"]


@dataclass(slots=True, eq=False)
class GroupTransfer:
    """Transfer state of one request.

    Attributes:
        pending_handoff: the handoff that the request came with, until its load starts.
        handoff_id: id of the handoff that this engine makes, of the prompt or of a group that
            moves; empty if it makes none. Changes when a preemption takes back what was saved
            under it.
        kept_handoff: id of the handoff whose lease the connector renews for this request.
        may_load: whether the connector may still be asked for the request's KV.
        lookup_job: id of its look-up, open or answered.
        load_job: id of the load that it waits for, in state LOADING.
        pending_saves: its open save jobs in order: job id -> index of the first block saved.
        num_saved: leading full blocks of the prompt that save jobs cover or the store has.
        num_announced: leading full blocks of the prompt that `Saves.take_progress` has returned.
        published: keys of all objects in its save jobs, over all sequences.
        save_failed: whether a save job of full blocks under `handoff_id` did not commit, or its
            lease has ended.
        tail_failed: whether a save job of the partial tail did not commit.
        save_times: start and end of each save job, in seconds; empty if it makes no handoff.
        handoff: the handoff, once all its saves are scheduled.
        handoff_sent: whether `handoff` was returned to the router.
        handoff_cancelled: whether the request ended before that.
        is_poisoned: whether its KV is not finite, so that other requests must not use it.
    """

    pending_handoff: KvHandoff | None = None
    handoff_id: str = ""
    kept_handoff: str | None = None
    may_load: bool = True
    lookup_job: int | None = None
    load_job: int | None = None
    pending_saves: dict[int, int] = field(default_factory=dict)
    num_saved: int = 0
    num_announced: int = 0
    published: list[bytes] = field(default_factory=list)
    save_failed: bool = False
    tail_failed: bool = False
    save_times: list[tuple[float, float]] = field(default_factory=list)
    handoff: KvHandoff | None = None
    handoff_sent: bool = False
    handoff_cancelled: bool = False
    is_poisoned: bool = False


def new_handoff_id() -> str:
    """Returns an id that no other handoff has."""
    return uuid.uuid4().hex


def overlap(intervals: Iterable[tuple[float, float]], until: float) -> tuple[float, float]:
    """Measures the union of intervals.

    Args:
        intervals: starts and ends in seconds, in any order; they may overlap.
        until: a time of the same clock.

    Returns:
        Seconds in which at least one interval was open, and how many of them lie before `until`.
    """
    total_s = hidden_s = 0.0
    covered = float("-inf")
    for start, end in sorted(intervals):
        first = max(start, covered)
        if end > first:
            total_s += end - first
            hidden_s += max(0.0, min(end, until) - first)
            covered = end
    return total_s, hidden_s
