"""The size of pieces that are copied in place, and copies of large ones."""

import shutil
import uuid
from collections.abc import Iterator, Sequence

import pytest
import torch

from kvstore.jobs import LoadJob, LoadResult
from kvstore.layout import KvLayout
from kvstore.mover.pieces import JobState
from kvstore.registry import open_store
from kvstore.store import GetStatus, KvObject
from tests.support.connector_rig import ConnectorRig, keys

LAYOUT = KvLayout(num_layers=4, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
BLOCK_BYTES = 256 << 10
MIN_BLOCKS, MAX_BLOCKS = 16, 48  # blocks of a piece: 4 MiB and 12 MiB
PIECES = 4  # pieces of a job, within these bounds


def make_rig(url: str, num_blocks: int) -> ConnectorRig:
    pool = torch.randn(num_blocks, *LAYOUT.block_shape).to(torch.bfloat16)
    return ConnectorRig(open_store(url), pool=pool, layout=LAYOUT)


@pytest.fixture(params=["memory", "shm"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield f"{request.param}://{name}?max_bytes=256MiB"
    shutil.rmtree(f"/dev/shm/baton-{name}", ignore_errors=True)


@pytest.mark.parametrize("num_slices", [1, 4])
@pytest.mark.parametrize(
    ("num_left", "expected"),
    [
        (1, MIN_BLOCKS),
        (PIECES * MIN_BLOCKS, MIN_BLOCKS),
        (PIECES * (MIN_BLOCKS + 1) - 1, MIN_BLOCKS),
        (PIECES * (MIN_BLOCKS + 1), MIN_BLOCKS + 1),
        (PIECES * MAX_BLOCKS - 1, MAX_BLOCKS - 1),
        (PIECES * MAX_BLOCKS, MAX_BLOCKS),
        (20 * MAX_BLOCKS, MAX_BLOCKS),
    ],
)
def test_a_piece_is_a_quarter_of_a_jobs_remaining_blocks_within_bounds(
    num_left: int, expected: int, num_slices: int
) -> None:
    assert LAYOUT.block_bytes == BLOCK_BYTES
    rig = make_rig(f"memory://{uuid.uuid4().hex}", num_blocks=1)
    num_objects = 100 + num_left * num_slices
    job = JobState(LoadJob(1, keys(num_objects), (0,) * num_objects), next_object=100)
    assert rig.worker._mover._objects_in_place(job, num_slices) == expected
    rig.worker.close()


def test_pieces_larger_than_a_segment_are_copied(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = PIECES * (MIN_BLOCKS + 4)
    rig = make_rig(url, num_blocks=count)
    num_read: list[int] = []
    read = rig.store.get_into

    def read_and_note(keys: Sequence[bytes], frames: Sequence[KvObject]) -> list[GetStatus]:
        num_read.append(len(keys))
        return read(keys, frames)

    monkeypatch.setattr(rig.store, "get_into", read_and_note)
    before = rig.pool.clone()
    rig.save(range(count))
    rig.pool.zero_()
    assert rig.load(range(count)) == LoadResult(1, count)
    assert torch.equal(rig.pool, before)
    assert num_read == [MIN_BLOCKS + 4] * PIECES
    rig.worker.close()
