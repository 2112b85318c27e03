"""What a `StagedMover` remembers of its jobs. Pure.

`AheadPieces`: what of saves waits for a step to compute it. Pure.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from kvstore.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from kvstore.slot import Slot
from kvstore.transfer_form import PoolCut

if TYPE_CHECKING:
    from kvstore.mover.staging import Segment

__all__ = [
    "CANCELLED",
    "AheadPieces",
    "JobHeld",
    "JobState",
    "Piece",
    "PieceEnd",
    "PieceRead",
    "in_objects",
    "take_results",
]

CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class JobState:
    """A load or save under way; moved in pieces.

    Attributes:
        job: with the keys and numbers of objects, where its blocks are not objects.
        objects_per_block: how many objects a block is.
        next_object: objects before it have been given to pieces.
        num_open: pieces that have not ended.
        good_objects: indices of objects that were put, or verified and are in the pool.
        error: why it will not be whole; no further pieces are started then.
        is_in_doubt: whether it was told that something may still write to its blocks.
        started_at: `time.monotonic()` at its start.
        num_in_place: its pieces that move in place, which is all of them or none.
        num_told: counts what threads tell of its pieces; they share it without a lock, as
            iterators of the interpreter's own do not tear.
        told_at: `time.monotonic()` when a thread last did a part of it.
        moving_s: how long threads were at its parts, one after the other; of a save ahead of its
            step, where they wait in between.
    """

    job: LoadJob | SaveJob
    objects_per_block: int = 1
    next_object: int = 0
    num_open: int = 0
    good_objects: set[int] = field(default_factory=set)
    error: str = ""
    is_in_doubt: bool = False
    started_at: float = field(default_factory=time.monotonic)
    told_at: float = 0.0
    moving_s: float = 0.0
    num_in_place: int = 0
    num_told: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def seconds(self) -> float:
        """From its start to the last thing that a thread did for it, without what it `waited`; 0
        if none did any.
        """
        return max(0.0, self.told_at - self.started_at - self.waited)

    @property
    def waited(self) -> float:
        """For how long of that time no thread was at a save that waits for its step."""
        if not (isinstance(self.job, SaveJob) and self.job.step):
            return 0.0
        return max(0.0, self.told_at - self.started_at - self.moving_s)

    @property
    def is_started(self) -> bool:
        """Whether no further pieces will be started."""
        return self.next_object >= len(self.job.keys) or self.error != ""

    @property
    def is_over(self) -> bool:
        """Whether its result is known."""
        return self.is_started and self.num_open == 0

    @property
    def num_good_blocks(self) -> int:
        """Leading good blocks: pieces end in any order, only an unbroken prefix counts."""
        num_good = 0
        while num_good in self.good_objects:
            num_good += 1
        return num_good // self.objects_per_block

    @property
    def num_tail_tokens(self) -> int:
        """Valid tokens in the objects of a partial tail to be saved; 0 if all blocks are full."""
        return self.job.num_tail_tokens if isinstance(self.job, SaveJob) else 0

    def start_piece(self, segment: "Segment") -> "Piece":
        """The next objects, as many as the segment holds."""
        end = min(self.next_object + segment.num_slots, len(self.job.keys))
        piece = self._new_piece(range(self.next_object, end), segment)
        self.next_object = end
        return piece

    def start_in_place(self, num_objects: int, num_slices: int = 1) -> list[tuple[int, "Piece"]]:
        """All objects that are left, at most so many in a piece.

        Args:
            num_objects: of a piece.
            num_slices: of each block's layers, of which a piece has one; for blocks whose heads
                are in one slice.

        Returns:
            The pieces, each with the number of its slice.
        """
        left = range(self.next_object, len(self.job.keys))
        assert num_slices in (1, self.objects_per_block)
        self.next_object = left.stop
        pieces = [
            (number, self._new_piece(left[number::num_slices][first : first + num_objects]))
            for number in range(num_slices)
            for first in range(0, len(left) // num_slices, num_objects)
        ]
        self.num_in_place = len(pieces)
        return pieces

    def is_awaited(self, news: "PieceRead | PieceEnd") -> bool:
        """Whether the engine's thread has to do with what a thread tells. Any thread; once for
        each piece. What moves in place is of interest when all of it has, or some cannot.
        """
        num_told = next(self.num_told)
        return bool(news.error or self.error) or num_told >= self.num_in_place

    def _new_piece(self, indices: range, segment: "Segment | None" = None) -> "Piece":
        self.num_open += 1
        keys = tuple(self.job.keys[index] for index in indices)
        object_ids = tuple(self.job.block_ids[index] for index in indices)
        return Piece(self, indices, keys, object_ids, segment)

    def end_piece(self, end: "PieceEnd") -> None:
        """Takes in what became of a piece."""
        self.good_objects.update(end.piece.indices[: end.num_good])
        self.error = self.error or end.error
        self.moving_s += end.seconds
        self.num_open -= 1

    def result(self) -> LoadResult | SaveResult:
        """What the engine is told of a job that is over."""
        if isinstance(self.job, SaveJob):
            is_good = not self.error
            return SaveResult(
                self.job.job_id,
                committed=is_good,
                error=self.error,
                seconds=self.seconds,
                waited=self.waited,
            )
        # All may have come although the load was cancelled: a call under way goes on.
        num_good = self.num_good_blocks
        is_whole = num_good * self.objects_per_block == len(self.job.keys)
        return LoadResult(self.job.job_id, num_good, "" if is_whole else self.error, self.seconds)


@dataclass(frozen=True, slots=True)
class Piece:
    """Objects of a job, `indices` of which they are.

    `segment` is what they are staged in; None if they move from and to where they lie in the pool.
    """

    job: JobState
    indices: range
    keys: tuple[bytes, ...]
    object_ids: tuple[int, ...]
    segment: "Segment | None"

    @property
    def staged_in(self) -> "Segment":
        """The segment of a piece that has one."""
        assert self.segment is not None
        return self.segment

    @property
    def slots(self) -> list[Slot]:
        """The segment's slots in use: where it is fetched to."""
        return self.staged_in.slots[: len(self.keys)]

    @property
    def tail_slots(self) -> range:
        """The slots of what `JobState.num_tail_tokens` is about."""
        if not self.job.num_tail_tokens:
            return range(0)
        first_tail = len(self.job.job.keys) - self.job.objects_per_block - self.indices.start
        return range(max(0, first_tail), len(self.keys))


@dataclass(frozen=True, slots=True)
class PieceRead:
    """A load's piece is in its segment: its good leading objects, and why not all."""

    piece: Piece
    num_good: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class PieceEnd:
    """A piece has been put, or is in the pool: its good leading objects, and why not all.

    `has_settled`: see `InDoubtError` in `backend.py`; None if nothing writes to it. `seconds`: how
    long a thread was at it last.
    """

    piece: Piece
    num_good: int
    error: str = ""
    has_settled: Callable[[], bool] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobHeld:
    """The first blocks of a save that is about to start are held already."""

    job: JobState
    num_blocks: int


def take_results(jobs: dict[int, JobState]) -> tuple[list[LoadResult], list[SaveResult]]:
    """Takes those that are over out of the jobs under way; what the engine is told of them."""
    over = [job for job in jobs.values() if job.is_over]
    for job in over:
        del jobs[job.job.job_id]
    results = [job.result() for job in over]
    loads = [result for result in results if isinstance(result, LoadResult)]
    return loads, [result for result in results if isinstance(result, SaveResult)]


def in_objects(jobs: Sequence[LoadJob | SaveJob], cut: PoolCut) -> Sequence[LoadJob | SaveJob]:
    """Jobs whose keys and ids are those of objects instead of transfer blocks."""
    return [_in_objects(job, cut) for job in jobs]


def _in_objects(job: LoadJob | SaveJob, cut: PoolCut) -> LoadJob | SaveJob:
    keys, ids = cut.object_keys(job.keys), cut.object_ids(job.block_ids)
    if isinstance(job, LoadJob):
        return replace(job, keys=keys, block_ids=ids)
    return replace(job, keys=keys, block_ids=ids, num_found=job.num_found * cut.objects_per_block)


@dataclass(slots=True)
class _Step:
    pieces: list[tuple[int, Piece]] = field(default_factory=list)  # layers that it needs
    jobs: list[JobState] = field(default_factory=list)


class AheadPieces:
    """Jobs and pieces by the step that they wait for."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, _Step] = defaultdict(_Step)

    def add_pieces(self, step: int, pieces: Sequence[tuple[int, Piece]]) -> None:
        """Pieces, each with how many leading layers must be computed before it can be moved."""
        self._steps[step].pieces += pieces

    def add_job(self, step: int, job: JobState) -> None:
        """A job of which nothing can be moved before its step is over."""
        self._steps[step].jobs.append(job)

    def take(self, step: int, num_layers: int) -> list[Piece]:
        """The pieces that can be moved now."""
        waiting = self._steps.get(step)
        if waiting is None:
            return []
        ready = [piece for needed, piece in waiting.pieces if needed <= num_layers]
        waiting.pieces = [entry for entry in waiting.pieces if entry[0] > num_layers]
        return ready

    def end(self, step: int) -> tuple[list[Piece], list[JobState]]:
        """All that still waits for a step: pieces, and jobs that have none yet."""
        left = self._steps.pop(step, _Step())
        return [piece for _, piece in left.pieces], left.jobs
