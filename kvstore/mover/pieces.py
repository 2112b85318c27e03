"""The state of a `BlockMover`'s jobs, and of the pieces that they are moved in. Pure.

`JobState` is a job under way, `Piece` some of its objects. Threads report `PieceRead`, `PieceEnd`
and `JobHeld` to the mover.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Self

from kvstore.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from kvstore.store import KvObject
from kvstore.transfer_form import BlockSlicing

if TYPE_CHECKING:
    from kvstore.mover.staging import Segment

__all__ = [
    "CANCELLED",
    "JobHeld",
    "JobState",
    "Piece",
    "PieceEnd",
    "PieceRead",
    "take_results",
]

CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class JobState:
    """A load or save under way.

    Attributes:
        job: the job; its keys and ids are those of objects, not of transfer blocks.
        objects_per_block: objects of one transfer block.
        next_object: index of the first object that is in no piece yet.
        num_open: pieces that have not ended.
        good_objects: indices of objects that were put, or that were verified and are in the pool.
        error: why the result will be incomplete; no further pieces are started then.
        is_in_doubt: whether the engine knows that something may still write to its blocks.
        started_at: `time.monotonic()` at its start.
        num_in_place: number of its pieces that move in place: all of them, or 0.
        num_reported: counts pieces that a thread is done with. `next()` on `itertools.count` is
            atomic under the GIL, so threads share it without a lock.
        last_moved_at: `time.monotonic()` when a thread was last done with a piece.
        moving_s: seconds that threads spent on its pieces, added up.
    """

    job: LoadJob | SaveJob
    objects_per_block: int = 1
    next_object: int = 0
    num_open: int = 0
    good_objects: set[int] = field(default_factory=set)
    error: str = ""
    is_in_doubt: bool = False
    started_at: float = field(default_factory=time.monotonic)
    last_moved_at: float = 0.0
    moving_s: float = 0.0
    num_in_place: int = 0
    num_reported: Iterator[int] = field(default_factory=lambda: count(1))

    @classmethod
    def start(cls, job: LoadJob | SaveJob, slicing: BlockSlicing) -> Self:
        """The state of a new job, whose keys and ids are those of transfer blocks."""
        keys, object_ids = slicing.object_keys(job.keys), slicing.object_ids(job.block_ids)
        num_objects = slicing.objects_per_block
        if isinstance(job, SaveJob):
            num_found = job.num_found * num_objects
            job = replace(job, keys=keys, block_ids=object_ids, num_found=num_found)
        else:
            job = replace(job, keys=keys, block_ids=object_ids)
        return cls(job, num_objects)

    @property
    def seconds(self) -> float:
        """Seconds from its start to `last_moved_at`, without `waited`; 0 if nothing was moved."""
        return max(0.0, self.last_moved_at - self.started_at - self.waited)

    @property
    def waited(self) -> float:
        """Seconds of that time in which a save ahead of its step waited for it; 0 for others."""
        if not (isinstance(self.job, SaveJob) and self.job.step):
            return 0.0
        return max(0.0, self.last_moved_at - self.started_at - self.moving_s)

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
        """Leading good blocks. Pieces end in any order, and only an unbroken prefix counts."""
        num_good = 0
        while num_good in self.good_objects:
            num_good += 1
        return num_good // self.objects_per_block

    @property
    def num_tail_tokens(self) -> int:
        """Valid tokens in the last block of a save if it is partial; 0 if all blocks are full."""
        return self.job.num_tail_tokens if isinstance(self.job, SaveJob) else 0

    def start_piece(self, segment: "Segment") -> "Piece":
        """Starts a piece of the next objects, as many as the segment holds."""
        end = min(self.next_object + segment.num_slots, len(self.job.keys))
        piece = self._new_piece(range(self.next_object, end), segment)
        self.next_object = end
        return piece

    def start_in_place(self, num_objects: int, num_slices: int = 1) -> list[tuple[int, "Piece"]]:
        """Starts pieces of all objects that are left.

        Args:
            num_objects: most objects of a piece.
            num_slices: 1, or the number of layer slices if each piece must consist of one slice
                only; then blocks must have one slice of heads.

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

    def is_awaited(self, report: "PieceRead | PieceEnd") -> bool:
        """Whether the engine's thread must react to a report. Any thread; once for each piece.

        Of pieces that move in place, only the last one and those that failed matter.
        """
        num_reported = next(self.num_reported)
        return bool(report.error or self.error) or num_reported >= self.num_in_place

    def end_piece(self, end: "PieceEnd") -> None:
        """Records the result of a piece."""
        self.good_objects.update(end.piece.indices[: end.num_good])
        self.error = self.error or end.error
        self.moving_s += end.seconds
        self.num_open -= 1

    def result(self) -> LoadResult | SaveResult:
        """Returns the result of a job that is over."""
        if isinstance(self.job, SaveJob):
            return SaveResult(
                self.job.job_id,
                committed=not self.error,
                error=self.error,
                seconds=self.seconds,
                waited=self.waited,
            )
        # A cancelled load may still be complete, because calls under way go on.
        num_good = self.num_good_blocks
        is_complete = num_good * self.objects_per_block == len(self.job.keys)
        error = "" if is_complete else self.error
        return LoadResult(self.job.job_id, num_good, error, self.seconds)

    def _new_piece(self, indices: range, segment: "Segment | None" = None) -> "Piece":
        self.num_open += 1
        keys = tuple(self.job.keys[index] for index in indices)
        object_ids = tuple(self.job.block_ids[index] for index in indices)
        return Piece(self, indices, keys, object_ids, segment)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some objects of a job.

    Attributes:
        job: the job.
        indices: of the objects in the job.
        keys: of the objects.
        object_ids: of the objects; see `BlockSlicing`.
        segment: where the objects are staged; None if they are moved in place, that is, directly
            between the backend and the pool.
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
    def staged_objects(self) -> list[KvObject]:
        """The objects in the segment."""
        return self.staged_in.slots[: len(self.keys)]

    @property
    def tail_slots(self) -> range:
        """The segment's slots that hold objects of a partial tail."""
        if not self.job.num_tail_tokens:
            return range(0)
        first_tail = len(self.job.job.keys) - self.job.objects_per_block - self.indices.start
        return range(max(0, first_tail), len(self.keys))


@dataclass(frozen=True, slots=True)
class PieceRead:
    """A load's piece is in its segment.

    Attributes:
        piece: the piece.
        num_good: leading objects that can be used.
        error: why the others cannot.
    """

    piece: Piece
    num_good: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class PieceEnd:
    """A piece has been put, or is in the pool, or failed.

    Attributes:
        piece: the piece.
        num_good: leading objects that were put, or that are in the pool.
        error: why the others were not.
        has_settled: see `InDoubtError`; None if nothing can write to the piece's memory.
        seconds: that a thread spent on it last.
    """

    piece: Piece
    num_good: int
    error: str = ""
    has_settled: Callable[[], bool] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobHeld:
    """The backend has the first objects of a save that is about to start.

    Attributes:
        job: the save.
        num_objects: how many it has.
    """

    job: JobState
    num_objects: int


def take_results(jobs: dict[int, JobState]) -> tuple[list[LoadResult], list[SaveResult]]:
    """Removes the jobs that are over from the jobs under way; returns their results."""
    over = [job for job in jobs.values() if job.is_over]
    for job in over:
        del jobs[job.job.job_id]
    results = [job.result() for job in over]
    loads = [result for result in results if isinstance(result, LoadResult)]
    return loads, [result for result in results if isinstance(result, SaveResult)]
