"""`Prefetches`: blocks of prompts that another engine is still computing. Pure.

They belong to no request: what they bring enters the prefix cache, where the request
finds it, or from where it is evicted. They take room that nobody else wants: what runs
and what waits comes first, and where what runs needs more, they are stopped.

`PromptParts`: puts transfer blocks of prompts together until they fill blocks. Pure.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.kv_cache.manager import KvCacheManager
from engine.kv_transfer.blocks import TransferBlocks
from kvstore.connector import KvConnectorScheduler
from kvstore.handoff import KvHandoff
from kvstore.jobs import LoadResult

__all__ = ["Prefetches", "PromptBlock", "PromptParts"]

# Prompts of which the rest may come; beyond, the rest of the oldest goes unused.
_MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """A block of a prompt.

    Attributes:
        keys: of its transfer blocks.
        parent: key of the block before it; None for the first.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None

    @property
    def key(self) -> bytes:
        """Its key in the pool."""
        return self.keys[-1]


@dataclass(slots=True)
class _Begun:
    """`keys` are those of the last, unfinished block, `parent` that of the block before it."""

    end: int = 0
    keys: tuple[bytes, ...] = ()
    parent: bytes | None = None


class PromptParts:
    """What has come of prompts, each told of from its beginning, in order, in any portions.

    Args:
        cut: how blocks are cut into transfer blocks.
    """

    def __init__(self, cut: TransferBlocks) -> None:
        self._cut = cut
        self._begun: OrderedDict[str, _Begun] = OrderedDict()

    def whole_blocks(self, handoff: KvHandoff) -> list[PromptBlock]:
        """Blocks that a portion completes; none if something before it did not come.

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
        """The rest of a prompt is not wanted. Unknown ids are fine."""
        self._begun.pop(handoff_id, None)


@dataclass(frozen=True, slots=True)
class _Prefetch:
    """`block_ids` are for `blocks`; `epoch` is the prefix cache's at its start."""

    handoff_id: str
    blocks: list[PromptBlock]
    block_ids: list[int]
    epoch: int


class Prefetches:
    """Prefetches of one scheduler.

    Args:
        connector: the scheduler half.
        kv: the KV cache manager, in whose pool job references are kept.
        cut: how blocks are cut into transfer blocks.
        on_job: called with the id of each job that is scheduled.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler,
        kv: KvCacheManager,
        cut: TransferBlocks,
        on_job: Callable[[int], None],
    ) -> None:
        self._connector = connector
        self._kv = kv
        self._pool = kv.pool
        self._cut = cut
        self._on_job = on_job
        self._parts = PromptParts(cut)
        self._jobs: dict[int, _Prefetch] = {}
        # Those that requests may wait for.
        self._by_handoff: dict[str, dict[int, None]] = {}
        self._coming: set[bytes] = set()  # keys of their blocks
        self._stopped: set[int] = set()

    @property
    def in_flight(self) -> int:
        """Those whose result is not in."""
        return len(self._jobs)

    def is_open(self, job_id: int) -> bool:
        """Whether a prefetch's result is awaited."""
        return job_id in self._jobs

    def held_blocks(self) -> list[int]:
        """One entry per reference that a job holds."""
        return [block for job in self._jobs.values() for block in job.block_ids]

    def of_handoff(self, handoff_id: str) -> Collection[int]:
        """Those under way that its request waits for."""
        return self._by_handoff.get(handoff_id, ())

    def start(self, handoff: KvHandoff, num_reserved: int) -> tuple[int, int] | None:
        """Begins to load what of these full transfer blocks fills blocks that are neither cached
        nor on their way, as far as there is room beyond what running sequences need. Where
        there is not, the rest of the prompt is left to its request: nobody finds what lies
        behind a gap. Models with windows do without.

        Args:
            handoff: names the next portion of a prompt's blocks.
            num_reserved: blocks that others wait for.

        Returns:
            The load's id and number of tokens, if there is one.
        """
        if self._kv.spec.windows != (None,) or not self._kv.caches_prefixes:
            return None
        blocks = self._parts.whole_blocks(handoff)
        places = [self._pool.lookup(block.key) for block in blocks]
        found = [place for place in places if place is not None]
        self._pool.acquire(found)  # not to be evicted for what follows them
        lacking = [block for block, place in zip(blocks, places, strict=True) if place is None]
        wanted = [block for block in lacking if block.key not in self._coming]
        room = max(0, self._kv.num_spare - num_reserved)
        if len(wanted) > room:
            self._parts.forget(handoff.handoff_id)
        prefetch = self._start(handoff, wanted[:room]) if wanted[:room] else None
        self._pool.release(found)
        return prefetch

    def stop(self) -> int:
        """A running sequence lacks blocks: those under way shall end.

        Returns:
            How many blocks they give back then.
        """
        jobs = [job for jobs in self._by_handoff.values() for job in jobs]
        for job_id in jobs:
            self._cancel(job_id)
        return sum(len(self._jobs[job].block_ids) for job in jobs)

    def finish(self, result: LoadResult) -> None:
        """Takes in a result: what came can be found."""
        self._unlist(result.job_id)
        prefetch = self._jobs.pop(result.job_id)
        self._stopped.discard(result.job_id)
        num_good = result.num_blocks // self._cut.per_block
        if num_good < len(prefetch.blocks):
            self._parts.forget(prefetch.handoff_id)  # what follows lies behind a gap
        self._kv.adopt(
            [block.key for block in prefetch.blocks[:num_good]],
            [block.parent for block in prefetch.blocks[:num_good]],
            prefetch.block_ids[:num_good],
            prefetch.epoch,
        )
        self._pool.release(prefetch.block_ids)

    def give_up(self, job_id: int) -> int:
        """Nobody waits for a prefetch any more: it shall end. Its blocks stay held until then.

        Returns:
            How many.
        """
        self._cancel(job_id)
        self._unlist(job_id)
        return len(self._jobs[job_id].block_ids)

    def _start(self, handoff: KvHandoff, blocks: list[PromptBlock]) -> tuple[int, int]:
        block_ids = self._pool.allocate(len(blocks))
        keys = [key for block in blocks for key in block.keys]
        job_id = self._connector.load(keys, self._cut.ids_in(block_ids), handoff)
        self._jobs[job_id] = _Prefetch(handoff.handoff_id, blocks, block_ids, self._kv.epoch)
        self._by_handoff.setdefault(handoff.handoff_id, {})[job_id] = None
        self._coming.update(block.key for block in blocks)
        self._on_job(job_id)
        return job_id, len(blocks) * self._kv.spec.block_size

    def _cancel(self, job_id: int) -> None:
        if job_id not in self._stopped:
            self._stopped.add(job_id)
            self._parts.forget(self._jobs[job_id].handoff_id)  # what follows lies behind a gap
            self._connector.cancel_load(job_id)

    def _unlist(self, job_id: int) -> None:
        """No request waits for it."""
        prefetch = self._jobs[job_id]
        jobs = self._by_handoff.get(prefetch.handoff_id, {})
        if job_id in jobs:
            del jobs[job_id]
            self._coming.difference_update(block.key for block in prefetch.blocks)
        if not jobs:
            self._by_handoff.pop(prefetch.handoff_id, None)
