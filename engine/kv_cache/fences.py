"""Defers the release of blocks that steps in flight may still read or write. Pure.

`StepFence` keeps block references until a step reports. `FencedPool` is a block
pool that releases through such a fence, and lists the copies and swap-ins of the
step being built.
"""

from collections.abc import Iterator, Sequence

from engine.kv_cache.block_pool import BlockPool

__all__ = ["FencedPool", "StepFence"]


class StepFence:
    """Block references that are kept until a step has reported.

    Steps report in the order in which they start.

    Attributes:
        newest_step: number of the step started last; 0 before the first.
    """

    def __init__(self) -> None:
        self.newest_step = 0
        self._reported_step = 0
        self._held: dict[int, list[list[int]]] = {}  # by step
        self._counts: dict[int, int] = {}  # by block

    def __iter__(self) -> Iterator[int]:
        """Yields the block of every reference kept."""
        for held in self._held.values():
            for block_ids in held:
                yield from block_ids

    @property
    def is_in_flight(self) -> bool:
        """Whether a step has started but not reported."""
        return self._reported_step < self.newest_step

    @property
    def counts(self) -> dict[int, int]:
        """Number of references kept, by block. The caller must not change it."""
        return self._counts

    def is_pending(self, step: int) -> bool:
        """Whether `step` has not reported yet."""
        return self._reported_step < step

    def holds(self, step: int, block_id: int) -> bool:
        """Whether a reference to the block is kept for `step`."""
        return any(block_id in block_ids for block_ids in self._held.get(step, ()))

    def start(self, step: int) -> None:
        """Records that `step` is in flight."""
        assert step > self.newest_step, "steps are numbered in the order in which they start"
        self.newest_step = step

    def hold(self, step: int, block_ids: list[int]) -> None:
        """Keeps a reference to each block until `step` reports."""
        self._held.setdefault(step, []).append(block_ids)
        for block_id in block_ids:
            self._counts[block_id] = self._counts.get(block_id, 0) + 1

    def drop_newest(self, block_id: int) -> None:
        """Removes the newest reference that `hold` kept for this block alone; the caller
        releases it.
        """
        step = max(step for step, held in self._held.items() if [block_id] in held)
        self._held[step].remove([block_id])
        self._uncount([block_id])

    def report(self, step: int) -> list[list[int]]:
        """Records that `step` has reported; returns the references kept until then, in order."""
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
    """A block pool that releases references only when no step in flight needs them.

    Args:
        pool: the blocks.

    Attributes:
        pool: the blocks.
        fence: the references held back until a step reports.
        swap_ins: by block, the host block that the step being built copies into it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.fence = StepFence()
        self.swap_ins: dict[int, int] = {}
        self._copies: dict[int, int] = {}  # source by target, in the step being built

    @property
    def num_fenced(self) -> int:
        """Blocks, without slots, whose only references are fenced."""
        return sum(not self.pool.is_slot(block) for block in self._only_fenced())

    @property
    def num_fenced_slots(self) -> int:
        """Slots whose only references are fenced."""
        return sum(self.pool.is_slot(block) for block in self._only_fenced())

    def num_owners(self, block: int) -> int:
        """Returns the number of the block's owners, not counting fenced references."""
        return self.pool.num_references(block) - self.fence.counts.get(block, 0)

    def is_writable(self, block: int) -> bool:
        """Whether the block's owner may write to it: it is neither shared nor cached.

        Fenced references do not count, because steps run in order and copy before they write.
        """
        return self.num_owners(block) == 1 and not self.pool.is_cached(block)

    def release(self, block_ids: list[int]) -> None:
        """Releases references, in sequence order: now, or when the newest step has reported."""
        if self.fence.is_in_flight and block_ids:
            self.fence.hold(self.fence.newest_step, block_ids)
        else:
            self._drop(block_ids)

    def report(self, step: int) -> None:
        """Releases the references held back for `step` and for steps before it."""
        for block_ids in self.fence.report(step):
            self._drop(block_ids)

    def source_of(self, block: int) -> int:
        """Returns the block that holds a block's content until the step being built copies it."""
        return self._copies.get(block, block)

    def copy(self, block: int, target: int) -> None:
        """Adds a block copy to the step being built; its source is fenced until that reports."""
        source = self.source_of(block)
        self._copies[target] = source
        self.pool.acquire([source])
        self.fence.hold(self.fence.newest_step + 1, [source])

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Returns (source, target) of the copies since the last call."""
        self._cancel_writes_to_unowned()
        copies, self._copies = self._copies, {}
        return tuple([(source, target) for target, source in copies.items()])

    def take_swap_ins(self) -> tuple[tuple[int, int], ...]:
        """Returns (host block, block) of the `swap_ins` since the last call."""
        self._cancel_writes_to_unowned()
        swap_ins, self.swap_ins = self.swap_ins, {}
        return tuple([(host_block, block) for block, host_block in swap_ins.items()])

    def check(self) -> None:
        """Verifies the invariants.

        Raises:
            AssertionError: one is broken, which is a bug.
        """
        self.pool.check()
        for block, count in self.fence.counts.items():
            if self.pool.num_references(block) < count:
                raise AssertionError("a fenced block was freed")
        if not self.fence.counts.keys() >= set(self._copies.values()):
            raise AssertionError("a block to be copied is not fenced")

    def _only_fenced(self) -> Iterator[int]:
        for block, count in self.fence.counts.items():
            if self.pool.num_references(block) == count:
                yield block

    def _drop(self, block_ids: Sequence[int]) -> None:
        self.pool.release(block_ids)
        if self._copies or self.swap_ins:
            self._cancel_writes(block_ids)

    def _cancel_writes(self, block_ids: Sequence[int]) -> None:
        """Removes copies and swap-ins into blocks that were just freed."""
        for block in block_ids:
            if self.pool.num_references(block) == 0:
                self.swap_ins.pop(block, None)
                if block in self._copies:
                    self._cancel_copy(block)

    def _cancel_writes_to_unowned(self) -> None:
        """Removes copies and swap-ins into blocks that only earlier steps still reference."""
        for target in [target for target in self._copies if not self._is_kept(target)]:
            self._cancel_copy(target)
        for block in [block for block in self.swap_ins if not self._is_kept(block)]:
            del self.swap_ins[block]

    def _is_kept(self, block: int) -> bool:
        """Whether the block stays referenced at least until the step being built has reported."""
        return self.num_owners(block) > 0 or self.fence.holds(self.fence.newest_step + 1, block)

    def _cancel_copy(self, target: int) -> None:
        source = self._copies.pop(target)
        self.fence.drop_newest(source)
        self._drop([source])
