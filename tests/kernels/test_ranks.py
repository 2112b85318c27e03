"""Exchanges between ranks: three processes, of which this one is rank 0."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import Cut, WeightUse
from kernels.library.commands import library
from kernels.native.ranks import SharedMemoryRanks
from kernels.ranks import RanksLostError
from tests.support.rank_cases import EmbedCase, GatherCase, ReduceCase

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels")

SIZE = 3
SLOT_BYTES = 4 << 20


@pytest.fixture(scope="module")
def ranks() -> Iterator[SharedMemoryRanks]:
    native = library()
    assert native is not None
    file = os.memfd_create("test-ranks")
    group = SharedMemoryRanks(native, file, 0, SIZE)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.rank_cases", str(file), str(rank), str(SIZE)],
            stdin=subprocess.PIPE,
            pass_fds=(file,),
        )
        for rank in range(1, SIZE)
    ]
    os.close(file)
    yield group
    for process in processes:
        process.stdin.close()
        process.wait(30)
    group.close()


def run(ranks, case):
    ranks.send(pickle.dumps(case))
    return case.run(ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "has_bias", "residual_stride"),
    [
        (1, 1, False, None),
        (1, 77, True, None),
        (3, 64, False, 64),
        (5, 33, True, 50),
        (70, 2047, True, 2048),  # in several pieces
        (0, 16, True, 16),
    ],
)
def test_sums_are_rounded_once(ranks, dtype, num_rows, num_columns, has_bias, residual_stride):
    scale = 0.25 if has_bias else 1.0  # exact, whether or not the sum after it is fused
    case = ReduceCase(num_rows, num_columns, dtype, has_bias, residual_stride, scale)
    expected = sum(case.partial(rank) for rank in range(SIZE))
    expected = expected if case.bias is None else expected + case.bias.float()
    expected = expected * scale
    expected = expected if case.residual is None else expected + case.residual.float()
    found = run(ranks, case)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("num_columns", [3, 4, 259, 50_000])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 70])
def test_columns_are_joined_on_rank_0(ranks, num_rows, num_columns):
    case = GatherCase(num_rows, num_columns)
    assert torch.equal(run(ranks, case), case.whole())


@pytest.mark.parametrize("use", [WeightUse.LOOKUP, WeightUse.LINEAR])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width"), [(3, 1), (259, 64), (100, 33)])
def test_a_shared_embedding_has_the_rows_of_a_whole_one(ranks, num_tokens, width, dtype, use):
    case = EmbedCase(num_tokens, width, dtype, use)
    assert torch.equal(run(ranks, case), case.table()[case.ids()])


@pytest.mark.parametrize("num_bytes", [0, SLOT_BYTES - 8, SLOT_BYTES, 3 * SLOT_BYTES])
def test_a_message_of_any_length_arrives(num_bytes):
    """Both ranks of a group in one process: messages do not compute."""
    first, second = pair()
    message = os.urandom(num_bytes)
    with ThreadPoolExecutor(1) as executor:
        received = executor.submit(second.receive)
        first.send(message)
        assert received.result() == message
    first.close()
    second.close()


def test_a_rank_that_is_too_late_ends_the_group():
    first, second = pair()
    second.limit_waits(0.01)
    with pytest.raises(RanksLostError):
        second.receive()
    first.send(b"for the first slot")
    first.send(b"for the second slot")
    with pytest.raises(RanksLostError):
        first.send(b"the other rank has read nothing")
    first.close()
    second.close()


def test_an_aborted_group_refuses_what_it_waits_for():
    first, second = pair()
    first.abort()
    with pytest.raises(RanksLostError):
        second.receive(waits_forever=True)
    first.close()
    second.close()
    second.close()
    second.abort()


@pytest.mark.parametrize("total", [1, 2, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_cuts_cover_an_axis(total, size):
    cuts = []
    for rank in range(size):
        group = object.__new__(SharedMemoryRanks)
        group.rank, group.size = rank, size
        cuts.append(group.cut(total))
    assert [index for cut in cuts for index in range(total)[cut.slice]] == list(range(total))
    assert max(cut.size for cut in cuts) - min(cut.size for cut in cuts) <= 1
    assert Cut.whole(total).is_whole
    assert cuts[0].times(3).total == 3 * total


def pair():
    native = library()
    file = os.memfd_create("test-ranks")
    try:
        return [SharedMemoryRanks(native, file, rank, 2) for rank in range(2)]
    finally:
        os.close(file)
