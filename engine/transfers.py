"""`Transfers`: ties requests to the KV connector's scheduler half. Pure.

Decides what a request loads and saves, and keeps a reference on every block
that a job names until the job's result is in, whatever becomes of the
request. So an abort or a preemption never hands a block that is still being
read or written to somebody else. A job that does not report in time is given
up: its request goes on without it. Its blocks stay held, since whoever moves
the bytes may still be at it.
"""

import logging
import uuid
from collections import OrderedDict, abc, deque
from dataclasses import dataclass
from itertools import chain

from engine.block_pool import BlockPool
from engine.kv_cache_spec import KvCacheSpec
from engine.sequence_group import SequenceGroup
from kvstore.block_key import layer_group_key
from kvstore.connector import ConnectorWork, KvConnectorScheduler, LoadResult, TransferResults
from kvstore.handoff import KvHandoff

__all__ = ["FinishedLoad", "Transfers"]

# Handoffs nobody released are forgotten beyond this; the store's TTL removes their tails.
_MAX_HANDOFFS = 65_536

_logger = logging.getLogger("baton.engine")


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
    """`block_indices` are those of `block_ids`, ascending."""

    group: SequenceGroup
    block_indices: list[int]
    block_ids: list[int]
    num_tokens: int


class Transfers:
    """Loads and saves of all requests of one scheduler.

    Args:
        connector: the scheduler half; None runs without a connector.
        pool: where job references are kept.
        spec: which layer groups there are.
        namespace: digest that block keys are rooted in.
        saves: whether computed prompt blocks are published.
        timeout_s: how long a request waits for a job.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler | None,
        pool: BlockPool,
        spec: KvCacheSpec,
        *,
        namespace: bytes,
        saves: bool,
        timeout_s: float,
    ) -> None:
        self._connector = connector
        self._pool = pool
        self._spec = spec
        self._namespace = namespace
        self._saves = saves and connector is not None
        self._timeout_s = timeout_s
        self._lookups: dict[int, SequenceGroup] = {}  # open ones
        self._loads: dict[int, _Load] = {}
        self._save_jobs: dict[int, tuple[SequenceGroup, list[int]]] = {}
        self._unstarted: list[int] = []
        self._started: deque[tuple[float, int]] = deque()  # (give up at, job id)
        # Tails of handoffs that nobody has released yet, by handoff id.
        self._tail_keys: OrderedDict[str, list[bytes]] = OrderedDict()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connector to ask."""
        return self._connector is not None

    @property
    def in_flight(self) -> int:
        """Jobs whose result is not in."""
        return len(self._loads) + len(self._save_jobs)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is next due."""
        self._forget_reported()
        return self._started[0][0] if self._started else None

    def held_blocks(self) -> list[int]:
        """One entry per reference that a job holds."""
        held = [block for load in self._loads.values() for block in load.block_ids]
        return held + [block for _, blocks in self._save_jobs.values() for block in blocks]

    def num_loadable(self, group: SequenceGroup) -> int | None:
        """Leading blocks that the connector can load; None: ask again next step."""
        if self._connector is None or not group.may_load or group.swapped is not None:
            return 0
        if group.pending_handoff is not None:
            return len(group.pending_handoff.block_keys)
        lead = group.lead
        num_keys = (len(lead.token_ids) - 1) // self._spec.block_size
        if num_keys == 0:
            return 0
        if group.lookup_job is None:
            keys = lead.keys.extend(lead.token_ids)[:num_keys]
            every_group = chain.from_iterable(map(self._object_keys, keys))
            group.lookup_job = self._connector.lookup(list(every_group))
            self._lookups[group.lookup_job] = group
            self._unstarted.append(group.lookup_job)
        num_found = self._connector.num_found(group.lookup_job)
        return None if num_found is None else num_found // self._spec.num_groups

    def num_loaded_tokens(self, group: SequenceGroup, num_loadable: int) -> int:
        """Tokens that a load of the first `num_loadable` blocks brings."""
        if group.pending_handoff is not None and num_loadable:
            return group.pending_handoff.num_tokens
        return num_loadable * self._spec.block_size

    def start_load(self, group: SequenceGroup, num_loadable: int) -> bool:
        """Loads what the admitted group's lead lacks of the first `num_loadable` blocks.

        Returns:
            Whether there was anything to load.
        """
        num_tokens = self.num_loaded_tokens(group, num_loadable)
        handoff, group.pending_handoff = group.pending_handoff, None
        lead = group.lead
        first = lead.num_computed // self._spec.block_size
        group.num_saved = max(group.num_saved, num_loadable)
        if self._connector is None or num_loadable <= first:
            return False
        assert lead.table is not None
        keys = handoff.block_keys if handoff else lead.keys.keys
        items = [
            (index, layer_group_key(keys[index], layers), lead.table.blocks[layers][index])
            for index in range(first, num_loadable)
            for layers in range(self._spec.num_groups)
            if index >= self._spec.first_live(layers, num_tokens)
        ]
        indices, object_keys, block_ids = map(list, zip(*items, strict=True))
        job_id = self._connector.load(object_keys, block_ids)
        self._pool.acquire(block_ids)
        self._loads[job_id] = _Load(group, indices, block_ids, num_tokens)
        self._unstarted.append(job_id)
        group.load_job = job_id
        return True

    def save_computed(self, group: SequenceGroup) -> None:
        """Publishes the group's full, computed prompt blocks not published yet."""
        lead = group.lead
        end = min(lead.num_computed, group.num_prompt) // self._spec.block_size
        if not self._saves or end <= group.num_saved:
            return
        assert lead.table is not None
        keys = lead.keys.extend(lead.token_ids)
        items = [
            (layer_group_key(keys[index], layers), lead.table.blocks[layers][index])
            for index in range(group.num_saved, end)
            for layers in range(self._spec.num_groups)
            if index >= lead.table.first_live[layers]  # behind a window: found here, not computed
        ]
        group.num_saved = end
        if items:
            self._save(group, items, 0)

    def save_for_handoff(self, group: SequenceGroup) -> None:
        """Publishes what `save_computed` leaves of the prompt: its partial tail."""
        assert self._connector is not None, "prefill engines have a connector"
        lead = group.lead
        assert lead.table is not None
        num_full, num_tail = divmod(group.num_prompt, self._spec.block_size)
        handoff_id = uuid.uuid4().hex
        keys = lead.keys.of_prompt(group.request.prompt_token_ids, handoff_id)
        for layers in range(self._spec.num_groups if num_tail else 0):
            tail = (layer_group_key(keys[-1], layers), lead.table.blocks[layers][num_full])
            self._save(group, [tail], num_tail)
        group.handoff = self._connector.make_handoff(
            handoff_id, self._namespace, keys, group.num_prompt
        )

    def commit_handoff(self, group: SequenceGroup) -> KvHandoff | None:
        """The handoff of a group whose saves have ended; None if one failed."""
        handoff = group.handoff
        if handoff is None or group.save_failed:
            return None
        if handoff.num_tokens % self._spec.block_size != 0:
            self._tail_keys[handoff.handoff_id] = self._object_keys(handoff.block_keys[-1])
        if len(self._tail_keys) > _MAX_HANDOFFS:
            self._tail_keys.popitem(last=False)
        return handoff

    def release_handoff(self, handoff_id: str) -> None:
        """Deletes the handoff's tail, which nobody else can use. Unknown ids are fine.

        Full blocks stay for other requests.
        """
        keys = self._tail_keys.pop(handoff_id, None)
        if keys is not None and self._connector is not None:
            self._connector.delete(keys)

    def discard_saved(self, group: SequenceGroup) -> None:
        """Takes back what the group has published: it must not be loaded.

        Where saves are still under way, their ends are awaited first, so that
        none comes after the deletion.
        """
        group.is_poisoned = True
        if self._saves and not group.pending_saves:
            self._unpublish(group)

    def forget(self, group: SequenceGroup) -> None:
        """The group has left the scheduler's queues, or starts over."""
        if self._connector is None:
            return
        if group.lookup_job is not None:
            self._lookups.pop(group.lookup_job, None)
            self._connector.forget_lookup(group.lookup_job)
            group.lookup_job = None
        if group.load_job is not None:
            self._connector.cancel_load(group.load_job)
            group.load_job = None

    def apply(self, results: TransferResults) -> tuple[list[FinishedLoad], list[SequenceGroup]]:
        """Takes in results; drops the jobs' references.

        Returns:
            Loads that groups still wait for, and groups whose last save has ended.
        """
        if self._connector is None:
            return [], []
        results = self._connector.update(results)
        for lookup in results.lookups:
            self._lookups.pop(lookup.job_id, None)
        loads = [finished for r in results.loads if (finished := self._finish_load(r))]
        saved = dict.fromkeys(self._finish_save(r.job_id, r.committed) for r in results.saves)
        return loads, [group for group in saved if not group.pending_saves]

    def expire(self, now: float) -> tuple[list[FinishedLoad], list[SequenceGroup]]:
        """Gives up jobs that have not reported in time; as `apply`."""
        loads: list[FinishedLoad] = []
        saved: dict[SequenceGroup, None] = {}
        while self._started and self._started[0][0] <= now:
            _, job_id = self._started.popleft()
            if (load := self._loads.get(job_id)) and load.group.load_job == job_id:
                self._log_overdue("load", load.group, load.block_ids)
                self.forget(load.group)
                loads.append(FinishedLoad(load.group, 0, "timed out"))
            elif group := self._lookups.get(job_id):
                self._log_overdue("look-up", group, [])
                self.forget(group)
                group.may_load = False
            elif job_id in self._save_jobs:
                group, block_ids = self._save_jobs[job_id]
                self._log_overdue("save", group, block_ids)
                group.pending_saves.discard(job_id)
                group.save_failed = True
                saved[group] = None
        return loads, [group for group in saved if not group.pending_saves]

    def build_work(self, now: float) -> ConnectorWork:
        """What the worker half must start now."""
        if self._connector is None:
            return ConnectorWork()
        self._started.extend((now + self._timeout_s, job_id) for job_id in self._unstarted)
        self._unstarted.clear()
        return self._connector.build_work()

    def _object_keys(self, key: bytes) -> list[bytes]:
        """The keys of one block index, one per layer group."""
        return [layer_group_key(key, layers) for layers in range(self._spec.num_groups)]

    def _save(
        self, group: SequenceGroup, items: abc.Sequence[tuple[bytes, int]], num_tail: int
    ) -> None:
        assert self._connector is not None
        block_ids = [block_id for _, block_id in items]
        job_id = self._connector.save([key for key, _ in items], block_ids, num_tail)
        self._pool.acquire(block_ids)
        self._save_jobs[job_id] = (group, block_ids)
        self._unstarted.append(job_id)
        group.pending_saves.add(job_id)

    def _finish_load(self, result: LoadResult) -> FinishedLoad | None:
        load = self._loads.pop(result.job_id)
        self._pool.release(load.block_ids)
        if load.group.load_job != result.job_id:
            return None  # aborted or given up meanwhile
        load.group.load_job = None
        if result.num_blocks == len(load.block_ids):
            return FinishedLoad(load.group, load.num_tokens, "")
        num_good = load.block_indices[result.num_blocks] * self._spec.block_size
        return FinishedLoad(load.group, num_good, result.error or "missing")

    def _finish_save(self, job_id: int, committed: bool) -> SequenceGroup:
        group, block_ids = self._save_jobs.pop(job_id)
        self._pool.release(block_ids)
        group.pending_saves.discard(job_id)
        group.save_failed |= not committed
        if group.is_poisoned and not group.pending_saves:
            self._unpublish(group)
        return group

    def _unpublish(self, group: SequenceGroup) -> None:
        assert self._connector is not None
        keys = group.lead.keys.extend(group.lead.token_ids)[: group.num_saved]
        self._connector.delete(list(chain.from_iterable(map(self._object_keys, keys))))

    def _forget_reported(self) -> None:
        jobs = (self._lookups, self._loads, self._save_jobs)
        while self._started and not any(self._started[0][1] in open_jobs for open_jobs in jobs):
            self._started.popleft()

    def _log_overdue(self, what: str, group: SequenceGroup, block_ids: list[int]) -> None:
        _logger.error(
            "%s: a KV %s has not reported for %s s; going on without it, %d blocks stay fenced",
            group.request_id,
            what,
            self._timeout_s,
            len(block_ids),
        )
