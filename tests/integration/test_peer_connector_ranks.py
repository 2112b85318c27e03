"""Peer connectors of engines of several ranks: each rank lends and reads its slices of blocks."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from kvstore.connector import SavedSlices
from kvstore.layout import KvLayout
from kvstore.peer.peers import Peer
from kvstore.peer.worker import PeerConnectorScheduler
from kvstore.transfer_form import BlockSlicing, PoolShare, TransferForm
from tests.support.pairs import pairs
from tests.support.peer_rig import MemoryTransport, PeerRig, random_pool

LAYOUT = KvLayout(num_layers=2, num_kv_heads=4, block_size=4, head_dim=8, dtype="float32")
NUM_BLOCKS = 48


@dataclass
class Engine:
    """The rigs of an engine's ranks, and the pool that they divide."""

    ranks: list[PeerRig]
    form: TransferForm

    def publish(self, num_blocks: int, num_tail_tokens: int = 0) -> None:
        """Lends blocks on all ranks, and makes the handoff that names them."""
        saved = []
        for rig, share in zip(self.ranks, shares(len(self.ranks)), strict=True):
            rig.publish(range(num_blocks), num_tail_tokens=num_tail_tokens)
            slicing = BlockSlicing.of(rig.layout, self.form, share)
            saved.append(SavedSlices(rig.scheduler.params, slicing.slice_numbers))
        scheduler = PeerConnectorScheduler("grpc", lease_s=30)
        scheduler.join_ranks(saved)
        handoff = self.ranks[0].handoff(num_blocks)
        self.handoff = replace(handoff, connector_params=scheduler.params)

    def load(self, lenders: "Engine", num_blocks: int) -> list[tuple[int, str]]:
        """Loads what another engine has published, which copies blocks out of its pools meanwhile.

        Returns:
            Each rank's number of blocks, and its error.
        """
        jobs = [rig.start_load(lenders.handoff, range(num_blocks)) for rig in self.ranks]

        def has_ended() -> bool:
            for rig in (*lenders.ranks, *self.ranks):
                rig.step()
            return all(job in rig.loads for job, rig in zip(jobs, self.ranks, strict=True))

        self.ranks[0].run_until(has_ended)
        results = [rig.loads[job] for job, rig in zip(jobs, self.ranks, strict=True)]
        return [(result.num_blocks, result.error) for result in results]

    @property
    def joined_pool(self) -> torch.Tensor:
        return torch.cat([rig.pool for rig in self.ranks], dim=3)


def shares(num_ranks: int) -> list[PoolShare]:
    return [PoolShare(rank, num_ranks) for rank in range(num_ranks)]


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    rigs: list[PeerRig] = []
    woken = threading.Event()  # one for all, as one thread steps them

    def make(
        num_ranks: int,
        form: TransferForm,
        pool: torch.Tensor | None = None,
        way: str = "grpc",
        options: str = "",
    ) -> Engine:
        pool = torch.zeros(NUM_BLOCKS, *LAYOUT.block_shape) if pool is None else pool
        own = []
        parts = pool.chunk(num_ranks, dim=3)
        for part, share in zip(parts, shares(num_ranks), strict=True):
            transport = None if way == "grpc" else MemoryTransport()
            if transport is not None:
                transport.obstacle = "a wall" if way == "unreadable" else ""
            url = f"{'grpc' if way == 'grpc' else 'nixl'}://?{options}"
            arguments = {"transport": transport, "form": form, "share": share}
            rig = PeerRig(url, share.layout_of(LAYOUT), pool=part.contiguous(), **arguments)
            rigs.append(rig)
            own.append(rig)
        for rig in own:
            rig.worker.set_waker(woken.set)
            rig.woken = woken
        return Engine(own, form)

    yield make
    for rig in rigs:
        rig.worker.close()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("num_lenders", "num_readers", "num_layer_slices", "way"),
    pairs((1, 2, 4), (1, 2, 4), (1, 2), ("grpc", "pull", "unreadable")),
)
def test_each_rank_reads_its_slices_from_the_ranks_that_lend_them(
    make_engine: MakeEngine, num_lenders: int, num_readers: int, num_layer_slices: int, way: str
) -> None:
    form = TransferForm(2, "float32", 4, num_layer_slices)
    pool = random_pool(NUM_BLOCKS, LAYOUT)
    prefill = make_engine(num_lenders, form, pool, way)
    decode = make_engine(num_readers, form, way=way)
    num_blocks = 2 * 21  # transfer blocks of half a pool block

    prefill.publish(num_blocks, num_tail_tokens=1)
    assert decode.load(prefill, num_blocks) == [(num_blocks, "")] * num_readers
    assert torch.equal(decode.joined_pool[:20], pool[:20])
    assert torch.equal(decode.joined_pool[20, ..., :3, :], pool[20, ..., :3, :])
    assert not decode.joined_pool[20, ..., 3:, :].any()
    assert not decode.joined_pool[21:].any()


FORM = TransferForm(4, "float32", 4)


def test_a_rank_calls_only_those_that_lend_its_slices(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = make_engine(4, FORM, random_pool(NUM_BLOCKS, LAYOUT))
    decode = make_engine(2, FORM)
    called: set[str] = set()
    ask = Peer.ask

    def recorded(peer: Peer, call: Callable[[], object]) -> object:
        called.add(peer.address.endpoint)
        return ask(peer, call)

    monkeypatch.setattr(Peer, "ask", recorded)
    prefill.publish(8)
    for rank, rig in enumerate(decode.ranks):
        called.clear()
        assert Engine([rig], FORM).load(prefill, 8) == [(8, "")]
        lenders = prefill.ranks[2 * rank : 2 * rank + 2]
        assert called == {lender.worker.address.endpoint for lender in lenders}


@pytest.mark.parametrize("way", ["grpc", "pull"])
def test_a_load_fails_if_one_of_the_ranks_has_ended(make_engine: MakeEngine, way: str) -> None:
    pool = random_pool(NUM_BLOCKS, LAYOUT)
    prefill, decode = make_engine(2, FORM, pool, way), make_engine(2, FORM, way=way)
    whole = make_engine(1, FORM, way=way)
    prefill.publish(8)
    prefill.ranks[1].worker.close()
    assert decode.load(prefill, 8) == [(8, ""), (0, "unavailable")]
    assert whole.load(prefill, 8) == [(0, "unavailable")]


def test_blocks_are_missing_if_the_lease_of_one_rank_is_over(make_engine: MakeEngine) -> None:
    prefill = make_engine(2, FORM, random_pool(NUM_BLOCKS, LAYOUT))
    whole = make_engine(1, FORM)
    prefill.publish(8)
    prefill.ranks[1].end("lease")
    assert whole.load(prefill, 8) == [(0, "missing")]


@pytest.mark.parametrize("way", ["grpc", "pull"])
def test_reads_of_all_lenders_are_closed_with_their_load(make_engine: MakeEngine, way: str) -> None:
    prefill = make_engine(2, FORM, random_pool(NUM_BLOCKS, LAYOUT), way)
    whole = make_engine(1, FORM, way=way)
    prefill.publish(8)
    assert whole.load(prefill, 8) == [(8, "")]
    for rig in prefill.ranks:
        rig.end("lease")
        rig.run_until(lambda rig=rig: len(rig.released) == 1)
