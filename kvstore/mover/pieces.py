"""The state of a `BlockMover`'s jobs, and of the pieces that they are moved in. Pure.

`JobState` is a job under way, `Piece` some of its objects. The engine's thread makes a piece, an
I/O thread moves it and notes in it what became of it, and the engine's thread ends it.

`DoubtfulPieces` wait until nothing can write to their memory any more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from kvstore.jobs import LoadJob, LoadResult, SaveJob, SaveResult, TransferResults
from kvstore.store import KvObject
from kvstore.transfer_form import BlockSlicing

if TYPE_CHECKING:
    from kvstore.mover.staging import Segment

__all__ = ["CANCELLED", "DoubtfulPieces", "JobState", "Piece", "take_results"]

CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class JobState:
    """A load or save under way. Only the engine's thread changes it.

    Attributes:
        job: the job; its keys and ids are those of objects, not of transfer blocks.
        objects_per_block: objects of one transfer block.
        next_object: index of the first object that is in no piece yet.
        pieces: its pieces so far, in order.
        ahead: pieces that wait for layers, each with how many leading layers it needs.
        num_open: pieces that have not ended.
        error: why the result will be incomplete; no further pieces are started then.
        is_in_doubt: whether the engine knows that something may still write to its blocks.
        started_at: `time.monotonic()` at its start.
    """

    job: LoadJob | SaveJob
    objects_per_block: int = 1
    next_object: int = 0
    pieces: list["Piece"] = field(default_factory=list)
    ahead: list[tuple[int, "Piece"]] = field(default_factory=list)
    num_open: int = 0
    error: str = ""
    is_in_doubt: bool = False
    started_at: float = field(default_factory=time.monotonic)

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
    def is_started(self) -> bool:
        """Whether no further pieces will be started."""
        return self.next_object >= len(self.job.keys) or self.error != ""

    @property
    def is_over(self) -> bool:
        """Whether its result is known."""
        return self.is_started and self.num_open == 0

    @property
    def num_tail_tokens(self) -> int:
        """Valid tokens in the last block of a save if it is partial; 0 if all blocks are full."""
        return self.job.num_tail_tokens if isinstance(self.job, SaveJob) else 0

    @property
    def tail_group(self) -> int:
        """The layer group of a save's partial last block."""
        return self.job.tail_group if isinstance(self.job, SaveJob) else 0

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
        return [
            (number, self._new_piece(left[number::num_slices][first : first + num_objects]))
            for number in range(num_slices)
            for first in range(0, len(left) // num_slices, num_objects)
        ]

    def take_ahead(self, num_layers: int | None = None) -> list["Piece"]:
        """Removes and returns the pieces that need no more than the leading `num_layers` layers;
        all that wait if it is None.
        """
        waiting, self.ahead = self.ahead, []
        if num_layers is not None:
            self.ahead = [entry for entry in waiting if entry[0] > num_layers]
        return [piece for needed, piece in waiting if num_layers is None or needed <= num_layers]

    def end_piece(self, piece: "Piece") -> None:
        """Notes that nothing moves a piece any more, and nothing writes to its memory."""
        self.error = self.error or piece.error
        self.num_open -= 1

    def result(self) -> LoadResult | SaveResult:
        """Returns the result of a job that is over."""
        moved_at = max((piece.moved_at for piece in self.pieces), default=self.started_at)
        seconds = max(0.0, moved_at - self.started_at)
        if isinstance(self.job, SaveJob):
            moving_s = sum(piece.seconds for piece in self.pieces)
            # A save ahead of its step waits between the layers.
            waited = max(0.0, seconds - moving_s) if self.job.step else 0.0
            return SaveResult(
                self.job.job_id,
                committed=not self.error,
                error=self.error,
                seconds=seconds - waited,
                waited=waited,
            )
        # A cancelled load may still be complete, because calls under way go on.
        num_good = self._num_good_objects()
        error = "" if num_good == len(self.job.keys) else self.error
        return LoadResult(self.job.job_id, num_good // self.objects_per_block, error, seconds)

    def _num_good_objects(self) -> int:
        """Returns how many leading objects of a load are verified and in the pool."""
        num_good = 0
        for piece in self.pieces:
            num_good += piece.num_good
            if piece.num_good < len(piece.keys):
                break
        return num_good

    def _new_piece(self, indices: range, segment: "Segment | None" = None) -> "Piece":
        self.num_open += 1
        keys = tuple(self.job.keys[index] for index in indices)
        object_ids = tuple(self.job.block_ids[index] for index in indices)
        self.pieces.append(Piece(self, indices, keys, object_ids, segment))
        return self.pieces[-1]


@dataclass(slots=True, eq=False)
class Piece:
    """Some objects of a job, and what became of them.

    One thread at a time changes it: an I/O thread from its submission to its report, else the
    engine's.

    Attributes:
        job: the job.
        indices: of the objects in the job.
        keys: of the objects.
        object_ids: of the objects; see `BlockSlicing`.
        segment: where the objects are staged; None if they are moved in place, that is, directly
            between the backend and the pool.
        num_good: leading objects that were put, or that were verified and are in the segment or
            the pool.
        error: why the others were not.
        has_settled: see `InDoubtError`; None if nothing can write to the piece's memory.
        has_landed: whether the copy of its good objects from the segment to the pool has begun.
        moved_at: `time.monotonic()` when a thread was last done with it; 0 if none was.
        seconds: that this thread spent on it.
    """

    job: JobState
    indices: range
    keys: tuple[bytes, ...]
    object_ids: tuple[int, ...]
    segment: "Segment | None"
    num_good: int = 0
    error: str = ""
    has_settled: Callable[[], bool] | None = None
    has_landed: bool = False
    moved_at: float = 0.0
    seconds: float = 0.0

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

    @property
    def must_land(self) -> bool:
        """Whether it has objects of a load in its segment that are to be copied into the pool."""
        is_staged_load = self.segment is not None and isinstance(self.job.job, LoadJob)
        return is_staged_load and self.num_good > 0 and not self.has_landed

    @property
    def is_awaited(self) -> bool:
        """Whether the engine's thread must react to its report. Any thread, after the report.

        Of pieces that move in place, only the last one and those that failed matter.
        """
        if self.segment is not None or self.error or self.job.error:
            return True
        return all(piece.moved_at for piece in self.job.pieces)

    def fail(self, error: str) -> Self:
        """Notes that none of its objects can be used; returns the piece."""
        self.num_good, self.error = 0, error
        return self


def take_results(jobs: dict[int, JobState]) -> tuple[list[LoadResult], list[SaveResult]]:
    """Removes the jobs that are over from the jobs under way; returns their results."""
    over = [job for job in jobs.values() if job.is_over]
    ended = TransferResults.of([job.result() for job in over])
    for job in over:
        del jobs[job.job.job_id]
        job.pieces.clear()  # they refer to the job, which would stay until a garbage collection
    return list(ended.loads), list(ended.saves)


class DoubtfulPieces:
    """Pieces of failed loads whose memory something may still write to.

    Such a piece stays open, so that its job has no result, and its blocks and its segment are
    used for nothing else, however long that takes.
    """

    def __init__(self) -> None:
        self._ends: list[Piece] = []
        self._new_jobs: list[int] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._ends)

    @property
    def num_objects(self) -> int:
        """Number of objects in these pieces."""
        return sum(len(piece.keys) for piece in self._ends)

    @property
    def num_segments(self) -> int:
        """Number of segments that these pieces hold."""
        return sum(piece.segment is not None for piece in self._ends)

    def add(self, piece: Piece) -> bool:
        """Adds a piece; returns whether it is the first one of its job."""
        job = piece.job
        is_first, job.is_in_doubt = not job.is_in_doubt, True
        if is_first:
            self._new_jobs.append(job.job.job_id)
        job.error = job.error or piece.error
        self._ends.append(piece)
        return is_first

    def take_ends(self) -> list[Piece]:
        """Removes and returns all pieces; the caller adds those that have not settled again."""
        ends, self._ends = self._ends, []
        return ends

    def take_new_jobs(self) -> list[int]:
        """Returns the loads that came into doubt since the last call."""
        new_jobs, self._new_jobs = self._new_jobs, []
        return new_jobs
