"""`LendingSide`: everything by which one process lends blocks: leases, server, sweeper.

`Sweeper`: ends leases and reads on time.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.common.addresses import join_host_port
from baton.common.security.cluster import ClusterSecurity
from kvstore.guard.metrics import TransferMetrics
from kvstore.jobs import ConnectorWork, SaveJob, SaveResult
from kvstore.layout import LAYOUT_VERSION, KvLayout
from kvstore.peer.address import PeerAddress, PeerUrl
from kvstore.peer.leases import LeaseTable
from kvstore.peer.lender import Lender
from kvstore.peer.service import Lending, PeerServer, PeerServicer
from kvstore.peer.transport import PeerTransport
from kvstore.transfer_form import BlockSlicing

if TYPE_CHECKING:
    from kvstore.mover.copies import BlockCopier
    from kvstore.mover.staging import StagingBuffers
    from kvstore.peer.lent_memory import CopyRequests, LentMemory, TailSlots

__all__ = ["LendingSide", "Sweeper", "describe_layout"]

_NUM_GATHER_SEGMENTS = 2

_logger = logging.getLogger("baton.kvstore")


class LendingSide:
    """Listens from its construction on, and lends once the pool is registered.

    Args:
        url: where to listen, and how long to lend.
        generation: random id of this process's start.
        transport: reads this process's memory for peers; None for `grpc://`.
        wake: called, from any thread, when `poll` has something to return or to do.
        security: what readers must show, and the port's certificate.

    Attributes:
        address: the address that handoffs carry.
        lender: lends the blocks of save jobs.
        metrics: counts expired leases; may be set until the first job.

    Raises:
        ConfigurationError: it cannot listen there.
    """

    def __init__(
        self,
        url: PeerUrl,
        generation: bytes,
        transport: PeerTransport | None,
        wake: Callable[[], None],
        security: ClusterSecurity,
    ) -> None:
        self.metrics: TransferMetrics | None = None
        self._transport = transport
        self._wake = wake
        self._leases = LeaseTable(url.lease_s, time.monotonic)
        self.lender = Lender(self._leases, wake)
        name = transport.name if transport is not None else "grpc"
        self._servicer = PeerServicer(generation, name, self._leases, url.timeout_s, wake)
        address = join_host_port(url.host, url.port)
        self._server = PeerServer(address, self._servicer, security)
        endpoint = join_host_port(url.advertised_host, self._server.port)
        self.address = PeerAddress(endpoint, generation)
        self._sweeper = Sweeper(self._leases, min(url.timeout_s, url.lease_s), self._after_sweep)
        self._copy_requests: CopyRequests | None = None

    def register_pool(
        self, pool: Any, cut: BlockSlicing, copier: "BlockCopier", staging: "StagingBuffers"
    ) -> None:
        """Lends blocks of this pool from now on."""
        from kvstore.peer.lent_memory import TailSlots

        num_objects = cut.objects_in(len(pool))
        tails = TailSlots(cut.object_layout, num_objects, cut.objects_per_block)
        memory = self._memory_of(pool, cut, tails)
        self.lender.register(memory, cut)
        self._copier = copier
        self._servicer.lend(self._lending(pool, cut, memory, staging))

    def start(self, work: ConnectorWork) -> list[SaveJob]:
        """Starts saves, offers and ends leases; returns saves whose blocks must be gathered."""
        to_gather = self.lender.start(work.saves)
        self._leases.offer(work.offered)
        self._leases.end(work.ended)
        if self._leases.has_released:
            self._wake()
        return to_gather

    def poll(self) -> tuple[list[SaveResult], list[int]]:
        """Returns saves that have ended, and jobs whose blocks are lent no longer.

        Also starts the copies that other threads requested. Engine thread only.
        """
        if self._copy_requests is not None:
            self._copy_requests.start_copies(self._copier)
        return self.lender.poll()

    def close(self) -> None:
        """Ends all leases and all reads. Idempotent."""
        if self._copy_requests is not None:
            self._copy_requests.close()
        self._leases.end_all()
        self._server.close()
        self._sweeper.close()
        self.lender.close()

    def _memory_of(self, pool: Any, cut: BlockSlicing, tails: "TailSlots") -> "LentMemory":
        from kvstore.mover.pool_objects import as_objects
        from kvstore.mover.staging import Segment
        from kvstore.peer.lent_memory import CopyRequests, GatheredMemory, HostMemory

        if cut.is_native and pool.device.type == "cpu":
            return HostMemory(as_objects(pool, cut), tails)
        self._copy_requests = CopyRequests(self._wake)
        pinned = pool.device.type == "cuda"
        segments = [Segment(cut.object_layout, pinned=pinned) for _ in range(_NUM_GATHER_SEGMENTS)]
        return GatheredMemory(self._copy_requests, segments, tails)

    def _lending(
        self, pool: Any, cut: BlockSlicing, memory: "LentMemory", staging: "StagingBuffers"
    ) -> Lending:
        layout = describe_layout(cut.object_layout)
        transport = self._transport
        if transport is None:
            return Lending(layout, memory)
        from kvstore.peer.locations import LentRanges

        ranges = LentRanges(pool, cut, memory.tails, transport)
        for segment in staging.segments:
            frames = segment.frames
            transport.register(frames.data_ptr(), frames.nbytes, device="cpu")
        return Lending(layout, memory, ranges, transport.metadata())

    def _after_sweep(self, num_expired: int) -> None:
        if num_expired:
            _logger.warning("%d KV leases ran out before they were released", num_expired)
            if self.metrics is not None:
                self.metrics.leases_expired(num_expired)
        if self._leases.has_released:
            self._wake()


def describe_layout(layout: KvLayout) -> str:
    """Returns the form of a block in words, which must be the same for lender and reader."""
    vectors = "heads" if layout.num_parts > 1 else "latent vectors"
    return (
        f"{layout.num_layers} layers, {layout.num_kv_heads} {vectors} of {layout.head_dim}, "
        f"{layout.block_size} tokens per block, {layout.dtype}, layout {LAYOUT_VERSION}"
    )


class Sweeper:
    """A thread that sleeps until the next lease or read runs out, and ends it.

    Args:
        leases: the table to sweep.
        longest_s: longest sleep: leases and reads that begin meanwhile last longer than that.
        on_swept: called after each sweep with the number of leases that ran out.
    """

    def __init__(
        self, leases: LeaseTable, longest_s: float, on_swept: Callable[[int], None]
    ) -> None:
        self._leases = leases
        self._longest_s = longest_s
        self._on_swept = on_swept
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-kv-leases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        wait_s = self._longest_s
        while not self._closed.wait(wait_s):
            self._on_swept(self._leases.sweep())
            deadline = self._leases.next_deadline
            wait_s = self._longest_s
            if deadline is not None:
                wait_s = max(0.0, min(wait_s, deadline - time.monotonic()))
