"""`Prefetches`: loads blocks of prompts that a prefill engine is still computing. Pure.

A prefetch belongs to no request. Its blocks enter the prefix cache, where the request finds them
when it comes, or they are evicted. Prefetches use only room that no request needs, and they are
stopped when a running request lacks blocks.

`PromptParts` puts the transfer blocks of a prompt together until they fill pool blocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.kv_cache.manager import KvCacheManager
from engine.kv_transfer.blocks import PromptBlock, TransferBlocks
from engine.kv_transfer.costs import LoadCosts
from engine.kv_transfer.jobs import JobTable, Prefetch
from kvstore.connector import KvConnectorScheduler
from kvstore.handoff import KvHandoff
from kvstore.jobs import LoadResult

__all__ = ["Prefetches", "PromptParts"]

# Prompts whose next portion is awaited. Beyond this, the oldest prompt is forgotten.
_MAX_PROMPTS = 1024


@dataclass(slots=True)
class _Begun:
    """A prompt of which some portions have come.

    Attributes:
        end: number of transfer blocks so far.
        keys: keys of the transfer blocks in the last pool block, which is not full.
        parent: key of the pool block before it.
    """

    end: int = 0
    keys: tuple[bytes, ...] = ()
    parent: bytes | None = None


class PromptParts:
    """Portions of prompts, each prompt in order from its beginning.

    Args:
        cut: how pool blocks are cut into transfer blocks.
    """

    def __init__(self, cut: TransferBlocks) -> None:
        self._cut = cut
        self._begun: OrderedDict[str, _Begun] = OrderedDict()

    def whole_blocks(self, handoff: KvHandoff) -> list[PromptBlock]:
        """Returns the pool blocks that a portion completes; none if a portion before it is missing.

        Args:
            handoff: names the portion's full transfer blocks; its tokens end with them.
        """
        end = handoff.num_tokens // self._cut.size
        start = end - len(handoff.block_keys)
        begun = self._begun.pop(handoff.handoff_id, None)
        if start == 0:
            begun = _Begun()
        if begun is None or begun.end != start:
            return []
        count, keys = self._cut.per_block, (*begun.keys, *handoff.block_keys)
        whole = len(keys) // count * count
        blocks = []
        for first in range(0, whole, count):
            blocks.append(PromptBlock(keys[first : first + count], begun.parent))
            begun.parent = blocks[-1].key
        begun.end, begun.keys = end, keys[whole:]
        self._begun[handoff.handoff_id] = begun
        if len(self._begun) > _MAX_PROMPTS:
            self._begun.popitem(last=False)
        return blocks

    def forget(self, handoff_id: str) -> None:
        """Ignores the rest of a prompt. Unknown ids are fine."""
        self._begun.pop(handoff_id, None)


class Prefetches:
    """Prefetches of one scheduler.

    Args:
        connector: the scheduler half.
        kv: the KV cache manager. Prefetched blocks enter its prefix cache.
        cut: how pool blocks are cut into transfer blocks.
        jobs: the table for the jobs.
        costs: decides whether a prefetch is worth it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler,
        kv: KvCacheManager,
        cut: TransferBlocks,
        jobs: JobTable,
        costs: LoadCosts,
        clock: Callable[[], float],
    ) -> None:
        self._connector = connector
        self._kv = kv
        self._pool = kv.pool
        self._cut = cut
        self._jobs = jobs
        self._costs = costs
        self._clock = clock
        self._parts = PromptParts(cut)
        # Of the open prefetches that requests wait for: by handoff, and their blocks' keys.
        self._awaited: dict[str, list[Prefetch]] = {}
        self._awaited_keys: set[bytes] = set()

    def of_handoff(self, handoff_id: str) -> Collection[Prefetch]:
        """Returns the open prefetches that the handoff's request waits for."""
        return self._awaited.get(handoff_id, ())

    def start(self, handoff: KvHandoff, num_reserved: int) -> None:
        """Starts to load a portion of a prompt.

        It loads the pool blocks that the portion completes, without those that are cached or
        being loaded, as far as there is room that no running request needs. It stops at the
        first block without room, as a prefix match cannot skip a gap; the request itself loads
        the rest. Models with sliding windows do not prefetch.
        States are never prefetched: they come with the load of the request itself.

        Args:
            handoff: names the portion's full transfer blocks.
            num_reserved: blocks that waiting requests need.
        """
        may_load = self._costs.may_load(handoff.num_tokens, 0, self._clock())
        if not may_load or self._kv.spec.windows != (None,) or not self._kv.caches_prefixes:
            return
        blocks = self._parts.whole_blocks(handoff)
        places = [self._pool.lookup(block.key) for block in blocks]
        found = [place for place in places if place is not None]
        self._pool.acquire(found)  # so that the allocation below does not evict them
        lacking = [block for block, place in zip(blocks, places, strict=True) if place is None]
        wanted = [block for block in lacking if block.key not in self._awaited_keys]
        room = max(0, self._kv.num_spare - num_reserved)
        if len(wanted) > room:
            self._parts.forget(handoff.handoff_id)
        if wanted[:room]:
            self._load(handoff, wanted[:room])
        self._pool.release(found)

    def stop(self) -> int:
        """Asks the connector to end all awaited prefetches, as a running request lacks blocks.

        Returns:
            How many blocks come free when they have ended.
        """
        jobs = [job for jobs in self._awaited.values() for job in jobs]
        for job in jobs:
            self._cancel(job)
        return sum(len(job.block_ids) for job in jobs)

    def finish(self, job: Prefetch, result: LoadResult) -> None:
        """Processes a result: the blocks that arrived enter the prefix cache."""
        self._stop_awaiting(job)
        num_good = result.num_blocks // self._cut.per_block
        if num_good < len(job.blocks):
            self._parts.forget(job.handoff_id)  # a prefix match cannot skip the gap
        self._kv.adopt(
            [block.key for block in job.blocks[:num_good]],
            [block.parent for block in job.blocks[:num_good]],
            job.block_ids[:num_good],
            job.epoch,
        )
        self._pool.release(job.block_ids)

    def give_up(self, job: Prefetch) -> None:
        """Ends the wait for a prefetch. Its blocks stay held until its result is in."""
        self._cancel(job)
        self._stop_awaiting(job)

    def _load(self, handoff: KvHandoff, blocks: list[PromptBlock]) -> None:
        block_ids = self._pool.allocate(len(blocks))
        keys = [key for block in blocks for key in block.keys]
        num_tokens = len(blocks) * self._kv.spec.block_size
        job = Prefetch(
            job_id=self._connector.load(keys, self._cut.ids_in(block_ids), handoff),
            block_ids=block_ids,
            estimate=self._costs.start(num_tokens, 0, self._clock()),
            handoff_id=handoff.handoff_id,
            blocks=blocks,
            epoch=self._kv.epoch,
        )
        self._jobs.add(job)
        self._awaited.setdefault(handoff.handoff_id, []).append(job)
        self._awaited_keys.update(block.key for block in blocks)

    def _cancel(self, job: Prefetch) -> None:
        if not job.is_stopped:
            job.is_stopped = True
            self._parts.forget(job.handoff_id)  # a prefix match cannot skip the gap
            self._connector.cancel_load(job.job_id)

    def _stop_awaiting(self, job: Prefetch) -> None:
        jobs = self._awaited.get(job.handoff_id, [])
        if job in jobs:
            jobs.remove(job)
            self._awaited_keys.difference_update(block.key for block in job.blocks)
        if not jobs:
            self._awaited.pop(job.handoff_id, None)
