"""`FencedPool`: references to blocks that steps in flight may still read or write. Pure.

`StepFence`: holds back what steps in flight may still read or write. Pure.
"""

from collections.abc import Iterator, Sequence

from engine.kv_cache.block_pool import BlockPool

__all__ = ["FencedPool", "StepFence"]


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


class FencedPool:
    """A block pool whose references are dropped when no step needs them any longer.

    Args:
        pool: the blocks.

    Attributes:
        fence: what is held back until a step reports.
        swap_ins: by block, the host block that the step being built copies into it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.fence = StepFence()
        self.swap_ins: dict[int, int] = {}
        self._copies: dict[int, int] = {}  # of the step being built, source by target

    @property
    def num_fenced(self) -> int:
        """Blocks that only fences hold."""
        counts = self.fence.counts
        return sum(self.pool.num_references(block) == count for block, count in counts.items())

    def num_owners(self, block: int) -> int:
        """How many hold the block, fences not counted."""
        return self.pool.num_references(block) - self.fence.counts.get(block, 0)

    def is_writable(self, block: int) -> bool:
        """Whether an owner of the block may write to it: it is neither shared nor cached.

        A fence is no owner: steps run in order, and copy before they write.
        """
        return self.num_owners(block) == 1 and not self.pool.is_cached(block)

    def release(self, block_ids: list[int]) -> None:
        """Drops references, in sequence order: at once, or when what is in flight has reported."""
        if self.fence.is_in_flight and block_ids:
            self.fence.hold(self.fence.newest_step, block_ids)
        else:
            self._drop(block_ids)

    def report(self, step: int) -> None:
        """Drops what was held back for `step` and those before it."""
        for block_ids in self.fence.report(step):
            self._drop(block_ids)

    def source_of(self, block: int) -> int:
        """Where a block's content is until the copies of the step being built are made."""
        return self._copies.get(block, block)

    def copy(self, block: int, target: int) -> None:
        """Lets the step being built copy a block; the source is held back until it reports."""
        source = self.source_of(block)
        self._copies[target] = source
        self.pool.acquire([source])
        self.fence.hold(self.fence.newest_step + 1, [source])

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, target) of the copies since the last call."""
        self._cancel_forsaken()
        copies, self._copies = self._copies, {}
        return tuple((source, target) for target, source in copies.items())

    def take_swap_ins(self) -> tuple[tuple[int, int], ...]:
        """(host block, block) of `swap_ins` since the last call."""
        self._cancel_forsaken()
        swap_ins, self.swap_ins = self.swap_ins, {}
        return tuple((host_block, block) for block, host_block in swap_ins.items())

    def check(self) -> None:
        """Verifies the invariants.

        Raises:
            AssertionError: a bug.
        """
        self.pool.check()
        for block, count in self.fence.counts.items():
            if self.pool.num_references(block) < count:
                raise AssertionError("a fenced block was freed")
        if not self.fence.counts.keys() >= set(self._copies.values()):
            raise AssertionError("a block to be copied is not held back")

    def _drop(self, block_ids: Sequence[int]) -> None:
        self.pool.release(block_ids)
        if self._copies or self.swap_ins:
            self._cancel_writes(block_ids)

    def _cancel_writes(self, block_ids: Sequence[int]) -> None:
        """The step being built must not fill blocks that nobody holds any longer."""
        for block in block_ids:
            if self.pool.num_references(block) == 0:
                self.swap_ins.pop(block, None)
                if block in self._copies:
                    self._cancel_copy(block)

    def _cancel_forsaken(self) -> None:
        """The step being built must not fill blocks that are held for earlier steps alone."""
        for target in [target for target in self._copies if not self._is_kept(target)]:
            self._cancel_copy(target)
        for block in [block for block in self.swap_ins if not self._is_kept(block)]:
            del self.swap_ins[block]

    def _is_kept(self, block: int) -> bool:
        """Whether the block is held until the step being built has reported, or longer."""
        return self.num_owners(block) > 0 or self.fence.holds(self.fence.newest_step + 1, block)

    def _cancel_copy(self, target: int) -> None:
        source = self._copies.pop(target)
        self.fence.give_up(source)
        self._drop([source])
