"""`StepFence`: holds back what steps in flight may still read or write. Pure."""

from collections.abc import Iterator

__all__ = ["StepFence"]


class StepFence:
    """References to blocks, kept until a step has reported.

    Steps report in the order in which they start.

    Attributes:
        newest_step: the step started last; 0 before the first.
    """

    def __init__(self) -> None:
        self.newest_step = 0
        self._reported_step = 0
        self._held: dict[int, list[list[int]]] = {}  # by step
        self._counts: dict[int, int] = {}  # by block

    def __iter__(self) -> Iterator[int]:
        """Every reference kept."""
        for held in self._held.values():
            for block_ids in held:
                yield from block_ids

    @property
    def is_in_flight(self) -> bool:
        """Whether a step has started and not reported."""
        return self._reported_step < self.newest_step

    @property
    def counts(self) -> dict[int, int]:
        """How many references to each block are kept. Not to be changed."""
        return self._counts

    def is_standing(self, step: int) -> bool:
        """Whether `step` has yet to report."""
        return self._reported_step < step

    def holds(self, step: int, block_id: int) -> bool:
        """Whether a reference to the block is kept for `step`."""
        return any(block_id in block_ids for block_ids in self._held.get(step, ()))

    def start(self, step: int) -> None:
        """Takes note that `step` is in flight."""
        assert step > self.newest_step, "steps are numbered in the order in which they start"
        self.newest_step = step

    def hold(self, step: int, block_ids: list[int]) -> None:
        """Keeps a reference to each block until `step` reports."""
        self._held.setdefault(step, []).append(block_ids)
        for block_id in block_ids:
            self._counts[block_id] = self._counts.get(block_id, 0) + 1

    def give_up(self, block_id: int) -> None:
        """Hands back the newest reference that was held for this block alone."""
        step = max(step for step, held in self._held.items() if [block_id] in held)
        self._held[step].remove([block_id])
        self._uncount([block_id])

    def report(self, step: int) -> list[list[int]]:
        """Takes note that `step` has reported; hands back what was held, in order."""
        self._reported_step = max(self._reported_step, step)
        lifted = []
        for held_step in sorted(held for held in self._held if held <= step):
            lifted += self._held.pop(held_step)
        for block_ids in lifted:
            self._uncount(block_ids)
        return lifted

    def _uncount(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._counts[block_id] -= 1
            if self._counts[block_id] == 0:
                del self._counts[block_id]
