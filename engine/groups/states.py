"""Parts of a group's state: its stages' times, its draft tokens, its transfers. Pure.

Only the modules of `engine.kv_transfer` change a `GroupTransfer`; other packages read it.
"""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.request import StageTimings
from kvstore.handoff import KvHandoff

__all__ = [
    "SEPARATOR",
    "DraftState",
    "GroupTimes",
    "GroupTransfer",
    "TokenHistory",
    "new_handoff_id",
    "overlap",
]

SEPARATOR = -1  # between texts; equals no token


@dataclass(slots=True, eq=False)
class GroupTimes:
    """Clock times of one request.

    Attributes:
        arrived_at: its arrival.
        loaded_at: the end of its load.
        scheduled_at: its first chunk.
        first_token_at: its first token.
        are_reported: whether an output with timings was made.
    """

    arrived_at: float
    loaded_at: float | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    are_reported: bool = False

    def timings(
        self, now: float, *, hands_over: bool, is_saving: bool, computes_prompt: bool
    ) -> StageTimings:
        """Returns the time spent in each stage so far; 0 for stages not passed.

        Args:
            now: the present time.
            hands_over: whether the request continues on another engine after its first token.
            is_saving: whether it only waits for its saves.
            computes_prompt: whether this engine computes tokens of its prompt but the last.
        """
        return StageTimings(
            queue_ms=_ms_between(self.loaded_at or self.arrived_at, self.scheduled_at),
            prefill_ms=_ms_between(self.scheduled_at, self.first_token_at),
            transfer_ms=_ms_between(self.first_token_at, now if is_saving else None),
            load_ms=_ms_between(self.arrived_at, self.loaded_at),
            stages=tuple(self._stages(now, hands_over, computes_prompt)),
        )

    def _stages(
        self, now: float, hands_over: bool, computes_prompt: bool
    ) -> Iterator[tuple[str, float, float]]:
        """Yields the stages passed so far, each with its start and end."""
        has_prefill = hands_over or computes_prompt
        decodes_from = self.first_token_at if has_prefill else self.scheduled_at
        for name, start, end in (
            ("load", self.arrived_at, self.loaded_at),
            ("queue", self.loaded_at or self.arrived_at, self.scheduled_at),
            ("prefill", self.scheduled_at, decodes_from),
            ("transfer" if hands_over else "decode", decodes_from, now),
        ):
            if start is not None and end is not None and end > start:
                yield name, start, end


def _ms_between(start: float | None, end: float | None) -> float:
    return max(0.0, end - start) * 1000 if start is not None and end is not None else 0.0


class TokenHistory:
    """The tokens of one sequence as an array, which grows with it.

    Those of its prediction and `SEPARATOR` come before them, if it has one.

    Args:
        prediction: tokens that the answer will probably repeat.
    """

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._num_predicted = len(prediction)
        self._tokens = np.array([*prediction, SEPARATOR] if prediction else [], np.int32)
        self._start = self._length = len(self._tokens)

    def updated(self, token_ids: list[int]) -> np.ndarray:
        """Returns all tokens, `[n]` int32, as a view that the next call may overwrite.

        Args:
            token_ids: the sequence's at the last call, and those that have followed.
        """
        length = self._start + len(token_ids)
        if length > len(self._tokens):
            grown = np.empty(max(2 * length, 256), np.int32)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : length] = token_ids[self._length - self._start :]
        self._length = length
        return self._tokens[:length]

    def predicted(self, num_prompt: int, limit: int) -> list[int]:
        """Returns the next tokens of the prediction if the answer so far is its beginning.

        Args:
            num_prompt: how many of the sequence's tokens are its prompt.
            limit: the most tokens.
        """
        answer = self._tokens[self._start + num_prompt : self._length]
        rest = self._tokens[len(answer) : self._num_predicted][:limit]
        if not len(rest) or not np.array_equal(answer, self._tokens[: len(answer)]):
            return []
        return [int(token) for token in rest]


@dataclass(slots=True)
class DraftState:
    """Draft state of one sequence.

    Attributes:
        history: its tokens, after those of its prediction.
        num_checked: draft tokens that were compared with what was drawn, the newest ones count
            more.
        num_right: those of them that were equal to it.
        num_steps_without: steps since the last one with drafts.
        proposals: draft tokens of a draft model.
        proposed_at: number of tokens of the sequence that they follow.
        num_drafted: leading tokens that the draft model has run in the sequence's present row.
    """

    history: TokenHistory
    num_checked: float
    num_right: float
    num_steps_without: int = 0
    proposals: tuple[int, ...] = ()
    proposed_at: int = 0
    num_drafted: int = 0


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
