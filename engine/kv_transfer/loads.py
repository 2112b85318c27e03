"""`Loads`: looks up and loads KV of requests through the connector. Pure.

A waiting request is looked up, or comes with a handoff. When it is admitted, it loads what its
blocks lack, and waits in state LOADING. A request for which prefetches are open
(`engine.kv_transfer.prefetches`) waits for them first.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.groups.group import Sequence, SequenceGroup
from engine.kv_cache.manager import KvCacheManager
from engine.kv_transfer.blocks import TransferBlocks, held_by
from engine.kv_transfer.costs import LoadCosts
from engine.kv_transfer.jobs import BaseLoad, JobTable, Load, Lookup
from engine.kv_transfer.prefetches import Prefetches
from kvstore.connector import KvConnectorScheduler
from kvstore.guard.metrics import TransferMetrics
from kvstore.handoff import KvHandoff
from kvstore.jobs import MISSING, LoadResult

__all__ = ["FinishedLoad", "Loads"]


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """The end of a load that its request waited for.

    Attributes:
        group: the request.
        num_tokens: tokens whose KV is now in the blocks of the group's lead.
        error: why less arrived than was asked for; empty if all arrived.
    """

    group: SequenceGroup
    num_tokens: int
    error: str


class Loads:
    """Look-ups and loads of one scheduler.

    Args:
        connector: the scheduler half.
        kv: the KV cache manager.
        cut: how pool blocks are cut into transfer blocks.
        jobs: the table for the jobs.
        prefetches: loads that requests may wait for.
        costs: decides whether a load is worth it.
        metrics: counts loads that were not worth it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler,
        kv: KvCacheManager,
        cut: TransferBlocks,
        jobs: JobTable,
        prefetches: Prefetches,
        costs: LoadCosts,
        metrics: TransferMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._connector = connector
        self._pool = kv.pool
        self._events = kv.events
        self._spec = kv.spec
        self._caches_prefixes = kv.caches_prefixes
        self._cut = cut
        self._jobs = jobs
        self._prefetches = prefetches
        self._costs = costs
        self._metrics = metrics
        self._clock = clock
        self._num_kept = 0  # requests whose handoff's lease is renewed

    # Before admission.

    @property
    def looks_up(self) -> bool:
        """Whether waiting requests are looked up by key."""
        return self._connector.finds_by_key

    @property
    def may_find(self) -> bool:
        """Whether any waiting request may have something to load."""
        return self._connector.finds_by_key or self._num_kept > 0

    def accept(self, group: SequenceGroup) -> None:
        """Registers a new request: renews the lease of its handoff until its KV is loaded."""
        transfer = group.transfer
        if transfer.pending_handoff is None:
            return
        transfer.kept_handoff = transfer.pending_handoff.handoff_id
        self._num_kept += 1
        self._connector.keep(transfer.pending_handoff)
        for job in self._prefetches.of_handoff(transfer.kept_handoff):
            self._limit_wait(job)

    def num_loadable(self, group: SequenceGroup) -> int | None:
        """Returns how many leading transfer blocks can be loaded; None: ask again next step.

        The first call for a group starts its look-up.
        """
        transfer = group.transfer
        if not transfer.may_load or group.swapped is not None:
            return 0
        if transfer.pending_handoff is not None:
            if self._prefetches.of_handoff(transfer.pending_handoff.handoff_id):
                return None
            return len(transfer.pending_handoff.block_keys)
        return self._num_found(group) if self._connector.finds_by_key else 0

    def num_loaded_tokens(self, group: SequenceGroup, num_loadable: int) -> int:
        """Returns how many tokens have KV after a load of `num_loadable` transfer blocks."""
        handoff = group.transfer.pending_handoff
        if handoff is not None and num_loadable:
            return handoff.num_tokens
        return num_loadable * self._cut.size

    def is_worth_loading(
        self, group: SequenceGroup, num_tokens: int, num_queued_tokens: int
    ) -> bool:
        """Returns whether loading is better than computing. If not, the group never loads.

        Args:
            group: a waiting group.
            num_tokens: tokens to load; at least one.
            num_queued_tokens: other tokens that would be computed before them.
        """
        if self._costs.may_load(num_tokens, num_queued_tokens, self._clock()):
            return True
        self.exclude(group)
        self._metrics.load_given_up("admission")
        return False

    def exclude(self, group: SequenceGroup) -> None:
        """Makes a group compute from now on what it does not find in the prefix cache."""
        self.forget(group)
        group.transfer.may_load = False

    # From admission on.

    def start(
        self, group: SequenceGroup, num_loadable: int, num_missing: int, num_queued_tokens: int
    ) -> bool:
        """Loads those of the first `num_loadable` transfer blocks that the group's lead lacks, and
        the states at their end.

        Args:
            group: a group that was admitted, with blocks for them unless it has all.
            num_loadable: from `num_loadable`.
            num_missing: tokens that would be computed instead; 0 if the lead has found all in
                the prefix cache.
            num_queued_tokens: other tokens that would be computed before them.

        Returns:
            Whether there was anything to load.
        """
        transfer = group.transfer
        num_tokens = self.num_loaded_tokens(group, num_loadable)
        handoff, transfer.pending_handoff = transfer.pending_handoff, None
        if handoff is None or not group.hands_over:
            # Else another engine lends the blocks, which this one must lend in turn.
            transfer.num_saved = max(transfer.num_saved, num_tokens // self._spec.block_size)
        if not num_missing:
            self._drop_handoff(group)
            return False
        job = self._load(group, handoff, num_loadable, num_tokens)
        job.estimate = self._costs.start(num_missing, num_queued_tokens, self._clock())
        self._limit_wait(job)
        transfer.load_job = job.job_id
        return True

    def forget(self, group: SequenceGroup) -> None:
        """Cancels what a group looks up and loads: it left the queues, or starts over."""
        transfer = group.transfer
        if transfer.lookup_job is not None:
            self._jobs.open.pop(transfer.lookup_job, None)
            self._connector.forget_lookup(transfer.lookup_job)
            transfer.lookup_job = None
        if transfer.load_job is not None:
            self._connector.cancel_load(transfer.load_job)
            transfer.load_job = None
        self._drop_handoff(group)

    # Ends of jobs.

    def finish(self, job: Load, result: LoadResult) -> FinishedLoad | None:
        """Processes a load's result; returns None if its request does not wait for it."""
        self._pool.release(job.block_ids)
        group = job.group
        if group.transfer.load_job != job.job_id:
            return None  # its request has ended, or it was given up
        group.transfer.load_job = None
        self._drop_handoff(group)
        if result.num_blocks == len(job.indices):
            return FinishedLoad(group, job.num_tokens, "")
        first_bad, error = job.indices[result.num_blocks], result.error or MISSING
        if error == MISSING:
            self._note_missing(group, first_bad)
        return self._failed(group, first_bad * self._cut.size, error)

    def finish_lookup(self, job: Lookup) -> None:
        """Processes the answer to a look-up."""
        num_found = self._connector.num_found(job.job_id)
        if num_found is not None and num_found < job.num_keys:
            lead = job.group.lead
            ends = self._cut.loadable_ends(job.group.num_prompt, len(lead.token_ids))
            self._note_missing(job.group, self._cut.last_found(ends, num_found))

    def give_up(self, job: Lookup | Load, error: str) -> FinishedLoad | None:
        """Ends the wait for a look-up or a load. A load's blocks stay held until its result is in.

        Args:
            job: an open job.
            error: for the load's end.

        Returns:
            The load's end if its request waits for it.
        """
        group = job.group
        if isinstance(job, Lookup):
            self.exclude(group)
            return None
        if group.transfer.load_job != job.job_id:
            return None
        self.forget(group)
        return self._failed(group, 0, error)

    def _num_found(self, group: SequenceGroup) -> int | None:
        lead, transfer = group.lead, group.transfer
        ends = self._cut.loadable_ends(group.num_prompt, len(lead.token_ids))
        if not ends:
            return 0
        if transfer.lookup_job is None:
            if self._is_cached(lead):
                return 0
            keys = self._cut.lookup_keys(lead.keys.extend(lead.token_ids), ends)
            transfer.lookup_job = self._connector.lookup(keys)
            self._jobs.add(Lookup(job_id=transfer.lookup_job, group=group, num_keys=len(keys)))
        num_found = self._connector.num_found(transfer.lookup_job)
        return None if num_found is None else self._cut.last_found(ends, num_found)

    def _is_cached(self, lead: Sequence) -> bool:
        """Returns whether the last full block is in the prefix cache, with the states at its end,
        and so most likely all.

        Then a look-up would only delay the request.
        """
        num_blocks = (len(lead.token_ids) - 1) // self._spec.block_size
        if not num_blocks or self._spec.windows != (None,) or not self._caches_prefixes:
            return False
        key = lead.keys.extend_pool(lead.token_ids)[num_blocks - 1]
        layer_groups = range(self._spec.num_layer_groups)
        return all(self._pool.lookup(key, layers) is not None for layers in layer_groups)

    def _load(
        self, group: SequenceGroup, handoff: KvHandoff | None, num_loadable: int, num_tokens: int
    ) -> Load:
        lead, end = group.lead, num_loadable - 1
        assert lead.table is not None
        layer_groups = range(len(self._spec.windows))
        keys = handoff.block_keys if handoff else lead.keys.keys
        items = list(
            self._cut.items(
                range(lead.num_computed // self._cut.size, num_loadable),
                keys,
                lead.table.blocks,
                [self._spec.first_live(layers, num_tokens) for layers in layer_groups],
            )
        )
        if self._spec.states is not None:
            # The states come last: without them, nothing counts as loaded from there on.
            items += self._cut.state_items(end, keys[end], lead.table.blocks[-1][-1])
        job_id = self._connector.load(
            [item.key for item in items], [item.transfer_id for item in items], handoff
        )
        job = Load(
            job_id=job_id,
            block_ids=held_by(items),
            group=group,
            indices=[item.index for item in items],
            num_tokens=num_tokens,
        )
        self._pool.acquire(job.block_ids)
        self._jobs.add(job)
        return job

    def _note_missing(self, group: SequenceGroup, index: int) -> None:
        """Records that the stores lack a full transfer block of a sequence. The partial block of a
        handoff is looked for by its request alone.
        """
        keys = group.lead.keys.extend(group.lead.token_ids)
        if self._connector.finds_by_key and index < len(keys):
            self._events.record_missing(keys[index])

    def _limit_wait(self, job: BaseLoad) -> None:
        """Starts the time that a request waits for a load at most."""
        if job.estimate is not None:
            self._jobs.limit_wait(job, self._clock() + job.estimate.patience_s)

    def _failed(self, group: SequenceGroup, num_tokens: int, error: str) -> FinishedLoad:
        """Ends a load with an error: the group computes its KV, and saves what it computes."""
        group.transfer.may_load = False
        group.transfer.num_saved = 0
        return FinishedLoad(group, num_tokens, error)

    def _drop_handoff(self, group: SequenceGroup) -> None:
        if group.transfer.kept_handoff is not None:
            self._connector.drop(group.transfer.kept_handoff)
            group.transfer.kept_handoff = None
            self._num_kept -= 1
