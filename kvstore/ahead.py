"""`AheadPieces`: what of saves waits for a step to compute it. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.transfer_jobs import JobState, Piece

__all__ = ["AheadPieces"]


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
