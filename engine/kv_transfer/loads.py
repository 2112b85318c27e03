"""`Loads`: what requests look up and load through the KV connector. Pure.

A load job holds a reference on its blocks until its result is in, whatever
becomes of the request. So an abort never hands a block that is still being
written to somebody else.

A request that prefetches are under way for (`engine.kv_transfer.prefetches`) waits for them first.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from engine.group import SequenceGroup
from engine.kv_cache.manager import KvCacheManager
from engine.kv_transfer.blocks import TransferBlocks, held_by
from engine.kv_transfer.prefetches import Prefetches
from kvstore.connector import KvConnectorScheduler
from kvstore.jobs import LoadResult, LookupResult

__all__ = ["FinishedLoad", "GivenUp", "Loads"]


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
class GivenUp:
    """A job that has not reported.

    Attributes:
        what: it was.
        group: whose; None for a prefetch, whose request is yet to come.
        num_blocks: so many stay held.
        load: the load's end, if its group still waits for it.
    """

    what: Literal["look-up", "load", "save"]
    group: SequenceGroup | None
    num_blocks: int
    load: FinishedLoad | None = None


@dataclass(frozen=True, slots=True)
class _Load:
    """`indices` are those of its items' transfer blocks, ascending."""

    group: SequenceGroup
    indices: list[int]
    block_ids: list[int]
    num_tokens: int


class Loads:
    """Look-ups and loads of one scheduler.

    Args:
        connector: the scheduler half.
        kv: the KV cache manager, in whose pool job references are kept.
        cut: how blocks are cut into transfer blocks.
        prefetches: what requests wait for.
        on_job: called with the id of each job that is scheduled.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler,
        kv: KvCacheManager,
        cut: TransferBlocks,
        prefetches: Prefetches,
        on_job: Callable[[int], None],
    ) -> None:
        self._connector = connector
        self._kv = kv
        self._pool = kv.pool
        self._spec = kv.spec
        self._cut = cut
        self._prefetches = prefetches
        self._on_job = on_job
        self._lookups: dict[int, SequenceGroup] = {}  # open ones
        self._loads: dict[int, _Load] = {}

    @property
    def in_flight(self) -> int:
        """Loads whose result is not in."""
        return len(self._loads)

    def is_open(self, job_id: int) -> bool:
        """Whether a result is awaited."""
        return job_id in self._lookups or job_id in self._loads

    def held_blocks(self) -> list[int]:
        """One entry per reference that a job holds."""
        return [block for load in self._loads.values() for block in load.block_ids]

    # Requests.

    def accept(self, group: SequenceGroup) -> Collection[int]:
        """A request has come that may wait for its turn: what it shall load must stay.

        Returns:
            Prefetches under way that it waits for.
        """
        if group.pending_handoff is None:
            return ()
        group.kept_handoff = group.pending_handoff.handoff_id
        self._connector.keep(group.pending_handoff)
        return self._prefetches.of_handoff(group.kept_handoff)

    def decline(self, group: SequenceGroup) -> None:
        """The group had better compute: it loads nothing from now on."""
        self.forget(group)
        group.may_load = False

    def num_loadable(self, group: SequenceGroup) -> int | None:
        """Leading transfer blocks that the connector can load; None: ask again next step."""
        if not group.may_load or group.swapped is not None:
            return 0
        if group.pending_handoff is not None:
            if self._prefetches.of_handoff(group.pending_handoff.handoff_id):
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
        groups = range(self._spec.num_layer_groups)
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

    # What becomes of jobs.

    def finish_lookup(self, result: LookupResult) -> None:
        """A look-up is answered; the connector knows how."""
        self._lookups.pop(result.job_id, None)

    def finish(self, result: LoadResult) -> FinishedLoad | None:
        """Takes in a load's result; None if nobody waits for it."""
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

    def give_up(self, job_id: int, error: str) -> GivenUp:
        """A job does not report: its group goes on. Its blocks stay held.

        Args:
            job_id: of a look-up or a load that is open.
            error: for `FinishedLoad`.
        """
        if group := self._lookups.get(job_id):
            self.forget(group)
            group.may_load = False
            return GivenUp("look-up", group, 0)
        load = self._loads[job_id]
        finished = None
        if load.group.load_job == job_id:
            self.forget(load.group)
            finished = FinishedLoad(load.group, 0, error)
        return GivenUp("load", load.group, len(load.block_ids), finished)

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
        return None if num_found is None else num_found // self._spec.num_layer_groups

    def _drop_handoff(self, group: SequenceGroup) -> None:
        if group.kept_handoff is not None:
            self._connector.drop(group.kept_handoff)
            group.kept_handoff = None
