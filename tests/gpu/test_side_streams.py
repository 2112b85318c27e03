"""KV copies beside the steps of a real GPU: their bytes, and that they wait for no step."""

from collections.abc import Iterator

import pytest
import torch

from kvstore.connector import LoadJob, LoadResult, SaveJob, SaveResult
from kvstore.layout import KvLayout
from kvstore.registry import open_store
from kvstore.side_streams import SideStreamCopier
from kvstore.staging import Segment
from tests.support.connector_rig import ConnectorRig, keys
from tests.support.devices import DEVICE, IS_CUDA

pytestmark = pytest.mark.skipif(not IS_CUDA, reason="a CPU has no streams")

LAYOUT = KvLayout(num_layers=8, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
_NUM_BLOCKS = 32
# Half a second of an H200, and longer on anything smaller.
_NUM_PRODUCTS, _SIZE = 400, 8192


def _random_pool() -> torch.Tensor:
    """Random bits: NaN, infinities and denormals among them."""
    shape = (_NUM_BLOCKS, *LAYOUT.block_shape)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).to(DEVICE).view(torch.bfloat16)


def _bits(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.int16)


@pytest.fixture
def copier() -> Iterator[SideStreamCopier]:
    copier = SideStreamCopier(_random_pool(), LAYOUT)
    yield copier
    copier.close()


@pytest.fixture
def segment() -> Segment:
    return Segment(LAYOUT, pinned=True)


@pytest.fixture
def busy() -> torch.cuda.Event:
    """The end of what keeps the compute stream busy for the whole test."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16, device=DEVICE)
    out = torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    for _ in range(_NUM_PRODUCTS):
        torch.mm(matrix, matrix, out=out)
    end = torch.cuda.Event()
    end.record()
    return end


def test_blocks_go_out_and_come_back_as_they_were(copier, segment) -> None:
    before = copier._pool.clone()
    sources = list(range(segment.num_slots))[::-1]
    targets = list(range(_NUM_BLOCKS - segment.num_slots, _NUM_BLOCKS))
    copier.gather(sources, segment).wait()
    gathered = segment.payload.clone().view(torch.int16)
    copier.scatter(segment, targets).wait()

    assert torch.equal(gathered.view(_bits(before[sources]).shape), _bits(before[sources]).cpu())
    assert torch.equal(_bits(copier._pool[targets]), _bits(before[sources]))
    first = targets[0]
    assert torch.equal(_bits(copier._pool[:first]), _bits(before[:first]))


def test_many_copies_follow_each_other_through_one_staging_tensor(copier) -> None:
    segments = [Segment(LAYOUT, pinned=True) for _ in range(8)]
    copies = [copier.gather([2 * i, 2 * i + 1], each) for i, each in enumerate(segments)]
    copies[-1].wait()

    for i, each in enumerate(segments):
        expected = copier._pool[2 * i : 2 * i + 2].view(2, -1).view(torch.uint8).cpu()
        assert torch.equal(each.payload[:2], expected)


def test_copies_run_beside_a_busy_device(copier, segment, busy) -> None:
    copier.gather([1, 2], segment).wait()
    copier.scatter(segment, [30, 31]).wait()
    assert not busy.query(), "it waited for the compute stream"

    # What is launched after the wait reads what was loaded.
    later = copier._pool[30:32].clone()
    assert torch.equal(_bits(later), _bits(copier._pool[1:3]))


def test_a_copy_that_cannot_start_does_not_hurt_the_next(copier, segment) -> None:
    with pytest.raises(RuntimeError):
        copier.gather(range(segment.num_slots + 1), segment)
    copier.gather([3], segment).wait()

    assert torch.equal(segment.payload[0], copier._pool[3].view(-1).view(torch.uint8).cpu())


@pytest.fixture
def rig() -> Iterator[ConnectorRig]:
    rig = ConnectorRig(open_store("memory://side-streams"), device=str(DEVICE))
    yield rig
    rig.worker.close()


def test_jobs_end_while_the_device_is_busy(rig, busy) -> None:
    rig.start(saves=(SaveJob(0, keys(20), tuple(range(20)), 3),))
    assert rig.results(1) == [SaveResult(0, committed=True)]
    rig.start(loads=(LoadJob(1, keys(20), tuple(range(40, 60))),))
    assert rig.results(1) == [LoadResult(1, 20)]
    assert not busy.query(), "it waited for the compute stream"

    assert torch.equal(rig.pool[40:59], rig.pool[:19])
    assert torch.equal(rig.pool[59, ..., :3, :], rig.pool[19, ..., :3, :])
    assert not rig.pool[59, ..., 3:, :].any()
