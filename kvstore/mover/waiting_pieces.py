"""Pieces that wait. Pure.

`AheadPieces` wait for a step to compute them, `DoubtfulPieces` until nothing can write to their
memory any more.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.mover.pieces import JobState, Piece, PieceEnd

__all__ = ["AheadPieces", "DoubtfulPieces"]


@dataclass(slots=True)
class _PieceStep:
    """Pieces and jobs that wait for one step; pieces with the number of layers that they need."""

    pieces: list[tuple[int, Piece]] = field(default_factory=list)
    jobs: list[JobState] = field(default_factory=list)


class AheadPieces:
    """Saves, and pieces of them, that wait for a step to compute their blocks."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, _PieceStep] = defaultdict(_PieceStep)

    def add_pieces(self, step: int, pieces: Sequence[tuple[int, Piece]]) -> None:
        """Adds pieces, each with how many leading layers must be computed before it can move."""
        self._steps[step].pieces += pieces

    def add_job(self, step: int, job: JobState) -> None:
        """Adds a save of which nothing can be moved before its step has ended."""
        self._steps[step].jobs.append(job)

    def take_ready(self, step: int, num_layers: int) -> list[Piece]:
        """Removes and returns the pieces that need no more than the leading `num_layers`."""
        waiting = self._steps.get(step)
        if waiting is None:
            return []
        ready = [piece for needed, piece in waiting.pieces if needed <= num_layers]
        waiting.pieces = [entry for entry in waiting.pieces if entry[0] > num_layers]
        return ready

    def end_step(self, step: int) -> tuple[list[Piece], list[JobState]]:
        """Removes and returns all that still waits for a step: pieces, and saves without any."""
        left = self._steps.pop(step, _PieceStep())
        return [piece for _, piece in left.pieces], left.jobs


class DoubtfulPieces:
    """Pieces of failed loads whose memory something may still write to.

    Such a piece stays open, so that its job has no result, and its blocks and its segment are
    used for nothing else, however long that takes.
    """

    def __init__(self) -> None:
        self._ends: list[PieceEnd] = []
        self._new_jobs: list[int] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._ends)

    @property
    def num_objects(self) -> int:
        """Number of objects in these pieces."""
        return sum(len(end.piece.keys) for end in self._ends)

    @property
    def num_segments(self) -> int:
        """Number of segments that these pieces hold."""
        return sum(end.piece.segment is not None for end in self._ends)

    def add(self, end: PieceEnd) -> bool:
        """Adds a piece; returns whether it is the first one of its job."""
        job = end.piece.job
        is_first, job.is_in_doubt = not job.is_in_doubt, True
        if is_first:
            self._new_jobs.append(job.job.job_id)
        job.error = job.error or end.error
        self._ends.append(end)
        return is_first

    def take_ends(self) -> list[PieceEnd]:
        """Removes and returns all pieces; the caller adds those that have not settled again."""
        ends, self._ends = self._ends, []
        return ends

    def take_new_jobs(self) -> list[int]:
        """Returns the loads that came into doubt since the last call."""
        new_jobs, self._new_jobs = self._new_jobs, []
        return new_jobs
