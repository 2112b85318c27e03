"""The store connector's worker with a transfer form that differs from the pool's blocks."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvstore.jobs import LoadResult, LookupJob, LookupResult, SaveJob, SaveResult
from kvstore.layout import KvLayout, StateLayout, StatePart
from kvstore.mover import mover, staging
from kvstore.mover.piece_io import PieceIo
from kvstore.registry import open_store
from kvstore.transfer_form import WHOLE, BlockSlicing, PoolShare, TransferForm
from tests.support.connector_rig import ConnectorRig, keys

LAYOUT = KvLayout(num_layers=2, num_kv_heads=4, block_size=8, head_dim=4, dtype="float32")
NUM_BLOCKS = 32
MakeRig = Callable[..., ConnectorRig]


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    """Makes rigs on one store, with pieces of few objects, in segments and in place."""
    monkeypatch.setattr(staging, "_SEGMENT_BYTES", 2000)
    monkeypatch.setattr(mover, "_MIN_PIECE_BYTES", 2000)
    rigs: list[ConnectorRig] = []

    def make(
        form: TransferForm, layout: KvLayout = LAYOUT, share: PoolShare = WHOLE
    ) -> ConnectorRig:
        pool = torch.randn(NUM_BLOCKS, *layout.block_shape).to(getattr(torch, layout.dtype))
        store = open_store(f"memory://{tmp_path.name}")
        rigs.append(ConnectorRig(store, pool=pool, layout=layout, form=form, share=share))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.worker.close()


def test_all_slices_of_a_partial_tail_are_cleared_in_whichever_piece_they_are(
    make_rig: MakeRig,
) -> None:
    form = TransferForm(4, "float32", num_head_slices=4)
    rig = make_rig(form)
    rig.save([3, 8], num_tail_tokens=3)
    assert rig.load([20, 41]) == LoadResult(1, 2)
    assert torch.equal(rig.pool[10, ..., :4, :], rig.pool[1, ..., 4:, :])
    assert torch.equal(rig.pool[20, ..., 4:7, :], rig.pool[4, ..., :3, :])
    assert not rig.pool[20, ..., 7:, :].any()


@pytest.mark.parametrize(
    ("form", "count", "move", "num_pieces"),
    [
        (TransferForm(2, "bfloat16", num_head_slices=2), 30, "read", 4),  # 128 bytes each
        (TransferForm(8, "float32"), 16, "read_in_place", 4),  # 2048 bytes each
    ],
)
def test_jobs_of_many_pieces_report_their_number_of_blocks(
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    form: TransferForm,
    count: int,
    move: str,
    num_pieces: int,
) -> None:
    rig, moved = make_rig(form), []
    read = getattr(PieceIo, move)
    monkeypatch.setattr(PieceIo, move, lambda *args: moved.append(1) or read(*args))
    rig.save(range(count))
    half, parts = NUM_BLOCKS // 2, LAYOUT.block_size // form.block_size
    assert rig.load(range(half * parts, half * parts + count)) == LoadResult(1, count)
    num_whole = count // parts
    sent = rig.pool[:num_whole].to(getattr(torch, form.dtype)).float()
    assert torch.equal(rig.pool[half : half + num_whole], sent)
    assert len(moved) == num_pieces


@pytest.mark.parametrize(
    "form",
    [
        TransferForm(8, "float32", num_layer_slices=2),  # in place
        TransferForm(4, "fp8_e4m3", 4, 2),
    ],
    ids=str,
)
def test_states_arrive_bit_for_bit_beside_blocks_of_any_form(
    make_rig: MakeRig, form: TransferForm
) -> None:
    states = StateLayout(4, (StatePart("a", 4, 33, "bfloat16"), StatePart("b", 8, 5, "float32")))
    form, share = replace(form, states=states), PoolShare(num_blocks=20)
    slots = BlockSlicing(LAYOUT, form, share).slots
    assert slots is not None
    whole, reader = make_rig(form, share=share), make_rig(form, share=share)
    sent, arrived = (_slots(rig, slots) for rig in (whole, reader))
    for memory in (sent, arrived):
        memory.copy_(torch.randint(256, memory.shape, dtype=torch.uint8))
    expected = arrived.clone()
    expected[[0, 2]] = sent[[3, 1]]
    parts, blocks = LAYOUT.block_size // form.block_size, reader.pool[:20].clone()

    def units(slot: int) -> range:
        first = 20 * parts + slot * slots.units
        return range(first, first + slots.units)

    whole.save([0, *units(3), 1, *units(1), 2])
    count = 3 + 2 * slots.units
    assert reader.load([4, *units(0), 5, *units(2), 6]) == LoadResult(1, count)
    assert torch.equal(arrived, expected)
    untouched = [*range(4 // parts), *range(6 // parts + 1, 20)]
    assert torch.equal(reader.pool[untouched], blocks[untouched])


def _slots(rig: ConnectorRig, slots: StateLayout) -> torch.Tensor:
    """Returns the bytes of the slots behind 20 blocks, `[num_slots, slot_bytes]`: a view."""
    region = rig.pool[20:].view(-1).view(torch.uint8)
    return region[: len(region) // slots.slot_bytes * slots.slot_bytes].view(-1, slots.slot_bytes)


def test_one_rank_loads_what_two_ranks_saved(make_rig: MakeRig) -> None:
    form, half = TransferForm(4, "float32", 2), replace(LAYOUT, num_kv_heads=2)
    first, second = (make_rig(form, half, PoolShare(rank, 2)) for rank in (0, 1))
    reader = make_rig(form)
    first.save(range(6))
    reader.start(lookups=(LookupJob(7, keys(6)),))
    assert reader.results(1) == [LookupResult(7, 0)], "a block with half of its heads is not found"
    assert reader.load(range(20, 26)) == LoadResult(1, 0, "missing")
    second.save(range(4))
    reader.start(lookups=(LookupJob(7, keys(6)),))
    assert reader.results(1) == [LookupResult(7, 4)]
    assert reader.load(range(20, 26)) == LoadResult(1, 4, "missing")
    assert torch.equal(reader.pool[10:12], torch.cat([first.pool[:2], second.pool[:2]], dim=3))


def test_two_ranks_load_what_one_rank_saved(make_rig: MakeRig) -> None:
    form, half = TransferForm(8, "float32", 4), replace(LAYOUT, num_kv_heads=2)
    whole = make_rig(form)
    whole.save(range(6))
    for rank in (0, 1):
        reader = make_rig(form, half, PoolShare(rank, 2))
        assert reader.load(range(9, 15)) == LoadResult(1, 6)
        assert torch.equal(reader.pool[9:15], whole.pool[:6].chunk(2, dim=3)[rank])


def test_a_delete_removes_every_slice_of_a_block(make_rig: MakeRig) -> None:
    rig = make_rig(TransferForm(8, "float32", 2))
    rig.save([0])
    assert rig.store.stats().num_objects == 2
    rig.start(deletes=keys(1))
    rig.start(lookups=(LookupJob(7, keys(1)),))
    assert rig.results(1) == [LookupResult(7, 0)]
    assert rig.store.stats().num_objects == 0


def test_blocks_found_in_the_store_are_not_put_again(make_rig: MakeRig) -> None:
    rig = make_rig(TransferForm(4, "float32", 2))
    rig.save(range(3))
    puts = rig.store.stats().puts
    rig.start(saves=(SaveJob(3, keys(4), (0, 1, 2, 3), num_found=3),))
    assert rig.results(1) == [SaveResult(3, committed=True)]
    assert rig.store.stats().puts == puts + 2


def test_numbers_that_the_form_cannot_hold_are_not_published(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(TransferForm(4, "float16"))
    rig.pool[1, 0, 0, 0, 6, 0] = 1e6
    with caplog.at_level(logging.WARNING):
        rig.start(saves=(SaveJob(0, keys(6), tuple(range(6))),))
        assert rig.results(1) == [SaveResult(0, committed=False, error="failed")]
    assert "cannot hold" in caplog.text
    rig.save([0, 1, 2], first_key=20)  # the form can hold the other tokens


def test_numbers_that_the_pool_cannot_hold_are_not_loaded(make_rig: MakeRig) -> None:
    form = TransferForm(8, "float32")
    writer, reader = make_rig(form), make_rig(form, replace(LAYOUT, dtype="float16"))
    writer.pool[4, 1, 1, 3, 7, 3] = -1e6
    writer.save(range(6))
    result = reader.load(range(10, 16))
    assert result.num_blocks <= 4
    assert result.error == "failed"
    assert torch.equal(
        reader.pool[10 : 10 + result.num_blocks], writer.pool[: result.num_blocks].half()
    )
