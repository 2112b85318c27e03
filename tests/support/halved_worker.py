"""A connector worker of two tensor-parallel ranks, over one engine's pool."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvstore.connector import KvConnectorWorker
from kvstore.jobs import (
    ConnectorWork,
    LoadJob,
    LoadResult,
    LookupResult,
    SaveJob,
    SaveResult,
    TransferResults,
)
from kvstore.layout import KvLayout
from kvstore.registry import open_store
from kvstore.store_connector import StoreConnectorWorker
from kvstore.transfer_form import WHOLE, PoolShare, TransferForm

__all__ = ["HalvedWorker"]

_NUM_RANKS = 2


class HalvedWorker(KvConnectorWorker):
    """Two workers with a pool of half the heads each.

    Blocks to save are first copied into their pools, layer by layer for saves ahead of a step;
    loaded blocks are copied out of them. Only KV types without scales are supported.

    Args:
        url: URL of the store.
    """

    def __init__(self, url: str) -> None:
        self.ranks = [StoreConnectorWorker(open_store(url)) for _ in range(_NUM_RANKS)]
        self._jobs: dict[int, LoadJob | SaveJob] = {}
        self._results: dict[int, list[Any]] = {}
        self._ahead: dict[int, list[SaveJob]] = {}

    def register_pool(
        self,
        pool: torch.Tensor,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        assert form is not None
        assert share.degree == 1
        self._pool, self._size = pool, form.block_size
        self._count = layout.block_size // form.block_size
        half = replace(layout, num_kv_heads=layout.num_kv_heads // _NUM_RANKS)
        self._halves = [torch.full_like(heads, torch.nan) for heads in self._heads(pool)]
        for rank, (worker, half_pool) in enumerate(zip(self.ranks, self._halves, strict=True)):
            worker.register_pool(half_pool, half, form, PoolShare(rank, _NUM_RANKS))

    def set_waker(self, wake: Callable[[], None]) -> None:
        for worker in self.ranks:
            worker.set_waker(wake)

    def start(self, work: ConnectorWork) -> None:
        for job in work.saves:
            if not job.step:
                self._copy_out(job.block_ids, len(self._pool[0]))
            self._ahead.setdefault(job.step, []).append(job)
        self._jobs.update((job.job_id, job) for job in (*work.loads, *work.saves))
        for worker in self.ranks:
            worker.start(work)

    def layers_computed(self, step: int, num_layers: int) -> None:
        for job in self._ahead.get(step, ()):
            self._copy_out(job.block_ids, num_layers)
        for worker in self.ranks:
            worker.layers_computed(step, num_layers)

    def step_ended(self, step: int, *, computed: bool) -> None:
        if computed:
            self.layers_computed(step, len(self._pool[0]))
        self._ahead.pop(step, None)
        for worker in self.ranks:
            worker.step_ended(step, computed=computed)

    def poll(self) -> TransferResults:
        for worker in self.ranks:
            results = worker.poll()
            for result in (*results.lookups, *results.loads, *results.saves):
                self._results.setdefault(result.job_id, []).append(result)
        both = [results for results in self._results.values() if len(results) == _NUM_RANKS]
        ended = [self._combine(*results) for results in both]
        for result in ended:
            del self._results[result.job_id]
        return TransferResults(
            tuple(result for result in ended if isinstance(result, LookupResult)),
            tuple(result for result in ended if isinstance(result, LoadResult)),
            tuple(result for result in ended if isinstance(result, SaveResult)),
        )

    def close(self) -> None:
        for worker in self.ranks:
            worker.close()

    def _combine(self, first: Any, second: Any) -> Any:
        """Returns the result that holds for both ranks."""
        if isinstance(first, SaveResult):
            return replace(first, committed=first.committed and second.committed)
        least = min((first, second), key=lambda result: result.num_blocks)
        if isinstance(least, LoadResult):
            for block_id in self._jobs.pop(least.job_id).block_ids[: least.num_blocks]:
                for theirs, half in zip(self._heads(self._pool), self._halves, strict=True):
                    self._part(theirs, block_id).copy_(self._part(half, block_id))
        return least

    def _copy_out(self, block_ids: Sequence[int], num_layers: int) -> None:
        """Copies only the first layers, as the others are not computed yet."""
        for block_id in block_ids:
            for theirs, half in zip(self._heads(self._pool), self._halves, strict=True):
                computed = self._part(theirs, block_id)[:num_layers]
                self._part(half, block_id)[:num_layers] = computed

    def _heads(self, pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return pool.chunk(_NUM_RANKS, dim=3)

    def _part(self, pool: torch.Tensor, block_id: int) -> torch.Tensor:
        block, part = divmod(block_id, self._count)
        return pool[block, :, :, :, part * self._size : (part + 1) * self._size]
