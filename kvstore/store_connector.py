"""The store connector's worker half: a `StagedMover` over a `KvStore`, and look-ups."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.breaker import BreakerStore, log_level_of
from kvstore.connector import KvConnectorWorker
from kvstore.jobs import ConnectorWork, LoadJob, LookupJob, LookupResult, SaveJob, TransferResults
from kvstore.layout import KvLayout
from kvstore.measured import MeasuredBackend
from kvstore.metrics import KvMetrics
from kvstore.mover.backend import Backend
from kvstore.mover.io_threads import IoThreads
from kvstore.mover.mover import StagedMover
from kvstore.slot import Slot, wholes
from kvstore.store import GetStatus, KvStore, StoreUnavailableError
from kvstore.transfer_form import WHOLE, HeadShare, PoolCut, TransferForm

if TYPE_CHECKING:
    from kvstore.mover.copies import BlockCopier

__all__ = ["StoreConnectorWorker"]

_MAX_LOOKUP_WAIT_S = 0.25
# Of a step each.
_MAX_WAITING_DELETES = 1024

_logger = logging.getLogger("baton.kvstore")


class StoreConnectorWorker(KvConnectorWorker):
    """Saves to and loads from a store. Leases are the store's own matter.

    Args:
        store: where blocks go; closed with the worker.
        make_copier: what copies the objects of a pool that is cut so.
    """

    def __init__(
        self,
        store: KvStore,
        make_copier: "Callable[[Any, PoolCut], BlockCopier] | None" = None,
    ) -> None:
        self._read_stats = store.stats
        self._store = BreakerStore(store)
        backend = _StoreBackend(self._store, takes_frames=store.capabilities.takes_frames)
        self._mover = StagedMover(
            backend, self._wake_engine, make_copier, timeout_s=store.timeout_s
        )
        # Look-ups get a thread of their own: they must not queue behind bulk.
        self._lookups = IoThreads(1, "baton-kv-lookup", store.timeout_s, self._wake_engine)
        self._answers: deque[LookupResult] = deque()
        self._open_lookups: dict[int, LookupJob] = {}
        self._deletes: deque[tuple[bytes, ...]] = deque()  # not begun; for each a task waits
        self._wake: Callable[[], None] = lambda: None
        self._cut: PoolCut

    def wrap_backend(self, wrap: Callable[[Backend], Backend]) -> None:
        """See `kvstore.faults.Faultable`."""
        self._mover.wrap_backend(wrap)

    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: HeadShare = WHOLE,
    ) -> None:
        """See `KvConnectorWorker.register_pool`."""
        self._cut = PoolCut.of(layout, form, share)
        self._mover.register_pool(pool, layout, form, share)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `KvConnectorWorker.set_waker`."""
        self._wake = wake

    def measure(self, metrics: KvMetrics, backend: str) -> None:
        """See `KvConnectorWorker.measure`."""
        counted, breakers = metrics.of(backend), self._store.breakers
        self.wrap_backend(lambda inner: MeasuredBackend(inner, counted))
        counted.read_stats = self._read_stats
        counted.read_breakers = lambda: zip(
            ("load", "save", "save"), (breaker.counts for breaker in breakers), strict=True
        )

    def start(self, work: ConnectorWork) -> None:
        """See `KvConnectorWorker.start`."""
        for lookup in work.lookups:
            self._open_lookups[lookup.job_id] = lookup
            self._ask(lookup.job_id)
        for job_id in work.cancelled_lookups:
            self._open_lookups.pop(job_id, None)
        if work.deletes:
            self._delete_later(tuple(work.deletes))
        self._mover.start(work.loads, work.saves, work.cancelled_loads)

    def layers_computed(self, step: int, num_layers: int) -> None:
        """See `KvConnectorWorker.layers_computed`."""
        self._mover.layers_computed(step, num_layers)

    def step_ended(self, step: int, *, computed: bool) -> None:
        """See `KvConnectorWorker.step_ended`."""
        self._mover.step_ended(step, computed=computed)

    def poll(self) -> TransferResults:
        """See `KvConnectorWorker.poll`."""
        if self._lookups.is_hanging:
            for job_id in list(self._open_lookups):
                self._answer(job_id, 0)
        loads, saves = self._mover.poll()
        lookups = [self._answers.popleft() for _ in range(len(self._answers))]
        return TransferResults(tuple(lookups), tuple(loads), tuple(saves))

    def close(self) -> None:
        """See `KvConnectorWorker.close`."""
        # A call that hangs may go on with what the store has open.
        if all([self._mover.close(), self._lookups.close()]):
            self._store.close()
        if num_blocks := sum(map(len, self._deletes)):
            _logger.warning("KV store: %d blocks are not deleted: it is closed", num_blocks)
            self._deletes.clear()

    def _wake_engine(self) -> None:
        self._wake()

    def _ask(self, job_id: int) -> None:
        """Has a look-up made; if its thread hangs, nobody does, and `poll` answers."""
        if self._lookups.is_hanging:
            self._wake()
        else:
            self._lookups.submit(self._look_up, job_id, time.monotonic())

    def _delete_later(self, keys: tuple[bytes, ...]) -> None:
        """Has objects deleted before what is looked up later, if it takes a hanging thread long."""
        if len(self._deletes) >= _MAX_WAITING_DELETES:
            _logger.warning("KV store: %d blocks are not deleted: too many wait", len(keys))
            return
        self._deletes.append(keys)
        self._lookups.submit(self._delete)

    # The look-up thread.

    def _look_up(self, job_id: int, submitted_at: float) -> None:
        """Answers a look-up that is still wanted. One that waited long finds nothing:
        behind a slow store, computing is better than queueing.
        """
        job = self._open_lookups.get(job_id)
        if job is None:
            return
        num_blocks = 0
        if time.monotonic() - submitted_at < _MAX_LOOKUP_WAIT_S:
            keys = self._cut.object_keys(job.keys)
            found = self._try("look-up", lambda: self._store.contains_prefix(keys)) or 0
            num_blocks = found // self._cut.objects_per_block
        self._answer(job_id, num_blocks)
        self._wake()

    def _answer(self, job_id: int, num_blocks: int) -> None:
        """Answers a look-up once, if it is still wanted. Any thread."""
        if self._open_lookups.pop(job_id, None) is not None:
            self._answers.append(LookupResult(job_id, num_blocks))

    def _delete(self) -> None:
        """Deletes what has waited longest. What cannot be deleted stays until its TTL."""
        keys = self._deletes.popleft()
        self._try("delete", lambda: self._store.delete(self._cut.object_keys(keys)))

    def _try(self, name: str, call: Callable[[], int]) -> int | None:
        try:
            return call()
        except StoreUnavailableError as error:
            _logger.log(log_level_of(error), "KV store: %s failed: %s", name, error)
        except Exception:
            _logger.exception("KV store: %s failed", name)
        return None


class _StoreBackend:
    """A store as the mover sees it; see `kvstore.mover.backend.Backend`."""

    def __init__(self, store: BreakerStore, *, takes_frames: bool) -> None:
        self._store = store
        self.takes_frames = takes_frames

    def num_held(self, keys: Sequence[bytes]) -> int:
        return self._store.contains_prefix(keys)

    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        whole = wholes(slots)
        if whole is None:
            self._store.put_frames(keys, [slot.frame for slot in slots])
        else:
            self._store.put_many(keys, whole)

    def fetch(self, job: LoadJob, keys: Sequence[bytes], slots: Sequence[Slot]) -> list[GetStatus]:
        whole = wholes(slots)
        if whole is None:
            frames = [slot.frame for slot in slots]
            return self._store.get_frames_into(keys, frames)
        return self._store.get_many_into(keys, whole)

    def discard(self, key: bytes) -> None:
        self._store.delete([key])
