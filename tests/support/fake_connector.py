"""A connector's worker half over a dict; the test decides when and how its jobs end.

It uses all freedom that the contract allows: saves read the pool and loads write to it only at
their end, even after a load was cancelled. If it lends blocks, other workers read its pool until
the lease has ended, and it reports the release late. A save that is started ahead of its step can
end as soon as the step has computed its layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.connector import KvConnectorWorker
from kvstore.jobs import (
    ConnectorWork,
    LoadJob,
    LoadResult,
    LookupJob,
    LookupResult,
    SaveJob,
    SaveResult,
    TransferResults,
)
from kvstore.layout import KvLayout
from kvstore.transfer_form import WHOLE, BlockSlicing, PoolShare, TransferForm

Job = LookupJob | LoadJob | SaveJob


@dataclass(frozen=True)
class Lent:
    """A transfer block in its owner's pool; its first `num_slots` slots may be read."""

    pool: "SlicedPool"
    block_id: int
    num_slots: int
    job_id: int

    def read(self) -> list[Any]:
        block = self.pool[self.block_id]
        return block[: self.num_slots] + [None] * (len(block) - self.num_slots)


class SlicedPool:
    """Gives access to a pool of token slots by transfer block, and behind them to the units of the
    slots for states.
    """

    def __init__(self, pool: list[list[Any]], slicing: BlockSlicing) -> None:
        self._pool, self._size = pool, slicing.form.block_size
        self._num_blocks = slicing.share.num_blocks
        self._num_units = 0 if slicing.slots is None else slicing.slots.units

    def __getitem__(self, block_id: int) -> list[Any]:
        block, slots = self._locate(block_id)
        return block[slots]

    def __setitem__(self, block_id: int, states: list[Any]) -> None:
        block, slots = self._locate(block_id)
        assert len(states) == slots.stop - slots.start
        block[slots] = states

    def _locate(self, block_id: int) -> tuple[list[Any], slice]:
        count = len(self._pool[0]) // self._size
        index, part = divmod(block_id, count)
        if index < self._num_blocks:
            return self._pool[index], slice(part * self._size, (part + 1) * self._size)
        slot, unit = divmod(block_id - self._num_blocks * count, self._num_units)
        return self._pool[self._num_blocks + slot], slice(unit, unit + 1)


Store = dict[Any, Any]
"""Blocks by key, and lent blocks by (lease, key)."""


class FakeWorker(KvConnectorWorker):
    """Saves to a shared store.

    Args:
        store: the saved blocks.
        lends: whether it lets others read its pool instead of saving.
        ends_in_steps: whether the oldest pending job ends whenever a step reports layers.
    """

    def __init__(self, store: Store, *, lends: bool = False, ends_in_steps: bool = False) -> None:
        self.store = store
        self.lends = lends
        self.ends_in_steps = ends_in_steps
        self._held: dict[str, set[int]] = {}  # save jobs by lease
        self._offered: dict[str, None] = {}
        self._ended: set[str] = set()
        self._released: list[int] = []
        self.pending: list[Job] = []
        self.waiting: list[SaveJob] = []  # until their step has computed
        self._saved_content: dict[
            int, list[list[Any]]
        ] = {}  # content of saved blocks at the start of the save
        self.lost: list[Job] = []
        self._results: list[LookupResult | LoadResult | SaveResult] = []

    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        self._pool = SlicedPool(pool, BlockSlicing.of(layout, form, share))
        self._num_layers = layout.num_layers

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def start(self, work: ConnectorWork) -> None:
        self.pending += (*work.lookups, *work.loads)
        for save in work.saves:
            (self.waiting if save.step else self.pending).append(save)
            if not save.step:
                self._saved_content[save.job_id] = self._content_of(save)
        for key in work.deletes:
            self.store.pop(key, None)
        self._offered.update(dict.fromkeys(work.offered))
        for lease_id in work.ended:
            self.end_lease(lease_id)

    def layers_computed(self, step: int, num_layers: int) -> None:
        if num_layers == self._num_layers:
            self.pending += self._take_waiting(step)
        if self.ends_in_steps and self.pending:
            self.end(0, fails=False)
            self._wake()

    def step_ended(self, step: int, *, computed: bool) -> None:
        for save in self._take_waiting(step):
            if computed:
                self.pending.append(save)
            else:
                self._results.append(SaveResult(save.job_id, committed=False, error="failed"))

    def _take_waiting(self, step: int) -> list[SaveJob]:
        taken = [save for save in self.waiting if save.step == step]
        self.waiting = [save for save in self.waiting if save.step != step]
        return taken

    @property
    def leases(self) -> list[str]:
        """The leases that were offered and have not ended, in the order of their offers."""
        return [lease_id for lease_id in self._offered if lease_id in self._held]

    def end_lease(self, lease_id: str) -> None:
        """Ends a lease, as a release or a timeout does: its blocks can no longer be read."""
        self._ended.add(lease_id)
        for name in [n for n in self.store if isinstance(n, tuple) and n[0] == lease_id]:
            del self.store[name]
        self._released += self._held.pop(lease_id, ())

    def lose(self, index: int) -> None:
        """Holds back a pending job until `restore_lost`; it may still move bytes."""
        self.lost.append(self.pending.pop(index))

    def restore_lost(self) -> None:
        """Makes held-back jobs pending again."""
        self.pending += self.lost
        self.lost.clear()

    def end_all(self) -> None:
        while self.pending:
            self.end(0, fails=False)

    def end(self, index: int, *, fails: bool) -> None:
        """Ends one pending job."""
        job = self.pending.pop(index)
        match job:
            case LookupJob(job_id, keys):
                num_found = next(
                    (i for i, key in enumerate(keys) if key not in self.store), len(keys)
                )
                self._results.append(LookupResult(job_id, 0 if fails else num_found))
            case LoadJob():
                self._results.append(self._load(job, fails=fails))
            case SaveJob():
                self._results.append(self._save(job, fails=fails))

    def _load(self, job: LoadJob, *, fails: bool) -> LoadResult:
        limit = len(job.keys) // 2 if fails else len(job.keys)
        for index in range(limit):
            block = self._find(job, job.keys[index])
            if block is None:
                return LoadResult(job.job_id, index, "missing")
            self._pool[job.block_ids[index]] = block
        for block_id in job.block_ids[limit:]:
            self._pool[block_id] = [("garbage",)] * len(self._pool[block_id])
        return LoadResult(job.job_id, limit, "failed" if fails else "")

    def _content_of(self, job: SaveJob) -> list[list[Any]]:
        """Returns the blocks that a job saves, which must not change until the job ends."""
        blocks = [list(self._pool[block_id]) for block_id in job.block_ids]
        if job.num_tail_tokens:
            del blocks[-1][job.num_tail_tokens :]
        return blocks

    def _save(self, job: SaveJob, *, fails: bool) -> SaveResult:
        seen = self._saved_content.pop(job.job_id, None)
        assert seen is None or seen == self._content_of(job), "blocks change while they are saved"
        if fails:
            return SaveResult(job.job_id, committed=False)
        if self.lends:
            return self._lend(job)
        for key, block_id in zip(job.keys, job.block_ids, strict=True):
            block = self._pool[block_id]
            if job.num_tail_tokens and key == job.keys[-1]:
                block[job.num_tail_tokens :] = [None] * (len(block) - job.num_tail_tokens)
            assert None not in block[: job.num_tail_tokens or len(block)]
            self.store.setdefault(key, block)
        return SaveResult(job.job_id, committed=True)

    def _find(self, job: LoadJob, key: bytes) -> list[Any] | None:
        if job.handoff is not None and (job.handoff.handoff_id, key) in self.store:
            return self.store[job.handoff.handoff_id, key].read()
        return self.store.get(key)

    def _lend(self, job: SaveJob) -> SaveResult:
        if job.lease_id in self._ended:
            return SaveResult(job.job_id, committed=False, error="cancelled")
        for key, block_id in zip(job.keys, job.block_ids, strict=True):
            is_tail = job.num_tail_tokens and key == job.keys[-1]
            num_slots = job.num_tail_tokens if is_tail else len(self._pool[block_id])
            lent = Lent(self._pool, block_id, num_slots, job.job_id)
            assert None not in lent.read()[:num_slots]
            self.store[job.lease_id, key] = lent
        self._held.setdefault(job.lease_id, set()).add(job.job_id)
        return SaveResult(job.job_id, committed=True, is_held=True)

    def poll(self) -> TransferResults:
        results, self._results = self._results, []
        # A release is reported after the result of its save.
        released, self._released = self._released, []
        return TransferResults(
            tuple(r for r in results if isinstance(r, LookupResult)),
            tuple(r for r in results if isinstance(r, LoadResult)),
            tuple(r for r in results if isinstance(r, SaveResult)),
            tuple(released),
        )

    def close(self) -> None:
        self.pending.clear()
        self.waiting.clear()
        self.lost.clear()
