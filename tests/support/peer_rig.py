"""One end of a peer connector with a pool of random blocks, driven as an engine does."""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

import torch

from kvstore.connector import LoadResult, SaveResult, TransferResults
from kvstore.handoff import KvHandoff
from kvstore.job_scheduler import JobScheduler
from kvstore.layout import KvLayout
from kvstore.peer.address import PeerUrl
from kvstore.peer.transport import (
    PeerTransport,
    RangeTable,
    TransferError,
    UnreadablePeerError,
)
from kvstore.peer.worker import PeerConnectorWorker, open_peer_connector
from kvstore.transfer_form import TransferForm
from tests.support.connector_rig import keys

__all__ = ["LAYOUT", "TIMEOUT_S", "MemoryTransport", "PeerRig", "random_pool"]

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, block_size=4, head_dim=8, dtype="float32")
TIMEOUT_S = 20.0
NAMESPACE = b"n" * 32


def random_pool(num_blocks: int, layout: KvLayout, seed: int = 0) -> torch.Tensor:
    """Bytes that are all numbers: no NaN, so that equal bytes are equal numbers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, *layout.block_shape)
    if layout.has_scales:
        return torch.randint(0, 100, shape, dtype=torch.uint8, generator=generator)
    return torch.randn(shape, generator=generator).to(getattr(torch, layout.dtype))


class PeerRig:
    """Both halves of a connector over one URL, and the pool."""

    def __init__(
        self,
        url: str = "grpc://",
        layout: KvLayout = LAYOUT,
        num_blocks: int = 64,
        transport: PeerTransport | None = None,
        form: TransferForm | None = None,
        pool: torch.Tensor | None = None,
    ) -> None:
        opened = open_peer_connector(url) if transport is None else _open(url, transport)
        self.scheduler, self.worker = opened
        self.pool = random_pool(num_blocks, layout) if pool is None else pool
        self.woken = threading.Event()
        self.worker.set_waker(self.woken.set)
        self.worker.register_pool(self.pool, layout, form)
        self.saves: dict[int, SaveResult] = {}
        self.loads: dict[int, LoadResult] = {}
        self.released: list[int] = []

    def step(self) -> None:
        """Starts what the scheduler half has gathered, and takes results in."""
        if work := self.scheduler.build_work():
            self.worker.start(work)
        results: TransferResults = self.worker.poll()
        self.scheduler.update(results)
        for save in results.saves:
            assert self.saves.setdefault(save.job_id, save) is save, "one result"
        for load in results.loads:
            assert self.loads.setdefault(load.job_id, load) is load, "one result"
        for job_id in results.released:
            assert self.saves[job_id].is_held, "only what is held, and after its result"
            assert job_id not in self.released, "once"
            self.released.append(job_id)

    def run_until(self, is_over: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        give_up_at = time.monotonic() + timeout_s
        self.step()
        while not is_over():
            assert time.monotonic() < give_up_at, (self.saves, self.loads, self.released)
            self.woken.wait(0.02)
            self.woken.clear()
            self.step()

    def publish(
        self,
        block_ids: Sequence[int],
        lease_id: str = "lease",
        first_key: int = 0,
        num_tail_tokens: int = 0,
    ) -> int:
        """Lends blocks and offers them; returns the job."""
        job_id = self.scheduler.save(
            keys(len(block_ids), first_key), block_ids, num_tail_tokens, lease_id=lease_id
        )
        self.run_until(lambda: job_id in self.saves)
        self.scheduler.offer(lease_id)
        self.step()
        return job_id

    def handoff(self, num_blocks: int, lease_id: str = "lease", first_key: int = 0) -> KvHandoff:
        return self.scheduler.make_handoff(
            lease_id, NAMESPACE, keys(num_blocks, first_key), num_blocks * LAYOUT.block_size
        )

    def start_load(self, handoff: KvHandoff, block_ids: Sequence[int]) -> int:
        return self.scheduler.load(handoff.block_keys[: len(block_ids)], block_ids, handoff)

    def load(self, handoff: KvHandoff, block_ids: Sequence[int]) -> LoadResult:
        job_id = self.start_load(handoff, block_ids)
        self.run_until(lambda: job_id in self.loads)
        return self.loads[job_id]

    def end(self, *lease_ids: str) -> None:
        for lease_id in lease_ids:
            self.scheduler.end_lease(lease_id)
        self.step()


def _open(url: str, transport: PeerTransport) -> tuple[JobScheduler, PeerConnectorWorker]:
    peer_url = PeerUrl.parse(url)
    worker = PeerConnectorWorker(peer_url, transport)
    params = worker.address.to_params(peer_url.scheme)
    lease_s = peer_url.lease_s
    return JobScheduler("nixl", lease_s=lease_s, finds_by_key=False, params=params), worker


class MemoryTransport(PeerTransport):
    """Copies between rigs of one process.

    Attributes:
        fault: called before each copy.
        settled: whether copies that failed can write no more.
        obstacle: why peers cannot be read; empty if they can.
        connected: ids of peers in the order of `add_peer`, readable or not.
        removed: ids of peers that were removed.
        allowed_s: the timeout of each copy.
        num_moved: ranges copied.
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

    def remove_peer(self, peer_id: str) -> Callable[[], bool]:
        if self.peers.pop(peer_id, None):
            self.removed.append(peer_id)
        return lambda: self.settled

    def read(
        self, peer_id: str, sources: RangeTable, targets: RangeTable, timeout_s: float
    ) -> None:
        if peer_id not in self.peers:
            raise TransferError("unknown peer", is_settled=True)
        self.allowed_s.append(timeout_s)
        self.fault()
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            assert source[1:] == target[1:]
            self._check(peer_id, source, target)
            ctypes.memmove(target[0], *source[:2])
            self.num_moved += 1

    def close(self) -> None:
        self.is_closed = True

    def _check(self, peer_id: str, *ranges: list[int]) -> None:
        """Only what either side has registered may be touched."""
        known = [*self.registered, *eval(self.peers[peer_id])]
        for address, num_bytes, _ in ranges:
            end = address + num_bytes
            assert any(start <= address and end <= start + size for start, size in known)
