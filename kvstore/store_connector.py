"""The store connector: blocks in a `KvStore`, found by key. `StoreConnectorWorker`, `StoreFactory`.

The worker half moves blocks by a `BlockMover`, whose backend it is itself: it calls the store
through breakers (`GuardedStore`). Look-ups and deletes have a thread of their own. So has the watch
of an engine's store (`StoreWatch`), which finds out whether a store that failed works again.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvstore.connector import (
    Connector,
    ConnectorCapabilities,
    KvConnectorScheduler,
    KvConnectorWorker,
)
from kvstore.guard.breaker import log_level_of
from kvstore.guard.guarded_store import GuardedStore
from kvstore.guard.metrics import KvMetrics
from kvstore.guard.status import BackendStatus
from kvstore.guard.store_watch import StoreWatch
from kvstore.handoff import KvHandoff, connector_name
from kvstore.jobs import ConnectorWork, LoadJob, LookupJob, LookupResult, SaveJob, TransferResults
from kvstore.layout import KvLayout
from kvstore.mover.backend import Backend
from kvstore.mover.io_threads import IoThreads, patience_s
from kvstore.mover.mover import BlockMover
from kvstore.store import GetStatus, KvObject, KvStore, StoreUnavailableError
from kvstore.transfer_form import WHOLE, BlockSlicing, PoolShare, TransferForm
from kvstore.url import printable_url

if TYPE_CHECKING:
    from kvstore.mover.copies import BlockCopier

__all__ = ["StoreConnectorWorker", "StoreFactory"]

_MAX_LOOKUP_WAIT_S = 0.25
# A request may be looked up on both tiers. It must not wait for longer than `timeout_s` in all.
_LOOKUP_SHARE = 1 / 2
_MIN_LOOKUP_PATIENCE_S = 0.1
# Stores without leases evict what was touched longest ago at any time: the more often, the better.
_TOUCH_WITHOUT_LEASE_S = 30.0
_MAX_WAITING_DELETES = 1024  # one for each step that deleted something

_logger = logging.getLogger("baton.kvstore")


class StoreConnectorWorker(KvConnectorWorker, Backend):
    """Saves blocks to a store and loads them from it. The store itself keeps leases.

    Args:
        store: closed with the worker.
        make_copier: makes what copies objects between the pool and segments.
        clock: seconds, for the breakers.
        name: the store's URL without secrets, for logs and errors.
    """

    def __init__(
        self,
        store: KvStore,
        make_copier: "Callable[[Any, BlockSlicing], BlockCopier] | None" = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "the KV store",
    ) -> None:
        self._store = store
        self._guarded = GuardedStore(store, name, clock)
        self._watch: StoreWatch | None = None
        self._mover = BlockMover(
            self,
            self._wake_engine,
            make_copier,
            timeout_s=store.timeout_s,
            on_hang=lambda: self._guarded.open_puts(_hangs("calls")),
        )
        # A thread of their own, so that look-ups do not queue behind loads and saves. It counts as
        # hanging after a second: a request waits for its look-up before it computes.
        self._lookups = IoThreads(
            1,
            "baton-kv-lookup",
            _lookup_patience_s(store.timeout_s),
            self._lookups_hang,
            log_level=logging.DEBUG,
        )
        self._answers: deque[LookupResult] = deque()
        self._open_lookups: dict[int, LookupJob] = {}
        lease_s = min(store.lease_s or _TOUCH_WITHOUT_LEASE_S, store.ttl_s)
        self._kept = _KeptHandoffs(lease_s / 3, clock)
        self._is_touching = False
        self._deletes: deque[tuple[bytes, ...]] = deque()  # keys, one entry for each waiting task
        self._wake: Callable[[], None] = lambda: None
        self._slicing: BlockSlicing

    def wrap_backend(self, wrap: Callable[[Backend], Backend]) -> None:
        """Puts something between the mover and the store; see `kvstore.faults.Faultable`."""
        self._mover.wrap_backend(wrap)

    @override
    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        self._slicing = BlockSlicing.of(layout, form, share)
        self._mover.register_pool(pool, layout, form, share)

    @override
    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @override
    def measure(self, metrics: KvMetrics, backend: str) -> None:
        counted = metrics.of(backend)
        self._mover.measure(counted)
        counted.read_stats = self._store.stats
        counted.read_breakers = lambda: self._guarded.breakers

    @override
    def watch(self) -> None:
        self._watch = StoreWatch(self._guarded)

    @property
    @override
    def statuses(self) -> Sequence[BackendStatus]:
        identity = "" if self._watch is None else self._watch.identity
        return (self._guarded.status(identity),)

    @override
    def start(self, work: ConnectorWork) -> None:
        for lookup in work.lookups:
            self._open_lookups[lookup.job_id] = lookup
            self._submit_lookup(lookup.job_id)
        for job_id in work.cancelled_lookups:
            self._open_lookups.pop(job_id, None)
        if work.deletes:
            self._submit_delete(tuple(work.deletes))
        for handoff in work.kept:
            self._kept.keep(handoff)
        for handoff_id in work.dropped:
            self._kept.drop(handoff_id)
        self._mover.start(work.loads, work.saves, work.cancelled_loads)

    @override
    def layers_computed(self, step: int, num_layers: int) -> None:
        self._mover.layers_computed(step, num_layers)

    @override
    def step_ended(self, step: int, *, computed: bool) -> None:
        self._mover.step_ended(step, computed=computed)

    @override
    def poll(self) -> TransferResults:
        if self._lookups.is_hanging:
            for job_id in list(self._open_lookups):
                self._answer(job_id, None)
        self._touch_next()
        loads, saves = self._mover.poll()
        lookups = [self._answers.popleft() for _ in range(len(self._answers))]
        return TransferResults(tuple(lookups), tuple(loads), tuple(saves))

    @override
    def close(self) -> None:
        # A store is not closed under a call that hangs: the call may still use what it opened.
        has_watch_ended = self._watch is None or self._watch.close()
        if all([self._mover.close(), self._lookups.close(), has_watch_ended]):
            self._store.close()
        if num_blocks := sum(map(len, self._deletes)):
            _logger.warning("KV store: %d blocks are not deleted: it is closed", num_blocks)
            self._deletes.clear()

    def _wake_engine(self) -> None:
        self._wake()

    def _lookups_hang(self) -> None:
        if self._open_lookups:  # otherwise it may be a long list of deletions
            self._guarded.open_reads(_hangs("look-ups"))
        self._wake()

    def _submit_lookup(self, job_id: int) -> None:
        """Starts a look-up. While its thread hangs or the store is not asked, it finds nothing at
        once.
        """
        is_not_asked = self._watch is not None and not self._guarded.answers
        if self._lookups.is_hanging or is_not_asked:
            self._answer(job_id, None)  # here, as the thread may hang no more when `poll` is called
            self._wake()
        else:
            self._lookups.submit(self._look_up, job_id, time.monotonic())

    def _touch_next(self) -> None:
        """Touches the objects of a handoff for which a request waits: one at a time, so that
        look-ups need not wait for long.
        """
        if self._is_touching or self._lookups.is_hanging:
            return
        handoff = self._kept.take_due()
        if handoff is not None:
            self._is_touching = True
            self._lookups.submit(self._touch, handoff.block_keys)

    def _submit_delete(self, keys: tuple[bytes, ...]) -> None:
        """Deletes objects before later look-ups are made, also after the thread hung for long."""
        if len(self._deletes) >= _MAX_WAITING_DELETES:
            _logger.warning("KV store: %d blocks are not deleted: too many wait", len(keys))
            return
        self._deletes.append(keys)
        self._lookups.submit(self._delete)

    # The mover's backend. I/O threads.

    @override
    def num_held(self, keys: Sequence[bytes]) -> int:
        return self._guarded.num_held(keys)

    @override
    def put(self, job: SaveJob, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        self._guarded.put(keys, objects)

    @override
    def fetch(
        self, job: LoadJob, keys: Sequence[bytes], objects: Sequence[KvObject]
    ) -> list[GetStatus]:
        return self._guarded.get_into(keys, objects)

    @override
    def discard(self, key: bytes) -> None:
        self._guarded.delete([key])

    # The look-up thread.

    def _look_up(self, job_id: int, submitted_at: float) -> None:
        """Answers a look-up unless it was cancelled.

        One that waited long finds nothing: behind a slow store, computing is faster than queueing.
        """
        job = self._open_lookups.get(job_id)
        if job is None:
            return
        num_blocks = None
        if time.monotonic() - submitted_at < _MAX_LOOKUP_WAIT_S:
            keys = self._slicing.object_keys(job.keys)
            num_objects = self._try("look-up", lambda: self.num_held(keys))
            if num_objects is not None:
                num_blocks = num_objects // self._slicing.objects_per_block
        self._answer(job_id, num_blocks)
        self._wake()

    def _answer(self, job_id: int, num_blocks: int | None) -> None:
        """Answers a look-up once, unless it was cancelled; None: the store has not. Any thread."""
        if self._open_lookups.pop(job_id, None) is not None:
            error = "unavailable" if num_blocks is None else ""
            self._answers.append(LookupResult(job_id, num_blocks or 0, error))

    def _touch(self, block_keys: Sequence[bytes]) -> None:
        """Touches the objects of a handoff, as far as there is no gap. Of models with sliding
        windows it touches those of the first group of layers.
        """
        try:
            keys = self._slicing.object_keys(block_keys)
            self._try("touch", lambda: self.num_held(keys))
        finally:
            self._is_touching = False

    def _delete(self) -> None:
        """Deletes the keys that wait longest. Where that fails, objects stay until their TTL."""
        keys = self._slicing.object_keys(self._deletes.popleft())
        self._try("delete", lambda: self._guarded.delete(keys))

    def _try(self, name: str, call: Callable[[], int]) -> int | None:
        try:
            return call()
        except StoreUnavailableError as error:
            level = log_level_of(error)
            _logger.log(level, "%s: %s failed: %s", self._guarded.name, name, error)
        except Exception:
            _logger.exception("%s: %s failed", self._guarded.name, name)
        return None


def _hangs(calls: str) -> StoreUnavailableError:
    return StoreUnavailableError(f"{calls} are not answered in time")


def _lookup_patience_s(timeout_s: float) -> float:
    """Returns how long a look-up may take before the store counts as hanging."""
    share_s = max(_LOOKUP_SHARE * timeout_s, _MIN_LOOKUP_PATIENCE_S)
    return min(patience_s(_MAX_LOOKUP_WAIT_S), share_s)


@dataclass(slots=True)
class _KeptHandoff:
    handoff: KvHandoff
    touched_at: float
    num_requests: int = 1


class _KeptHandoffs:
    """Handoffs for which requests wait, and which one's objects are to be touched next. Pure.

    A store evicts what was touched longest ago, and without touches that would be the objects of
    the request that has waited longest. Objects were touched when they were saved, so a handoff
    that is loaded soon costs no call. Not thread-safe.

    Args:
        period_s: longest time without a touch.
        clock: seconds, monotonic.
    """

    def __init__(self, period_s: float, clock: Callable[[], float]) -> None:
        self._period_s = period_s
        self._clock = clock
        self._kept: OrderedDict[str, _KeptHandoff] = OrderedDict()  # touched longest ago first

    def keep(self, handoff: KvHandoff) -> None:
        """Keeps a handoff until `drop` was called as often as this."""
        if kept := self._kept.get(handoff.handoff_id):
            kept.num_requests += 1
        else:
            self._kept[handoff.handoff_id] = _KeptHandoff(handoff, self._clock())

    def drop(self, handoff_id: str) -> None:
        """Ends one `keep`. Unknown ids are ignored."""
        if kept := self._kept.get(handoff_id):
            kept.num_requests -= 1
            if not kept.num_requests:
                del self._kept[handoff_id]

    def take_due(self) -> KvHandoff | None:
        """Returns a handoff whose objects are to be touched now; None if there is none."""
        for handoff_id, kept in self._kept.items():
            if self._clock() - kept.touched_at < self._period_s:
                break
            kept.touched_at = self._clock()
            self._kept.move_to_end(handoff_id)
            return kept.handoff
        return None


@dataclass(frozen=True, slots=True)
class StoreFactory:
    """Opens the connector of a store; a `ConnectorFactory`.

    Attributes:
        store_class: the store's class.
        is_diagnosis: whether the store is opened for a diagnosis; see `KvStore`.
    """

    store_class: type[KvStore]
    is_diagnosis: bool = False

    @property
    def capabilities(self) -> ConnectorCapabilities:
        """Capabilities of the store as a connector."""
        store = self.store_class.capabilities
        return ConnectorCapabilities(
            shared_between_processes=store.shared_between_processes,
            shared_between_hosts=store.shared_between_hosts,
            keeps_leases=store.keeps_leases,
        )

    def open(self, url: str) -> Connector:
        """Opens both halves.

        Raises:
            ConfigurationError: the store refuses the URL.
        """
        store_class = self.store_class
        open_store = store_class.open_for_diagnosis if self.is_diagnosis else store_class.from_url
        store = open_store(url)
        scheduler = KvConnectorScheduler(connector_name(url), lease_s=store.ttl_s, saves_ahead=True)
        return scheduler, StoreConnectorWorker(store, name=f"KV store {printable_url(url)}")
