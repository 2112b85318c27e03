"""KV copies on side streams of a GPU: they keep every bit and do not wait for compute."""

from collections.abc import Iterator

import pytest
import torch

from kvstore.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from kvstore.layout import KvLayout, StateLayout, StatePart
from kvstore.mover.copies import ConvertingCopier
from kvstore.mover.side_streams import SideStreamCopier
from kvstore.mover.staging import Segment
from kvstore.registry import open_store
from kvstore.transfer_form import BlockSlicing, PoolShare, RangeError, TransferForm
from tests.support.connector_rig import ConnectorRig, keys
from tests.support.devices import DEVICE, IS_CUDA

pytestmark = pytest.mark.skipif(not IS_CUDA, reason="a CPU has no streams")

LAYOUT = KvLayout(num_layers=8, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
_NUM_BLOCKS = 32
# Half a second on an H200, and longer on a slower GPU.
_NUM_PRODUCTS, _SIZE = 400, 8192


def _random_pool() -> torch.Tensor:
    """Random bits: NaN, infinities and denormals among them."""
    shape = (_NUM_BLOCKS, *LAYOUT.block_shape)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).to(DEVICE).view(torch.bfloat16)


def _bits(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.int16)


@pytest.fixture
def pool() -> torch.Tensor:
    return _random_pool()


@pytest.fixture
def copier(pool: torch.Tensor) -> Iterator[SideStreamCopier]:
    copier = SideStreamCopier(pool, BlockSlicing.of(LAYOUT))
    yield copier
    copier.close()


@pytest.fixture
def segment() -> Segment:
    return Segment(LAYOUT, pinned=True)


@pytest.fixture
def busy() -> torch.cuda.Event:
    """Keeps the compute stream busy for the whole test; returns the event at its end."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16, device=DEVICE)
    out = torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    for _ in range(_NUM_PRODUCTS):
        torch.mm(matrix, matrix, out=out)
    end = torch.cuda.Event()
    end.record()
    return end


def test_gathered_and_scattered_blocks_keep_every_bit(copier, pool, segment) -> None:
    before = pool.clone()
    sources = list(range(segment.num_slots))[::-1]
    targets = list(range(_NUM_BLOCKS - segment.num_slots, _NUM_BLOCKS))
    copier.gather(sources, segment).wait()
    gathered = segment.payload.clone().view(torch.int16)
    copier.scatter(segment, targets).wait()

    assert torch.equal(gathered.view(_bits(before[sources]).shape), _bits(before[sources]).cpu())
    assert torch.equal(_bits(pool[targets]), _bits(before[sources]))
    first = targets[0]
    assert torch.equal(_bits(pool[:first]), _bits(before[:first]))


def test_consecutive_copies_share_one_staging_tensor(copier, pool) -> None:
    segments = [Segment(LAYOUT, pinned=True) for _ in range(8)]
    copies = [copier.gather([2 * i, 2 * i + 1], each) for i, each in enumerate(segments)]
    copies[-1].wait()

    for i, each in enumerate(segments):
        expected = pool[2 * i : 2 * i + 2].view(2, -1).view(torch.uint8).cpu()
        assert torch.equal(each.payload[:2], expected)


def test_copies_do_not_wait_for_the_compute_stream(copier, pool, segment, busy) -> None:
    copier.gather([1, 2], segment).wait()
    copier.scatter(segment, [30, 31]).wait()
    assert not busy.query(), "the copies waited for the compute stream"

    # Operations launched after the wait read the loaded blocks.
    later = pool[30:32].clone()
    assert torch.equal(_bits(later), _bits(pool[1:3]))


def test_a_copy_that_fails_to_start_does_not_affect_the_next(copier, pool, segment) -> None:
    with pytest.raises(RuntimeError):
        copier.gather(range(segment.num_slots + 1), segment)
    copier.gather([3], segment).wait()

    assert torch.equal(segment.payload[0], pool[3].view(-1).view(torch.uint8).cpu())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8_e4m3"])
def test_converted_blocks_and_states_equal_those_of_the_cpu_copier(dtype: str) -> None:
    states = StateLayout(2, (StatePart("s", 8, 20_000, "float32"),))
    form = TransferForm(8, dtype, num_head_slices=2, states=states)
    slicing = BlockSlicing(LAYOUT, form, PoolShare(num_blocks=24))
    assert slicing.slots is not None
    first, step = slicing.first_state_object, 2 * slicing.slots.units
    on_cpu = torch.randn(_NUM_BLOCKS, *LAYOUT.block_shape).to(torch.bfloat16)
    on_gpu = on_cpu.to(DEVICE)
    copiers = [ConvertingCopier(on_cpu, slicing), SideStreamCopier(on_gpu, slicing)]
    segments = [Segment(slicing.object_layout, pinned=True) for _ in copiers]
    count = min(segments[0].num_slots - step, 20)
    for each, segment in zip(copiers, segments, strict=True):
        each.gather([*range(7, 7 + count), *range(first, first + step)], segment).wait()
    assert torch.equal(segments[0].payload, segments[1].payload)
    for each, segment in zip(copiers, segments, strict=True):
        second_slot = range(first + step, first + 2 * step)
        each.scatter(segment, [*range(60, 60 + count), *second_slot]).wait()
        each.close()
    assert torch.equal(_bits(on_gpu).cpu(), _bits(on_cpu))


def test_a_number_out_of_range_is_reported_when_the_copy_ends() -> None:
    slicing = BlockSlicing.of(LAYOUT, TransferForm(LAYOUT.block_size, "float16"))
    pool = torch.zeros(4, *LAYOUT.block_shape, dtype=torch.bfloat16, device=DEVICE)
    pool[2, 1, 1, 1, 1, 1] = 1e6
    copier, segment = SideStreamCopier(pool, slicing), Segment(slicing.object_layout, pinned=True)
    with pytest.raises(RangeError):
        copier.gather([1, 2], segment).wait()
    copier.gather([1, 3], segment).wait()
    copier.close()


@pytest.fixture
def rig() -> Iterator[ConnectorRig]:
    rig = ConnectorRig(open_store("memory://side-streams"), device=str(DEVICE))
    yield rig
    rig.worker.close()


def test_jobs_do_not_wait_for_the_compute_stream(rig, busy) -> None:
    rig.start(saves=(SaveJob(0, keys(20), tuple(range(20)), 3),))
    assert rig.results(1) == [SaveResult(0, committed=True)]
    rig.start(loads=(LoadJob(1, keys(20), tuple(range(40, 60))),))
    assert rig.results(1) == [LoadResult(1, 20)]
    assert not busy.query(), "the jobs waited for the compute stream"

    assert torch.equal(rig.pool[40:59], rig.pool[:19])
    assert torch.equal(rig.pool[59, ..., :3, :], rig.pool[19, ..., :3, :])
    assert not rig.pool[59, ..., 3:, :].any()
