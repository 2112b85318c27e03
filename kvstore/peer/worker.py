"""`PeerConnectorWorker`: lends blocks of its pool to peers, and loads blocks of theirs.

    lending   save jobs -> `Lender` -> `LeaseTable` <- `PeerServicer` <- readers
    reading   load jobs -> `BlockMover` -> `PeerBackend` -> `DataPlane` -> peers

docs/adr/0019-peer-connectors.md says why.

`open_peer_connector`: from a `grpc://` or `nixl://` URL to both halves of the connector.
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from baton.common.security.cluster import ClusterSecurity
from kvstore.connector import KvConnectorScheduler, KvConnectorWorker, SavedSlices
from kvstore.guard.metrics import KvMetrics, TransferMetrics
from kvstore.guard.status import BackendStatus
from kvstore.jobs import ConnectorWork, LookupResult, TransferResults
from kvstore.layout import KvLayout
from kvstore.mover.backend import Backend
from kvstore.mover.mover import BlockMover
from kvstore.peer.address import PeerAddress, PeerUrl, join_params
from kvstore.peer.lending import LendingSide, describe_layout
from kvstore.peer.open_reads import OpenReads, ReadCloser
from kvstore.peer.peers import Peers
from kvstore.peer.planes import DataPlane, GrpcPlane, PeerBackend, PullPlane
from kvstore.peer.renewals import Renewals
from kvstore.peer.transport import PeerTransport, SettlementWatch
from kvstore.transfer_form import WHOLE, BlockSlicing, PoolShare, TransferForm

if TYPE_CHECKING:
    from kvstore.mover.copies import BlockCopier

__all__ = ["PeerConnectorWorker", "open_peer_connector"]

_GENERATION_BYTES = 16
# A load makes two calls at most: one from a silent peer leaves threads for the others.
_NUM_IO_THREADS = 4

# Memory that something may write to after its connector was closed: it is never freed.
_still_written_to: list[Any] = []


class PeerConnectorWorker(KvConnectorWorker):
    """One process's end of a peer connector. It listens from its construction on.

    Args:
        url: where to listen, and all options.
        transport: reads peers' memory, and is closed with the worker; None for `grpc://`.
        make_copier: makes what copies objects between the pool and segments.

    Raises:
        ConfigurationError: it cannot listen there.
    """

    def __init__(
        self,
        url: PeerUrl,
        transport: PeerTransport | None = None,
        make_copier: "Callable[[Any, BlockSlicing], BlockCopier] | None" = None,
        security: ClusterSecurity | None = None,
    ) -> None:
        security = security or ClusterSecurity()
        self._wake: Callable[[], None] = lambda: None
        self._scheme = url.scheme
        self._transport = transport
        self._metrics: TransferMetrics | None = None
        self._answers: list[LookupResult] = []
        self._kept: Any = None  # this worker's entry in `_still_written_to`
        self._lending = LendingSide(
            url, os.urandom(_GENERATION_BYTES), transport, self._wake_engine, security
        )
        self._peers = Peers(transport, security)
        self._renewals = Renewals(self._peers, url.timeout_s)
        self._settlements = SettlementWatch(self._wake_engine)
        self._closer = ReadCloser(self._peers)
        self._reads = OpenReads(self._closer)
        self._backend = PeerBackend(
            self._peers, self._open_plane(), self._renewals, self._lending.lender, url.timeout_s
        )
        self._mover = BlockMover(
            self._backend, self._wake_engine, make_copier, _NUM_IO_THREADS, url.timeout_s
        )

    @property
    def address(self) -> PeerAddress:
        """The address that handoffs carry."""
        return self._lending.address

    def wrap_backend(self, wrap: Callable[[Backend], Backend]) -> None:
        """Puts something between the mover and its backend; see `kvstore.faults.Faultable`."""
        self._mover.wrap_backend(wrap)

    @override
    def measure(self, metrics: KvMetrics, backend: str) -> None:
        counted = self._metrics = metrics.of(backend)
        self._mover.measure(counted)
        self._lending.metrics = self._renewals.metrics = counted
        counted.read_breakers = lambda: [("load", self._peers.breaker_counts)]

    @property
    @override
    def statuses(self) -> Sequence[BackendStatus]:
        """Its own state, then that of the peers that do not answer."""
        lender = BackendStatus(f"{self._scheme}://{self.address.endpoint}")
        return [lender, *self._peers.problems]

    @override
    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        cut = BlockSlicing.of(layout, form, share)
        self._mover.register_pool(pool, layout, form, share)
        self._backend.layout = describe_layout(cut.object_layout)
        self._backend.slices = self._renewals.slices = cut.slice_numbers
        self._reads.ranges_per_block = cut.max_runs
        self._lending.register_pool(pool, cut, self._mover.copier, self._mover.staging)

    @override
    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @override
    def start(self, work: ConnectorWork) -> None:
        """Starts the work. Look-ups find nothing, and deletes do nothing: leases alone count."""
        if work.lookups:
            self._answers += [LookupResult(lookup.job_id, 0) for lookup in work.lookups]
            self._wake()
        for handoff in work.kept:
            self._renewals.keep(handoff)
        for handoff_id in work.dropped:
            self._renewals.drop(handoff_id)
        to_gather = self._lending.start(work)
        self._mover.start(work.loads, to_gather, work.cancelled_loads)

    @override
    def poll(self) -> TransferResults:
        lookups, self._answers = tuple(self._answers), []
        loads, gathered = self._mover.poll()
        for load in loads:
            self._reads.end(load.job_id)
        saves, released = self._lending.poll()
        saves += [self._lending.lender.finish(result) for result in gathered]
        if self._metrics is not None:
            self._metrics.set_in_doubt(self._mover.num_in_doubt)
        doubted = tuple(self._mover.take_doubted())
        return TransferResults(lookups, tuple(loads), tuple(saves), tuple(released), doubted)

    @override
    def close(self) -> None:
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

    def _open_plane(self) -> DataPlane:
        if self._transport is None:
            return GrpcPlane()
        return PullPlane(self._transport, self._settlements, self._reads)

    def _keep_memory(self) -> None:
        if self._kept is None:
            self._kept = self._mover.memory
            _still_written_to.append(self._kept)

    def _wake_engine(self) -> None:
        self._wake()


class PeerConnectorScheduler(KvConnectorScheduler):
    """The scheduler half, whose handoffs name the processes that lend their blocks."""

    @override
    def join_ranks(self, ranks: Sequence[SavedSlices]) -> None:
        self.params = join_params(ranks)


def open_peer_connector(
    url: str, security: ClusterSecurity | None = None, rank: int = 0
) -> tuple[KvConnectorScheduler, KvConnectorWorker]:
    """Opens both halves, and listens.

    Args:
        url: the connector's.
        security: for calls between peers.
        rank: number of this process among the ranks of its engine.

    Raises:
        ConfigurationError: the URL is wrong, the port is in use, or a package is missing.
    """
    peer_url = PeerUrl.parse(url).of_rank(rank)
    transport = _open_transport(peer_url.scheme)
    try:
        worker = PeerConnectorWorker(peer_url, transport, security=security)
    except BaseException:
        if transport is not None:
            transport.close()
        raise
    scheduler = PeerConnectorScheduler(
        peer_url.scheme,
        lease_s=peer_url.lease_s,
        finds_by_key=False,
        params=worker.address.to_params(peer_url.scheme),
    )
    return scheduler, worker


def _open_transport(scheme: str) -> PeerTransport | None:
    """Returns the transport that reads peers' memory; None for `grpc://`."""
    if scheme == "grpc":
        return None
    from kvstore.peer.nixl.transport import NixlTransport

    return NixlTransport()
