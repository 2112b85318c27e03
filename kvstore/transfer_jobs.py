"""What the store connector's worker remembers of its jobs. Pure."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.connector import LoadJob, SaveJob

if TYPE_CHECKING:
    from kvstore.staging import Segment

__all__ = ["CANCELLED", "JobState", "Piece", "PieceEnd", "PieceRead"]

CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class JobState:
    """A load or save under way; moved in pieces of one segment each.

    Attributes:
        next_block: blocks before it have been given to pieces.
        num_open: pieces that have not ended.
        good_blocks: indices of blocks that were put, or verified and scattered.
        error: why it will not be whole; no further pieces are started then.
        started_at: `time.monotonic()` at its start.
        told_at: `time.monotonic()` when a thread last did a part of it.
    """

    job: LoadJob | SaveJob
    next_block: int = 0
    num_open: int = 0
    good_blocks: set[int] = field(default_factory=set)
    error: str = ""
    started_at: float = field(default_factory=time.monotonic)
    told_at: float = 0.0

    @property
    def seconds(self) -> float:
        """From its start to the last thing that a thread did for it; 0 if none did any."""
        return max(0.0, self.told_at - self.started_at)

    @property
    def is_started(self) -> bool:
        """Whether no further pieces will be started."""
        return self.next_block >= len(self.job.keys) or self.error != ""

    @property
    def is_over(self) -> bool:
        """Whether its result is known."""
        return self.is_started and self.num_open == 0

    @property
    def num_good_prefix(self) -> int:
        """Leading good blocks: pieces end in any order, only an unbroken prefix counts."""
        count = 0
        while count in self.good_blocks:
            count += 1
        return count

    def start_piece(self, segment: "Segment") -> "Piece":
        """The next blocks, as many as the segment holds."""
        first, end = self.next_block, self.next_block + segment.num_slots
        piece = Piece(self, first, self.job.keys[first:end], self.job.block_ids[first:end], segment)
        self.next_block += len(piece.keys)
        self.num_open += 1
        return piece

    def end_piece(self, end: "PieceEnd") -> None:
        """Takes in what became of a piece."""
        self.good_blocks.update(range(end.piece.first, end.piece.first + end.num_good))
        self.error = self.error or end.error
        self.num_open -= 1


@dataclass(frozen=True, slots=True)
class Piece:
    """The blocks `[first, first + len(keys))` of a job, in one segment."""

    job: JobState
    first: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    segment: "Segment"

    @property
    def slots(self) -> list[memoryview]:
        """The segment's slots in use."""
        return self.segment.slots[: len(self.keys)]

    @property
    def num_tail_tokens(self) -> int:
        """Valid tokens in its last block if that is a partial tail to be saved, else 0."""
        job = self.job.job
        is_last = self.first + len(self.keys) == len(job.keys)
        return job.num_tail_tokens if isinstance(job, SaveJob) and is_last else 0


@dataclass(frozen=True, slots=True)
class PieceRead:
    """A load's piece is in its segment: its good leading blocks, and why not all."""

    piece: Piece
    num_good: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class PieceEnd:
    """A piece has been put, or is in the pool: its good leading blocks, and why not all."""

    piece: Piece
    num_good: int
    error: str = ""
