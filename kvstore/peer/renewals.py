"""`Renewals`: renews the leases on peers' blocks that requests wait to load."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.v1 import kv_peer_pb2 as pb
from kvstore.guard.breaker import log_level_of
from kvstore.guard.metrics import TransferMetrics
from kvstore.handoff import KvHandoff
from kvstore.peer.address import PeerAddress, holders_of
from kvstore.peer.peers import PeerRefusedError, Peers
from kvstore.store import StoreUnavailableError

__all__ = ["Renewals"]

# Most loads start at once and need no renewal; a request that waits longer than this does.
_FIRST_AFTER_S = 1.0
# Shortest time between renewals, whatever lease a handoff names.
_MIN_PERIOD_S = 0.01
# Each peer that does not answer takes a thread; beyond this number, other peers wait.
_MAX_CALLS = 32

_logger = logging.getLogger("baton.kvstore")


@dataclass(slots=True)
class _RenewedLease:
    """A lease at one of the peers that lend the blocks of a handoff."""

    renew_at: float
    lost_at: float  # unless it is renewed before
    is_gone: bool = False


@dataclass(slots=True)
class _Kept:
    """A handoff that is kept, with its leases: every peer that lends its blocks has one."""

    lease_s: float
    num_requests: int
    leases: dict[PeerAddress, _RenewedLease]


class Renewals:
    """Renews leases in threads of its own, one call for all those of a peer.

    A lease is lost when its peer says so or has not renewed it in time. Peers do not wait for
    each other's answers.

    Args:
        peers: the processes that lend.
        timeout_s: longest wait for an answer.
        clock: seconds, monotonic.

    Attributes:
        metrics: counts renewals; may be set until the first `keep`.
        slices: numbers of the slices of a block that this process reads; may be set until then.
    """

    def __init__(
        self, peers: Peers, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.metrics: TransferMetrics | None = None
        self.slices: Sequence[int] = (0,)
        self._peers = peers
        self._timeout_s = timeout_s
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._calls = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="baton-kv-renew-call")
        self._asked: set[PeerAddress] = set()  # peers that have not answered yet

    def keep(self, handoff: KvHandoff) -> None:
        """Renews a handoff's leases until `drop` was called as often as this.

        They are those at the peers that lend what this process reads. Does nothing but log if the
        handoff does not name these peers.
        """
        try:
            holders = holders_of(handoff.connector_params, self.slices)
        except ValueError as error:
            _logger.warning("KV handoff %s: %s", handoff.handoff_id, error)
            return
        with self._changed:
            if kept := self._kept.get(handoff.handoff_id):
                kept.num_requests += 1
                return
            now, lease_s = self._clock(), handoff.lease_ms / 1000
            renew_at, lost_at = now + min(_FIRST_AFTER_S, lease_s / 3), now + lease_s
            leases = {address: _RenewedLease(renew_at, lost_at) for address in holders}
            self._kept[handoff.handoff_id] = _Kept(lease_s, 1, leases)
            self._start()
            self._changed.notify()

    def drop(self, handoff_id: str) -> None:
        """Ends one `keep`. Unknown ids are ignored."""
        with self._changed:
            if kept := self._kept.get(handoff_id):
                kept.num_requests -= 1
                if not kept.num_requests:
                    del self._kept[handoff_id]

    def is_lost(self, handoff_id: str, address: PeerAddress) -> bool:
        """Returns whether a kept lease is over, so that a load must fail without a call."""
        lease = self._lease_of(handoff_id, address)
        return lease is not None and (lease.is_gone or lease.lost_at <= self._clock())

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._calls.shutdown(wait=True, cancel_futures=True)

    def _start(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="baton-kv-renew", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while due := self._wait_for_due():
            for address, lease_ids in due.items():
                self._calls.submit(self._ask, address, lease_ids)

    def _wait_for_due(self) -> dict[PeerAddress, list[str]]:
        """Waits for leases to renew; returns them by peer, and none once closed."""
        with self._changed:
            while not self._is_closed:
                now = self._clock()
                due: dict[PeerAddress, list[str]] = {}
                times = []
                for lease_id, kept, address, lease in self._waiting():
                    if lease.renew_at <= now:
                        lease.renew_at = now + max(kept.lease_s / 3, _MIN_PERIOD_S)
                        due.setdefault(address, []).append(lease_id)
                    times.append(lease.renew_at)
                if due:
                    self._asked.update(due)
                    return due
                self._changed.wait(min(times) - now if times else None)
        return {}

    def _waiting(self) -> Iterator[tuple[str, _Kept, PeerAddress, _RenewedLease]]:
        """Yields the leases to renew some time, except those of peers that have not answered."""
        for lease_id, kept in self._kept.items():
            for address, lease in kept.leases.items():
                if not lease.is_gone and address not in self._asked:
                    yield lease_id, kept, address, lease

    def _ask(self, address: PeerAddress, lease_ids: Sequence[str]) -> None:
        try:
            self._renew(address, lease_ids)
        except Exception:
            _logger.exception("KV leases are not renewed")
        finally:
            with self._changed:
                self._asked.discard(address)
                self._changed.notify()

    def _renew(self, address: PeerAddress, lease_ids: Sequence[str]) -> None:
        asked_at = self._clock()
        message = pb.RenewLeasesRequest(generation=address.generation, lease_ids=lease_ids)
        try:
            with self._peers.use(address) as peer:
                renew = peer.stub.RenewLeases
                answer = peer.ask_anyway(lambda: renew(message, timeout=self._timeout_s))
        except PeerRefusedError as error:
            _logger.log(error.log_level, "KV leases are lost: %s", error)
            self._mark(address, lease_ids, asked_at, gone=lease_ids)
        except StoreUnavailableError as error:
            _logger.log(log_level_of(error), "KV leases are not renewed: %s", error)
        else:
            self._mark(address, lease_ids, asked_at, gone=answer.gone)
            if self.metrics is not None:
                self.metrics.leases_renewed(len(lease_ids) - len(answer.gone))

    def _mark(
        self, address: PeerAddress, lease_ids: Sequence[str], asked_at: float, gone: Sequence[str]
    ) -> None:
        with self._changed:
            for lease_id in lease_ids:
                if lease := self._lease_of(lease_id, address):
                    lease.is_gone = lease_id in gone
                    lease.lost_at = asked_at + self._kept[lease_id].lease_s

    def _lease_of(self, handoff_id: str, address: PeerAddress) -> _RenewedLease | None:
        kept = self._kept.get(handoff_id)
        return None if kept is None else kept.leases.get(address)
