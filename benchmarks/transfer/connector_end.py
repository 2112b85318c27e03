"""`ConnectorEnd`: both halves of a connector on a pool, driven as an engine drives them."""

import threading
import time
from collections.abc import Callable, Sequence

import torch

from kvstore.handoff import KvHandoff
from kvstore.jobs import LoadResult, SaveResult
from kvstore.layout import KvLayout
from kvstore.registry import open_connector

__all__ = ["ConnectorEnd", "RefusedError"]

_JOB_S = 120.0
_WAIT_S = 0.05
_NAMESPACE = b"bench transfer".ljust(32)


class RefusedError(Exception):
    """What was moved is not what should have been: there is no figure."""


class ConnectorEnd:
    """One side of a transfer.

    Args:
        url: of the connector.
        pool: `[num_blocks, *layout.block_shape]`.
        layout: of its blocks.
    """

    def __init__(self, url: str, pool: torch.Tensor, layout: KvLayout) -> None:
        self._scheduler, self._worker = open_connector(url)
        self._woken = threading.Event()
        self._worker.set_waker(self._woken.set)
        self._worker.register_pool(pool, layout)
        self._saves: dict[int, SaveResult] = {}
        self._loads: dict[int, LoadResult] = {}
        self._held: set[int] = set()

    def save(self, keys: Sequence[bytes], block_ids: Sequence[int], lease_id: str) -> float:
        """Seconds from a job's start until others can load its blocks.

        Raises:
            RefusedError: they cannot.
        """
        job_id = self._scheduler.save(keys, block_ids, lease_id=lease_id)
        seconds = self._time_until(lambda: job_id in self._saves)
        result = self._saves.pop(job_id)
        if not result.committed:
            raise RefusedError(f"the save failed: {result.error or 'failed'}")
        if result.is_held:
            self._held.add(job_id)
        return seconds

    def make_handoff(self, keys: Sequence[bytes], lease_id: str) -> KvHandoff:
        """What the other side needs to load what was saved."""
        return self._scheduler.make_handoff(lease_id, _NAMESPACE, keys, len(keys))

    def load(self, handoff: KvHandoff, block_ids: Sequence[int]) -> float:
        """Seconds from a job's start until its blocks are in the pool, verified.

        Raises:
            RefusedError: not all are.
        """
        job_id = self._scheduler.load(handoff.block_keys, block_ids, handoff)
        seconds = self._time_until(lambda: job_id in self._loads)
        result = self._loads.pop(job_id)
        if result.num_blocks < len(block_ids):
            loaded = f"{result.num_blocks} of {len(block_ids)} blocks"
            raise RefusedError(f"the load brought {loaded}: {result.error or 'missing'}")
        return seconds

    def forget(self, keys: Sequence[bytes], lease_id: str) -> None:
        """Gives back what was saved; returns when that has happened."""
        self._scheduler.end_lease(lease_id)
        self._scheduler.delete(keys)
        lookup = self._scheduler.lookup(keys)  # answered when the deletion is over
        self._time_until(
            lambda: self._scheduler.num_found(lookup) is not None and not self._held,
        )
        self._scheduler.forget_lookup(lookup)

    def close(self) -> None:
        """Closes the connector."""
        self._worker.close()

    def _time_until(self, is_over: Callable[[], bool]) -> float:
        began_at = time.perf_counter()
        self._step()
        while not is_over():
            if time.perf_counter() - began_at > _JOB_S:
                raise RefusedError(f"nothing was heard for {_JOB_S:g} s")
            self._woken.wait(_WAIT_S)
            self._woken.clear()
            self._step()
        return time.perf_counter() - began_at

    def _step(self) -> None:
        """As an engine's step: starts what was scheduled, takes in what has ended."""
        if work := self._scheduler.build_work():
            self._worker.start(work)
        results = self._scheduler.update(self._worker.poll())
        self._saves.update((result.job_id, result) for result in results.saves)
        self._loads.update((result.job_id, result) for result in results.loads)
        self._held.difference_update(results.released)
