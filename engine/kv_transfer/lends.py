"""`Lends`: lends prefixes of the prefix cache to engines that ask for them. Pure.

A router that sends a prompt to one replica may know that another one holds the KV of its
beginning. It asks that one to lend the blocks, and the replica that computes the prompt loads them
(docs/adr/0078-sessions-and-pulls.md). The blocks are those of no request: a job holds a reference
on them until the lease is over. Requests of this engine come first: lending takes only room that
none of them needs, and ends when one of them lacks blocks.
"""

from collections.abc import Sequence

from engine.kv_cache.block_table import NO_BLOCK
from engine.kv_cache.manager import KvCacheManager, PrefixMatch
from engine.kv_transfer.blocks import TransferBlocks, TransferItem, held_by
from engine.kv_transfer.jobs import JobTable, Lend
from engine.request import PrefixRequest
from kvstore.connector import KvConnectorScheduler
from kvstore.jobs import SaveResult

__all__ = ["Lends"]

# Prefixes that are lent at a time; each has a list of keys and holds blocks.
_MAX_LENDS = 64


class Lends:
    """The prefixes that one scheduler lends.

    Args:
        connector: the scheduler half.
        kv: the KV cache manager. Jobs hold references in its pool.
        cut: how pool blocks are cut into transfer blocks.
        jobs: the table for the jobs.
        namespace: digest that block keys are rooted in.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler,
        kv: KvCacheManager,
        cut: TransferBlocks,
        jobs: JobTable,
        namespace: bytes,
    ) -> None:
        self._connector = connector
        self._kv = kv
        self._pool = kv.pool
        self._cut = cut
        self._jobs = jobs
        self._namespace = namespace

    def start(self, request: PrefixRequest, num_reserved: int) -> None:
        """Lends the longest cached prefix of a prompt.

        Args:
            request: the other engine's.
            num_reserved: blocks that waiting requests of this engine need.
        """
        size, count = self._kv.spec.block_size, self._cut.per_block
        pool_keys = request.keys[count - 1 :: count]
        match = self._kv.match_prefix(pool_keys, len(pool_keys) * size + 1)
        if not match.num_blocks or not self._has_room(match, num_reserved):
            request.answer(None)
            return
        lent_keys = request.keys[: match.num_blocks * count]
        items = self._items(match, lent_keys)
        job = Lend(
            job_id=self._connector.save(
                [item.key for item in items],
                [item.transfer_id for item in items],
                num_found=len(items),
                lease_id=request.lease_id,
            ),
            block_ids=held_by(items),
            lease_id=request.lease_id,
            handoff=self._connector.make_handoff(
                request.lease_id, self._namespace, lent_keys, match.num_blocks * size
            ),
            answer=request.answer,
        )
        self._pool.acquire(job.block_ids)
        self._jobs.add(job)

    def finish(self, job: Lend, result: SaveResult) -> None:
        """Processes a result: answers, and starts the lease's time if the blocks are lent."""
        if result.is_held:
            self._jobs.lent[job.job_id] = job
        else:
            self._pool.release(job.block_ids)
        if result.committed and result.is_held:
            self._connector.offer(job.lease_id)
            job.take_answer()(job.handoff)
        else:
            self.give_up(job)

    def give_up(self, job: Lend) -> None:
        """Ends a lease whose blocks are not lent in time. They stay held until the result is in."""
        self._connector.end_lease(job.lease_id)
        job.take_answer()(None)

    def stop(self) -> int:
        """Ends all leases, as a request of this engine lacks blocks.

        Returns:
            How many blocks, without slots, come free when they are no longer read.
        """
        lends = [job for job in self._jobs.lends() if not job.is_stopped]
        for job in lends:
            job.is_stopped = True
            self._connector.end_lease(job.lease_id)
        blocks = {block for job in self._jobs.lends() for block in job.block_ids}
        return sum(
            self._pool.num_references(block) == 1 and not self._pool.is_slot(block)
            for block in blocks
        )

    def _has_room(self, match: PrefixMatch, num_reserved: int) -> bool:
        """Whether the blocks can be kept without those that this engine's requests need."""
        blocks = [block for group in match.blocks for block in group]
        slots = [block for block in blocks if self._pool.is_slot(block)]
        num_free_slots = len(slots) - self._pool.num_held(slots)
        num_free = len(blocks) - self._pool.num_held(blocks) - num_free_slots
        return (
            num_free <= self._kv.num_spare - num_reserved
            and num_free_slots < max(1, self._pool.num_free_slots)
            and sum(1 for _ in self._jobs.lends()) < _MAX_LENDS
        )

    def _items(self, match: PrefixMatch, keys: Sequence[bytes]) -> list[TransferItem]:
        """Returns what the blocks of a match hold, and the states at its end."""
        blocks = [
            [*[NO_BLOCK] * first, *blocks]
            for first, blocks in zip(match.first_live, match.blocks, strict=True)
        ]
        items = list(self._cut.items(range(len(keys)), keys, blocks, match.first_live))
        if self._kv.states is not None:
            items += self._cut.state_items(len(keys) - 1, keys[-1], blocks[-1][-1])
        return items
