"""`PeerConnectorWorker`: lends blocks of its pool to peers, and loads those of others.

    lending   save jobs -> `Lender` -> `LeaseTable` <- `PeerServicer` <- readers
    reading   load jobs -> `BlockMover` -> `PeerBackend` -> `DataPlane` -> peers

docs/adr/0019-peer-connectors.md says why it is so.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstore.connector import KvConnectorWorker
from kvstore.jobs import ConnectorWork, LookupResult, TransferResults
from kvstore.layout import KvLayout
from kvstore.metrics import KvMetrics, TransferMetrics
from kvstore.mover.backend import Backend
from kvstore.mover.mover import BlockMover
from kvstore.peer.address import PeerAddress, PeerUrl
from kvstore.peer.lending import LendingSide, describe_layout
from kvstore.peer.open_reads import OpenReads, ReadCloser
from kvstore.peer.peers import Peers
from kvstore.peer.planes import DataPlane, GrpcPlane, PeerBackend, PullPlane, PushPlane
from kvstore.peer.renewals import Renewals
from kvstore.peer.settlements import Settlements
from kvstore.peer.transport import PeerTransport
from kvstore.transfer_form import WHOLE, BlockSlicing, HeadShare, TransferForm

if TYPE_CHECKING:
    from kvstore.mover.copies import BlockCopier

__all__ = ["PeerConnectorWorker"]

_GENERATION_BYTES = 16
# A load has two calls at most: one from a silent peer leaves threads for the others.
_NUM_IO_THREADS = 4

# Memory that peers may write to after its connector was closed: nobody else gets it.
_still_written_to: list[Any] = []


class PeerConnectorWorker(KvConnectorWorker):
    """One process's end of a peer connector; it listens from its construction on.

    Args:
        url: how.
        transport: what moves bytes, closed with the worker; None for grpc itself.
        make_copier: what copies the objects of a pool that is cut so.

    Raises:
        ConfigurationError: it cannot listen there.
    """

    def __init__(
        self,
        url: PeerUrl,
        transport: PeerTransport | None = None,
        make_copier: "Callable[[Any, BlockSlicing], BlockCopier] | None" = None,
    ) -> None:
        self._wake: Callable[[], None] = lambda: None
        self._transport = transport
        self._metrics: TransferMetrics | None = None
        self._answers: list[LookupResult] = []
        self._kept: Any = None  # of `_still_written_to`
        self._lending = LendingSide(
            url, os.urandom(_GENERATION_BYTES), transport, self._wake_engine
        )
        self._peers = Peers(transport)
        self._renewals = Renewals(self._peers, url.timeout_s)
        self._settlements = Settlements(self._wake_engine)
        self._closer = ReadCloser(self._peers)
        self._reads = OpenReads(self._closer)
        self._backend = PeerBackend(
            self._peers,
            self._open_plane(url.mode),
            self._renewals,
            self._lending.lender,
            url.timeout_s,
        )
        self._mover = BlockMover(
            self._backend, self._wake_engine, make_copier, _NUM_IO_THREADS, url.timeout_s
        )

    @property
    def address(self) -> PeerAddress:
        """What handoffs say of this process."""
        return self._lending.address

    def wrap_backend(self, wrap: Callable[[Backend], Backend]) -> None:
        """See `kvstore.faults.Faultable`."""
        self._mover.wrap_backend(wrap)

    def measure(self, metrics: KvMetrics, backend: str) -> None:
        """See `KvConnectorWorker.measure`."""
        counted = self._metrics = metrics.of(backend)
        self._mover.measure(counted)
        self._lending.metrics = self._renewals.metrics = counted
        counted.read_breakers = lambda: [("load", self._peers.breaker_counts)]

    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: HeadShare = WHOLE,
    ) -> None:
        """See `KvConnectorWorker.register_pool`."""
        cut = BlockSlicing.of(layout, form, share)
        self._mover.register_pool(pool, layout, form, share)
        self._backend.layout = describe_layout(cut.object_layout)
        self._reads.ranges_per_block = cut.max_runs
        self._lending.register_pool(pool, cut, self._mover.copier, self._mover.staging)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `KvConnectorWorker.set_waker`."""
        self._wake = wake

    def start(self, work: ConnectorWork) -> None:
        """See `KvConnectorWorker.start`. Nothing is found by key, and nothing deleted."""
        if work.lookups:
            self._answers += [LookupResult(lookup.job_id, 0) for lookup in work.lookups]
            self._wake()
        for handoff in work.kept:
            self._renewals.keep(handoff)
        for handoff_id in work.dropped:
            self._renewals.drop(handoff_id)
        to_gather = self._lending.start(work)
        self._mover.start(work.loads, to_gather, work.cancelled_loads)

    def poll(self) -> TransferResults:
        """See `KvConnectorWorker.poll`."""
        lookups, self._answers = tuple(self._answers), []
        loads, gathered = self._mover.poll()
        for load in loads:
            self._reads.end(load.job_id)
        saves, released = self._lending.poll()
        saves += [self._lending.lender.finish(result) for result in gathered]
        if self._metrics is not None:
            self._metrics.set_quarantined(self._mover.staging.num_quarantined)
            self._metrics.set_in_doubt(self._mover.num_in_doubt)
        doubted = tuple(self._mover.take_doubted())
        return TransferResults(lookups, tuple(loads), tuple(saves), tuple(released), doubted)

    def close(self) -> None:
        """See `KvConnectorWorker.close`."""
        self._peers.close()  # ends calls that the threads below wait for
        self._renewals.close()
        self._lending.close()
        has_ended = self._mover.close()
        self._closer.close()
        self._settlements.close()
        if self._settlements.num_open or self._mover.is_in_doubt or not has_ended:
            self._keep_memory()
        if self._transport is not None:
            self._transport.close()

    def _open_plane(self, mode: str) -> DataPlane:
        if self._transport is None:
            return GrpcPlane()
        if mode == "pull":
            return PullPlane(self._transport, self._settlements, self._reads)
        generation = self.address.generation
        return PushPlane(self._transport, self._settlements, self._peers, generation)

    def _keep_memory(self) -> None:
        if self._kept is None:
            self._kept = self._mover.memory
            _still_written_to.append(self._kept)

    def _wake_engine(self) -> None:
        self._wake()
