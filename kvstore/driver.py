"""`ConnectorDriver`: plays the engine towards one KV connector, without an engine.

The conformance suite, `baton doctor`, the benchmarks and Baton's tests drive connectors with it.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.connector import Connector
from kvstore.handoff import KvHandoff
from kvstore.jobs import LoadResult, LookupResult, SaveResult, TransferResults
from kvstore.layout import KvLayout
from kvstore.transfer_form import WHOLE, PoolShare, TransferForm

__all__ = ["ConnectorDriver", "ContractError"]

_NAMESPACE = b"driver".ljust(32)
# Conditions may also depend on other engines and on the clock, and those wake nothing here.
_MAX_WAIT_S = 0.02


class ContractError(Exception):
    """A connector did something that `kvstore.connector` forbids."""


class ConnectorDriver:
    """Both halves of a connector over a pool of blocks, driven from one thread.

    It keeps the engine's side of the contract of `kvstore.connector` and checks the connector's:
    each job has one result, and a save is released once if it was held. Methods named after a
    job wait for its result; the others start it and return its id.

    Args:
        connector: both halves. The driver closes them.
        pool: the tensor `[num_blocks, *layout.block_shape]`.
        layout: the shape and type of the pool's blocks.
        form: see `KvConnectorWorker.register_pool`.
        share: see there.
        timeout_s: the longest wait for a result.

    Attributes:
        scheduler: the scheduler half.
        worker: the worker half.
        pool: see above.
        layout: see above.
        saves: results by job.
        loads: results by job.
        lookups: answers by job.
        released: ids of saves that were held, whose blocks are not read any more.
        woken: set whenever the connector reports that it has results.

    Raises:
        ConfigurationError: the connector refuses the pool.
    """

    def __init__(
        self,
        connector: Connector,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
        *,
        timeout_s: float = 30.0,
    ) -> None:
        self.scheduler, self.worker = connector
        self.pool = pool
        self.layout = layout
        self.saves: dict[int, SaveResult] = {}
        self.loads: dict[int, LoadResult] = {}
        self.lookups: dict[int, LookupResult] = {}
        self.released: list[int] = []
        self.woken = threading.Event()
        self._timeout_s = timeout_s
        self._saves_by_lease: defaultdict[str, list[int]] = defaultdict(list)
        try:
            self.worker.register_pool(pool, layout, form, share)
            self.worker.set_waker(self.woken.set)
        except BaseException:
            self.close()
            raise

    # Steps.

    def step(self) -> None:
        """Processes results, then starts scheduled jobs, like a step of an engine.

        Raises:
            ContractError: a result is wrong.
        """
        self._process(self.scheduler.update(self.worker.poll()))
        if work := self.scheduler.build_work():  # results may have scheduled jobs, too
            self.worker.start(work)

    def _process(self, results: TransferResults) -> None:
        for answer in results.lookups:
            _expect(answer.job_id not in self.lookups, f"look-up {answer.job_id} ended twice")
            self.lookups[answer.job_id] = answer
        for loaded in results.loads:
            _expect(loaded.job_id not in self.loads, f"load {loaded.job_id} ended twice")
            self.loads[loaded.job_id] = loaded
        for saved in results.saves:
            _expect(saved.job_id not in self.saves, f"save {saved.job_id} ended twice")
            self.saves[saved.job_id] = saved
        for job_id in results.released:
            is_held = job_id in self.saves and self.saves[job_id].is_held
            _expect(is_held, f"save {job_id} was released, but was not held")
            _expect(job_id not in self.released, f"save {job_id} was released twice")
            self.released.append(job_id)

    def run_until(
        self, is_over: Callable[[], bool], what: str = "a job", timeout_s: float | None = None
    ) -> None:
        """Steps whenever the connector has results, until a condition holds.

        Args:
            is_over: the condition.
            what: its name in the error.
            timeout_s: the longest wait; None for the driver's own.

        Raises:
            TimeoutError: the condition did not hold in time.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        give_up_at = time.monotonic() + limit_s
        self.step()
        while not is_over():
            remaining_s = give_up_at - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(f"{what} takes longer than {limit_s:g} s")
            self.woken.wait(min(_MAX_WAIT_S, remaining_s))
            self.woken.clear()
            self.step()

    # Saves and handoffs.

    def start_save(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        num_tail_tokens: int = 0,
        lease_id: str = "",
    ) -> int:
        """Schedules a save. `SaveJob` describes the arguments."""
        job_id = self.scheduler.save(keys, block_ids, num_tail_tokens, lease_id=lease_id)
        self._saves_by_lease[lease_id].append(job_id)
        return job_id

    def save(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        num_tail_tokens: int = 0,
        lease_id: str = "",
    ) -> SaveResult:
        """Saves blocks. `SaveJob` describes the arguments."""
        job_id = self.start_save(keys, block_ids, num_tail_tokens, lease_id)
        self.run_until(lambda: job_id in self.saves, "a save")
        return self.saves[job_id]

    def make_handoff(
        self, keys: Sequence[bytes], lease_id: str, num_tail_tokens: int = 0
    ) -> KvHandoff:
        """Returns the handoff of a prompt whose blocks were saved for a lease."""
        num_full = len(keys) - bool(num_tail_tokens)
        num_tokens = num_full * self.layout.block_size + num_tail_tokens
        return self.scheduler.make_handoff(lease_id, _NAMESPACE, keys, num_tokens)

    def hand_over(
        self, keys: Sequence[bytes], block_ids: Sequence[int], num_tail_tokens: int = 0
    ) -> KvHandoff:
        """Saves a prompt for a new lease, offers the lease, and returns the handoff.

        Raises:
            RuntimeError: the blocks cannot be saved; says why.
        """
        lease_id = os.urandom(16).hex()
        result = self.save(keys, block_ids, num_tail_tokens, lease_id)
        if not result.committed:
            raise RuntimeError(f"the blocks cannot be saved: {result.error or 'failed'}")
        self.scheduler.offer(lease_id)
        self.step()
        return self.make_handoff(keys, lease_id, num_tail_tokens)

    def forget(self, keys: Sequence[bytes], lease_id: str, timeout_s: float | None = None) -> None:
        """Ends a lease and deletes its blocks; returns when both have happened.

        Args:
            keys: one per saved block.
            lease_id: that `start_save` or `save` saved them for.
            timeout_s: the longest wait; None for the driver's own.

        Raises:
            TimeoutError: it takes longer.
        """
        self.scheduler.end_lease(lease_id)
        self.scheduler.delete(keys)
        self.step()
        lookup = self.scheduler.lookup(keys)  # answered after deletions of earlier work
        self.run_until(
            lambda: self.scheduler.num_found(lookup) is not None and not self._is_lent(lease_id),
            "the removal of blocks",
            timeout_s,
        )
        self.scheduler.forget_lookup(lookup)

    def _is_lent(self, lease_id: str) -> bool:
        jobs = self._saves_by_lease[lease_id]
        held = {job_id for job_id in jobs if job_id in self.saves and self.saves[job_id].is_held}
        return not held.issubset(self.released)

    # Loads and look-ups.

    def start_load(self, handoff: KvHandoff, block_ids: Sequence[int]) -> int:
        """Schedules a load of a handoff's first blocks into `block_ids`."""
        return self.scheduler.load(handoff.block_keys[: len(block_ids)], block_ids, handoff)

    def load(self, handoff: KvHandoff, block_ids: Sequence[int]) -> LoadResult:
        """Loads a handoff's first blocks into `block_ids`."""
        job_id = self.start_load(handoff, block_ids)
        self.run_until(lambda: job_id in self.loads, "a load")
        return self.loads[job_id]

    def look_up(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading blocks can be loaded."""
        job_id = self.scheduler.lookup(keys)
        self.run_until(lambda: self.scheduler.num_found(job_id) is not None, "a look-up")
        num_found = self.scheduler.num_found(job_id) or 0
        self.scheduler.forget_lookup(job_id)
        return num_found

    def close(self) -> None:
        """Closes the connector. Idempotent."""
        self.worker.close()


def _expect(holds: bool, violation: str) -> None:
    if not holds:
        raise ContractError(f"KV connector: {violation}")
