"""Loads that copy straight from where a store's objects lie into the pool."""

import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kvstore.codec import HEADER_BYTES, seal
from kvstore.connector import LoadJob, LoadResult
from kvstore.layout import KvLayout
from kvstore.registry import open_store
from kvstore.store import GetStatus, KvStore
from tests.support.connector_rig import ConnectorRig, keys

# 256 KiB a block, large enough to be mapped; 15 blocks fill a segment.
_LAYOUT = KvLayout(num_layers=4, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
_NUM_BLOCKS = 48
_SLOT_BYTES = HEADER_BYTES + _LAYOUT.block_bytes


@pytest.fixture(params=["memory", "shm"])
def store(request: pytest.FixtureRequest) -> Iterator[KvStore]:
    name = f"test-{uuid.uuid4().hex}"
    store = open_store(f"{request.param}://{name}?max_bytes=256MiB")
    yield store
    store.close()
    shutil.rmtree(f"/dev/shm/baton-{name}", ignore_errors=True)


@pytest.fixture
def rig(store: KvStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectorRig]:
    def refuse(*arguments: object) -> list[GetStatus]:
        pytest.fail("fetched into a segment")

    monkeypatch.setattr(store, "get_many_into", refuse)
    pool = torch.randn(_NUM_BLOCKS, *_LAYOUT.block_shape).to(torch.bfloat16)
    rig = ConnectorRig(store, pool=pool, layout=_LAYOUT)
    yield rig
    rig.worker.close()


def _put(
    store: KvStore, key: bytes, sealed_for: bytes | None, num_bytes: int = _SLOT_BYTES
) -> None:
    slot = memoryview(bytearray(num_bytes))
    if sealed_for is not None:
        seal(slot, sealed_for)
    store.put_many([key], [slot])


def _open_mappings(names: Sequence[str]) -> int:
    """Mappings of these objects in this process."""
    maps = Path("/proc/self/maps").read_text()
    return sum(maps.count(name) for name in names)


def test_blocks_come_back_as_they_were(rig: ConnectorRig) -> None:
    rig.save(range(20))

    assert rig.load(range(20, 40)) == LoadResult(1, 20)
    assert torch.equal(rig.pool[20:40], rig.pool[:20])


def test_a_missing_block_ends_the_prefix(rig: ConnectorRig) -> None:
    rig.save(range(4))
    rig.store.delete(keys(1, 2))
    before = rig.pool.clone()

    assert rig.load(range(20, 24)) == LoadResult(1, 2, "missing")
    assert torch.equal(rig.pool[20:22], before[:2])
    assert torch.equal(rig.pool[22:], before[22:])


@pytest.mark.parametrize(
    ("num_bytes", "sealed_for"),
    [
        (_SLOT_BYTES, b"f" * 32),
        (_SLOT_BYTES - 1, keys(1, 1)[0]),
        (_SLOT_BYTES + 1, keys(1, 1)[0]),
        (10, None),
    ],
    ids=["foreign", "shorter", "longer", "no header"],
)
def test_what_is_not_this_block_is_refused(
    rig: ConnectorRig, num_bytes: int, sealed_for: bytes | None
) -> None:
    rig.save(range(2))
    (wrong,) = keys(1, 1)
    rig.store.delete([wrong])
    _put(rig.store, wrong, sealed_for, num_bytes)
    before = rig.pool.clone()

    assert rig.load([10, 11, 12]) == LoadResult(1, 1, "corrupt")
    assert torch.equal(rig.pool[11:], before[11:])
    assert rig.store.contains_prefix([wrong]) == 0


def test_a_block_deleted_after_its_verification_is_loaded_whole(
    rig: ConnectorRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.save(range(8))
    scatter_views = rig.worker._mover.copier.scatter_views

    def delete_then_scatter(views: list[memoryview], block_ids: Sequence[int]) -> None:
        rig.store.delete(keys(8))
        for key in keys(8, 100):
            _put(rig.store, key, key)
        scatter_views(views, block_ids)

    monkeypatch.setattr(rig.worker._mover.copier, "scatter_views", delete_then_scatter)
    assert rig.load(range(20, 28)) == LoadResult(1, 8)
    assert torch.equal(rig.pool[20:28], rig.pool[:8])


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_mappings_end_with_the_load(rig: ConnectorRig, is_cancelled: bool) -> None:
    rig.save(range(20))
    before = rig.pool.clone()
    rig.start(loads=(LoadJob(1, keys(20), tuple(range(20, 40))),))
    if is_cancelled:
        rig.start(cancelled_loads=(1,))
    (result,) = rig.results(1)

    assert _open_mappings([key.hex() for key in keys(20)]) == 0
    if is_cancelled:
        assert isinstance(result, LoadResult)
        assert result.error == "cancelled"
        assert torch.equal(rig.pool, before)
