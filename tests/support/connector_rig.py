"""A store connector's worker with a pool of random blocks; tests give the jobs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvstore.connector import KvConnectorScheduler
from kvstore.driver import ConnectorDriver
from kvstore.jobs import ConnectorWork, LoadJob, LoadResult, LookupResult, SaveJob, SaveResult
from kvstore.layout import KvLayout
from kvstore.mover.copies import BlockCopier
from kvstore.mover.mover import copier_for
from kvstore.store import KvStore
from kvstore.store_connector import StoreConnectorWorker
from kvstore.transfer_form import WHOLE, BlockSlicing, PoolShare, TransferForm

__all__ = ["LAYOUT", "TIMEOUT_S", "ConnectorRig", "keys"]

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, block_size=4, head_dim=5, dtype="float32")
TIMEOUT_S = 10.0
_NUM_BLOCKS = 64


def keys(count: int, first: int = 0) -> tuple[bytes, ...]:
    return tuple(index.to_bytes(32, "big") for index in range(first, first + count))


class ConnectorRig:
    """The worker half and its pool of 64 blocks.

    Args:
        store: the store that it saves to and loads from.
        copier_of: makes the copier of its blocks.
        device: device of the pool.
        pool: its pool; None for one of random blocks in `LAYOUT`.
        layout: the shape and type of the given pool's blocks.
        form: see `KvConnectorWorker.register_pool`.
        share: see `KvConnectorWorker.register_pool`.
        clock: clock of the breakers.

    Attributes:
        woken: set whenever the worker half reports that it has results.
    """

    def __init__(
        self,
        store: KvStore,
        copier_of: Callable[[torch.Tensor, BlockSlicing], BlockCopier] = copier_for,
        device: str = "cpu",
        *,
        pool: torch.Tensor | None = None,
        layout: KvLayout = LAYOUT,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.worker = StoreConnectorWorker(store, copier_of, clock)
        if pool is None:
            pool = torch.randn(_NUM_BLOCKS, *LAYOUT.block_shape).to(device)
        self.pool = pool
        self._driver = ConnectorDriver(
            (KvConnectorScheduler("store", lease_s=0), self.worker),
            pool,
            layout,
            form,
            share,
            timeout_s=TIMEOUT_S,
        )
        self.woken = self._driver.woken

    def start(self, **work: Sequence[Any]) -> None:
        self.worker.start(ConnectorWork(**{name: list(jobs) for name, jobs in work.items()}))

    def results(self, count: int) -> list[LookupResult | LoadResult | SaveResult]:
        """Waits for `count` results; returns all results since the last call."""
        kinds = (self._driver.lookups, self._driver.loads, self._driver.saves)
        self._driver.run_until(lambda: sum(map(len, kinds)) >= count, f"{count} results")
        ended = [result for results in kinds for result in results.values()]
        for results in kinds:
            results.clear()
        return ended

    def save(self, block_ids: Sequence[int], first_key: int = 0, num_tail_tokens: int = 0) -> None:
        job = SaveJob(0, keys(len(block_ids), first_key), tuple(block_ids), num_tail_tokens)
        self.start(saves=(job,))
        assert self.results(1) == [SaveResult(0, committed=True)]

    def load(self, block_ids: Sequence[int], first_key: int = 0) -> LoadResult:
        self.start(loads=(LoadJob(1, keys(len(block_ids), first_key), tuple(block_ids)),))
        (result,) = self.results(1)
        assert isinstance(result, LoadResult)
        return result
