"""One end of a peer connector with a pool of random blocks, and an in-memory transport."""

import ctypes
from collections.abc import Callable, Sequence

import torch

from baton.common.security.cluster import ClusterSecurity
from kvstore.connector import KvConnectorScheduler
from kvstore.driver import ConnectorDriver
from kvstore.handoff import KvHandoff
from kvstore.layout import KvLayout
from kvstore.peer.address import PeerUrl
from kvstore.peer.transport import (
    PeerTransport,
    RangeTable,
    TransferError,
    UnreadablePeerError,
)
from kvstore.peer.worker import PeerConnectorWorker, open_peer_connector
from kvstore.transfer_form import WHOLE, PoolShare, TransferForm
from tests.support.connector_rig import keys

__all__ = ["LAYOUT", "TIMEOUT_S", "MemoryTransport", "PeerRig", "random_pool"]

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, block_size=4, head_dim=8, dtype="float32")
TIMEOUT_S = 20.0
NAMESPACE = b"n" * 32


def random_pool(num_blocks: int, layout: KvLayout, seed: int = 0) -> torch.Tensor:
    """Returns a random pool without NaN, so that equal bytes are equal numbers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, *layout.block_shape)
    if layout.has_scales:
        return torch.randint(0, 100, shape, dtype=torch.uint8, generator=generator)
    return torch.randn(shape, generator=generator).to(getattr(torch, layout.dtype))


class PeerRig(ConnectorDriver):
    """A driver of one end of a peer connector, with numbered keys."""

    def __init__(
        self,
        url: str = "grpc://",
        layout: KvLayout = LAYOUT,
        num_blocks: int = 64,
        transport: PeerTransport | None = None,
        form: TransferForm | None = None,
        pool: torch.Tensor | None = None,
        security: ClusterSecurity | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        opened = open_peer_connector(url, security) if transport is None else _open(url, transport)
        if pool is None:
            pool = random_pool(num_blocks, layout)
        super().__init__(opened, pool, layout, form, share, timeout_s=TIMEOUT_S)

    def publish(
        self,
        block_ids: Sequence[int],
        lease_id: str = "lease",
        first_key: int = 0,
        num_tail_tokens: int = 0,
    ) -> int:
        """Lends blocks and offers them; returns the save job's id."""
        job_id = self.start_save(
            keys(len(block_ids), first_key), block_ids, num_tail_tokens, lease_id
        )
        self.run_until(lambda: job_id in self.saves, "a save")
        self.scheduler.offer(lease_id)
        self.step()
        return job_id

    def handoff(self, num_blocks: int, lease_id: str = "lease", first_key: int = 0) -> KvHandoff:
        return self.scheduler.make_handoff(
            lease_id, NAMESPACE, keys(num_blocks, first_key), num_blocks * LAYOUT.block_size
        )

    def end(self, *lease_ids: str) -> None:
        for lease_id in lease_ids:
            self.scheduler.end_lease(lease_id)
        self.step()


def _open(url: str, transport: PeerTransport) -> tuple[KvConnectorScheduler, PeerConnectorWorker]:
    peer_url = PeerUrl.parse(url)
    worker = PeerConnectorWorker(peer_url, transport)
    params = worker.address.to_params(peer_url.scheme)
    lease_s = peer_url.lease_s
    return KvConnectorScheduler("nixl", lease_s=lease_s, finds_by_key=False, params=params), worker


class MemoryTransport(PeerTransport):
    """Copies between rigs of one process.

    Attributes:
        fault: called before each copy; may raise.
        settled: whether failed copies have stopped writing.
        obstacle: why peers cannot be read; empty if they can.
        connected: ids of peers in the order of `add_peer`, readable or not.
        removed: ids of peers that were removed.
        allowed_s: timeout of each copy.
        num_moved: number of ranges copied.
    """

    name = "memory"

    def __init__(self, fault: Callable[[], None] = lambda: None) -> None:
        self.fault = fault
        self.settled = True
        self.obstacle = ""
        self.registered: list[tuple[int, int]] = []
        self.peers: dict[str, bytes] = {}
        self.connected: list[str] = []
        self.removed: list[str] = []
        self.allowed_s: list[float] = []
        self.num_moved = 0
        self.is_closed = False

    def register(self, address: int, num_bytes: int, *, device: str) -> None:
        assert device == "cpu"
        self.registered.append((address, num_bytes))

    def metadata(self) -> bytes:
        return repr(self.registered).encode()

    def add_peer(self, peer_id: str, metadata: bytes, timeout_s: float) -> None:
        self.connected.append(peer_id)
        if self.obstacle:
            raise UnreadablePeerError(self.obstacle, f"tried as number {len(self.connected)}")
        self.peers[peer_id] = metadata

    def remove_peer(self, peer_id: str) -> None:
        if self.peers.pop(peer_id, None):
            self.removed.append(peer_id)

    def settlement(self) -> Callable[[], bool]:
        return lambda: self.settled

    def read(
        self, peer_id: str, sources: RangeTable, targets: RangeTable, timeout_s: float
    ) -> None:
        if peer_id not in self.peers:
            raise TransferError("unknown peer", is_settled=True)
        self.allowed_s.append(timeout_s)
        try:
            self.fault()
        except TransferError:
            self.remove_peer(peer_id)
            raise
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            assert source[1:] == target[1:]
            self._check(peer_id, source, target)
            ctypes.memmove(target[0], *source[:2])
            self.num_moved += 1

    def close(self) -> None:
        self.is_closed = True

    def _check(self, peer_id: str, *ranges: list[int]) -> None:
        """Asserts that the ranges lie in memory that either side has registered."""
        known = [*self.registered, *eval(self.peers[peer_id])]
        for address, num_bytes, _ in ranges:
            end = address + num_bytes
            assert any(start <= address and end <= start + size for start, size in known)
