"""`Loads`: what requests look up and load through the KV connector. Pure.

A load job holds a reference on its blocks until its result is in, whatever
becomes of the request. So an abort never hands a block that is still being
written to somebody else.

*Prefetches* load blocks of a prompt that another engine is still computing. They
belong to no request: what they bring enters the prefix cache, where the request
finds it, or from where it is evicted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.block_pool import Allocation
from engine.kv_cache_manager import KvCacheManager
from engine.prompt_parts import PromptParts
from engine.sequence_group import SequenceGroup
from engine.transfer_blocks import TransferBlocks, held_by
from kvstore.connector import KvConnectorScheduler, LoadResult, LookupResult
from kvstore.handoff import KvHandoff

__all__ = ["FinishedLoad", "Loads"]


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """A group's load has ended; the group still waits for it.

    Attributes:
        group: whose load it was.
        num_tokens: tokens whose KV is in the blocks of the group's lead now.
        error: why fewer than asked arrived; empty if all did.
    """

    group: SequenceGroup
    num_tokens: int
    error: str


@dataclass(frozen=True, slots=True)
class _Load:
    """`indices` are those of its items' transfer blocks, ascending."""

    group: SequenceGroup
    indices: list[int]
    block_ids: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Prefetch:
    """`keys` are those of `block_ids`; `epoch` is the prefix cache's at its start."""

    handoff_id: str
    keys: tuple[bytes, ...]
    block_ids: list[int]
    epoch: int


class Loads:
    """Look-ups, loads and prefetches of one scheduler.

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
        self._spec = kv.spec
        self._cut = cut
        self._on_job = on_job
        self._lookups: dict[int, SequenceGroup] = {}  # open ones
        self._loads: dict[int, _Load] = {}
        self._prefetches: dict[int, _Prefetch] = {}
        self._awaited: set[int] = set()  # prefetches that requests may wait for
        self._parts = PromptParts(cut)

    @property
    def in_flight(self) -> int:
        """Loads whose result is not in."""
        return len(self._loads) + len(self._prefetches)

    def is_open(self, job_id: int) -> bool:
        """Whether a result is awaited."""
        return job_id in self._lookups or job_id in self._loads or job_id in self._prefetches

    def held_blocks(self) -> list[int]:
        """One entry per reference that a job holds."""
        held = [block for load in self._loads.values() for block in load.block_ids]
        return held + [block for job in self._prefetches.values() for block in job.block_ids]

    # Requests.

    def accept(self, group: SequenceGroup) -> list[int]:
        """A request has come that may wait for its turn: what it shall load must stay.

        Returns:
            Prefetches under way that it waits for.
        """
        if group.pending_handoff is None:
            return []
        group.kept_handoff = group.pending_handoff.handoff_id
        self._connector.keep(group.pending_handoff)
        return self._prefetches_for(group.pending_handoff)

    def decline(self, group: SequenceGroup) -> None:
        """The group had better compute: it loads nothing from now on."""
        self.forget(group)
        group.may_load = False

    def num_loadable(self, group: SequenceGroup) -> int | None:
        """Leading transfer blocks that the connector can load; None: ask again next step."""
        if not group.may_load or group.swapped is not None:
            return 0
        if group.pending_handoff is not None:
            if self._prefetches_for(group.pending_handoff):
                return None
            return len(group.pending_handoff.block_keys)
        if not self._connector.finds_by_key:
            return 0
        return self._num_found(group)

    def num_loaded_tokens(self, group: SequenceGroup, num_loadable: int) -> int:
        """Tokens that a load of the first `num_loadable` transfer blocks brings."""
        if group.pending_handoff is not None and num_loadable:
            return group.pending_handoff.num_tokens
        return num_loadable * self._cut.size

    def start(self, group: SequenceGroup, num_loadable: int) -> bool:
        """Loads what the admitted group's lead lacks of the first `num_loadable` transfer blocks.

        Returns:
            Whether there was anything to load.
        """
        num_tokens = self.num_loaded_tokens(group, num_loadable)
        handoff, group.pending_handoff = group.pending_handoff, None
        lead = group.lead
        first = lead.num_computed // self._cut.size
        group.num_saved = max(group.num_saved, num_tokens // self._spec.block_size)
        if num_loadable <= first:
            self._drop_handoff(group)
            return False
        assert lead.table is not None
        keys = handoff.block_keys if handoff else lead.keys.keys
        groups = range(self._spec.num_groups)
        first_live = [self._spec.first_live(layers, num_tokens) for layers in groups]
        indices, table = range(first, num_loadable), lead.table
        items = list(self._cut.items(indices, keys, table.blocks, first_live))
        job_id = self._connector.load(
            [item.key for item in items], [item.transfer_id for item in items], handoff
        )
        block_ids = held_by(items)
        self._pool.acquire(block_ids)
        self._loads[job_id] = _Load(group, [item.index for item in items], block_ids, num_tokens)
        self._on_job(job_id)
        group.load_job = job_id
        return True

    def forget(self, group: SequenceGroup) -> None:
        """The group has left the scheduler's queues, or starts over."""
        if group.lookup_job is not None:
            self._lookups.pop(group.lookup_job, None)
            self._connector.forget_lookup(group.lookup_job)
            group.lookup_job = None
        if group.load_job is not None:
            self._connector.cancel_load(group.load_job)
            group.load_job = None
        self._drop_handoff(group)

    # Prompts that are still being computed elsewhere.

    def prefetch(self, handoff: KvHandoff) -> tuple[int, int] | None:
        """Begins to load what of these full transfer blocks fills blocks that are neither cached
        nor on their way, if there is room beyond what running sequences need. Models with
        windows do without.

        Returns:
            The load's id and number of tokens, if there is one.
        """
        if self._spec.windows != (None,) or not self._kv.caches_prefixes:
            return None
        coming = {key for job in self._awaited for key in self._prefetches[job].keys}
        wanted = [
            parts
            for parts in self._parts.whole_blocks(handoff)
            if parts[-1] not in coming and self._pool.lookup(parts[-1]) is None
        ]
        if not wanted or self._kv.can_prefetch(len(wanted)) is not Allocation.OK:
            return None
        block_ids = self._pool.allocate(len(wanted))
        keys = [key for parts in wanted for key in parts]
        job_id = self._connector.load(keys, self._cut.ids_in(block_ids), handoff)
        pool_keys = tuple(parts[-1] for parts in wanted)
        self._prefetches[job_id] = _Prefetch(
            handoff.handoff_id, pool_keys, block_ids, self._kv.epoch
        )
        self._awaited.add(job_id)
        self._on_job(job_id)
        return job_id, len(block_ids) * self._spec.block_size

    # What becomes of jobs.

    def finish_lookup(self, result: LookupResult) -> None:
        """A look-up is answered; the connector knows how."""
        self._lookups.pop(result.job_id, None)

    def finish(self, result: LoadResult) -> FinishedLoad | None:
        """Takes in a load's result; None if nobody waits for it."""
        if result.job_id in self._prefetches:
            self._finish_prefetch(result)
            return None
        load = self._loads.pop(result.job_id)
        self._pool.release(load.block_ids)
        group = load.group
        if group.load_job != result.job_id:
            return None  # aborted or given up meanwhile
        group.load_job = None
        self._drop_handoff(group)
        if result.num_blocks == len(load.indices):
            return FinishedLoad(group, load.num_tokens, "")
        num_good = load.indices[result.num_blocks] * self._cut.size
        return FinishedLoad(group, num_good, result.error or "missing")

    def give_up(
        self, job_id: int, error: str
    ) -> tuple[SequenceGroup | None, FinishedLoad | None, int]:
        """A job does not report: its group goes on. Its blocks stay held.

        Args:
            job_id: of a look-up, a load or a prefetch.
            error: for `FinishedLoad`.

        Returns:
            Whose it was, its load's end if it waits for it, and how many blocks stay.
        """
        if job_id in self._awaited:
            self._awaited.discard(job_id)
            return None, None, len(self._prefetches[job_id].block_ids)
        if (load := self._loads.get(job_id)) and load.group.load_job == job_id:
            self.forget(load.group)
            return load.group, FinishedLoad(load.group, 0, error), len(load.block_ids)
        if group := self._lookups.get(job_id):
            self.forget(group)
            group.may_load = False
            return group, None, 0
        return None, None, 0

    def _num_found(self, group: SequenceGroup) -> int | None:
        lead = group.lead
        num_keys = (len(lead.token_ids) - 1) // self._cut.size
        if num_keys == 0:
            return 0
        if group.lookup_job is None:
            keys = lead.keys.extend(lead.token_ids)[:num_keys]
            group.lookup_job = self._connector.lookup(self._cut.object_keys(keys))
            self._lookups[group.lookup_job] = group
            self._on_job(group.lookup_job)
        num_found = self._connector.num_found(group.lookup_job)
        return None if num_found is None else num_found // self._spec.num_groups

    def _finish_prefetch(self, result: LoadResult) -> None:
        prefetch = self._prefetches.pop(result.job_id)
        self._awaited.discard(result.job_id)
        num_good = result.num_blocks // self._cut.per_block
        good = prefetch.block_ids[:num_good]
        self._kv.adopt(prefetch.keys[:num_good], good, prefetch.epoch)
        self._pool.release(prefetch.block_ids)

    def _prefetches_for(self, handoff: KvHandoff) -> list[int]:
        """Prefetches that its request waits for."""
        return [
            job for job in self._awaited if self._prefetches[job].handoff_id == handoff.handoff_id
        ]

    def _drop_handoff(self, group: SequenceGroup) -> None:
        if group.kept_handoff is not None:
            self._connector.drop(group.kept_handoff)
            group.kept_handoff = None
