"""Copies and digests of many runs: same results with and without the native library."""

import mmap
import random
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import ConfigurationError
from kernels.native.memory_runs import native_runs
from kvstore import memory_runs
from kvstore.memory_runs import copy_runs, digest_runs

# Sizes around the thresholds: use of the native library, non-temporal stores, cache lines.
SIZES = st.sampled_from(
    (0, 1, 63, 240, 241, 4095, 4096, 4097, 8191, 32_767, 32_768, 32_769, 40_001)
)
OFFSETS = st.integers(0, 70)
GUARD = b"\xee" * 64
_find_native_runs = memory_runs._native_runs.__wrapped__


@pytest.fixture(params=["native", "python"], autouse=True, scope="module")
def library(request):
    if request.param == "native" and native_runs() is None:
        pytest.skip("no native library")
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "python":
            patched.setattr(memory_runs, "_native_runs", lambda: None)
        yield request.param


def run_at(offset, content):
    """Returns a view of a run at `offset` in memory, and that memory, with guards around it."""
    memory = bytearray(bytes(offset) + GUARD + content + GUARD)
    start = offset + len(GUARD)
    return memoryview(memory)[start : start + len(content)], memory


@given(st.lists(st.tuples(SIZES, OFFSETS, OFFSETS), max_size=6), st.integers(0, 2**32))
def test_each_run_is_copied_and_no_other_bytes(runs, seed):
    lots = random.Random(seed)
    contents = [lots.randbytes(size) for size, _, _ in runs]
    sources = [run_at(run[1], content)[0] for run, content in zip(runs, contents, strict=True)]
    places = [run_at(run[2], b"\xff" * run[0]) for run in runs]
    copy_runs([view for view, _ in places], sources)
    for (_, _, offset), content, (_, memory) in zip(runs, contents, places, strict=True):
        assert memory == bytes(offset) + GUARD + content + GUARD
    assert [bytes(source) for source in sources] == contents


@given(
    st.lists(st.tuples(SIZES, OFFSETS, st.binary(max_size=90)), max_size=6),
    st.integers(0, 2**32),
)
def test_digests_are_those_of_xxhash(runs, seed):
    lots = random.Random(seed)
    contents = [lots.randbytes(size) for size, _, _ in runs]
    views = [run_at(run[1], content)[0] for run, content in zip(runs, contents, strict=True)]
    prefixes = [prefix for _, _, prefix in runs]
    expected = [
        xxhash.xxh3_128_digest(prefix + content)
        for prefix, content in zip(prefixes, contents, strict=True)
    ]
    assert digest_runs(prefixes, views) == expected
    assert digest_runs(prefixes, [memoryview(bytes(view)) for view in views]) == expected


both_sizes = pytest.mark.parametrize("size", [104, 5000])


@both_sizes
@pytest.mark.parametrize("by", [-1, 1])
def test_runs_of_other_lengths_are_refused(size, by):
    place, memory = run_at(0, bytes(size + by))
    with pytest.raises(ValueError, match="do not fit"):
        copy_runs([place], [memoryview(b"\1" * size)])
    assert memory == GUARD + bytes(size + by) + GUARD


@both_sizes
def test_different_numbers_of_runs_are_refused(size):
    with pytest.raises(ValueError, match="zip"):
        copy_runs([memoryview(bytearray(size))], [memoryview(bytes(size))] * 2)


VIEWS = {
    "bytes": lambda memory: memory,
    "signed": lambda memory: memory.cast("b"),
    "numbers": lambda memory: memory.cast("f"),
    "rows": lambda memory: memory.cast("B", (8, len(memory) // 8)),
    "rows of numbers": lambda memory: memory.cast("H", (4, len(memory) // 8)),
}


@both_sizes
@pytest.mark.parametrize("source_view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("place_view", VIEWS.values(), ids=VIEWS)
def test_views_of_any_format_are_copied(size, place_view, source_view):
    content, place = random.Random(size).randbytes(size), memoryview(bytearray(size))
    copy_runs([place_view(place)], [source_view(memoryview(content))])
    assert bytes(place) == content


def test_empty_views_of_any_format_are_accepted():
    nothing = memoryview(np.zeros((0, 3), np.float32))
    copy_runs([nothing, memoryview(bytearray())], [memoryview(b""), nothing])


@both_sizes
def test_views_that_are_not_contiguous_are_refused(size):
    whole, every_other = memoryview(bytearray(size)), memoryview(bytearray(2 * size))[::2]
    for to, source in ((whole, every_other), (every_other, whole)):
        with pytest.raises(ValueError, match="not contiguous"):
            copy_runs([to], [source])


def test_memory_of_any_kind_is_copied():
    content = random.Random(0).randbytes(3 * 4096)
    mapped = mmap.mmap(-1, 4 * 4096)
    numbers = np.zeros(len(content), np.uint8)
    copy_runs([memoryview(mapped)[4096:]], [memoryview(content)])
    copy_runs([memoryview(numbers)], [memoryview(mapped)[4096:]])
    assert numbers.tobytes() == content


@both_sizes
def test_views_that_are_not_writable_are_refused(size):
    with pytest.raises(TypeError):
        copy_runs([memoryview(bytes(size))], [memoryview(b"\1" * size)])


_COPY_ALONE = """
import sys
from kvstore.memory_runs import copy_runs, digest_runs

source, place = memoryview(b"\\1" * (1 << 20)), memoryview(bytearray(1 << 20))
copy_runs([place], [source])
assert place == source
assert len(digest_runs([b""] * 2, [place] * 2)) == 2
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "kernels"}))
"""


def test_copies_and_digests_do_not_import_torch():
    command = [sys.executable, "-c", _COPY_ALONE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("kernels\n", "")


def test_short_runs_do_not_use_the_native_library(monkeypatch):
    monkeypatch.setattr(
        memory_runs, "_native_runs", lambda: pytest.fail("the native library was used")
    )
    place, _ = run_at(0, bytes(4095))
    copy_runs([place] * 2, [memoryview(b"\1" * 4095)] * 2)
    assert digest_runs([b""] * 2, [place] * 2) == [xxhash.xxh3_128_digest(b"\1" * 4095)] * 2


def test_copies_work_without_a_library_that_is_refused(monkeypatch, caplog):
    def refuse():
        raise ConfigurationError("built from other sources")

    monkeypatch.setattr(memory_runs, "native_runs", refuse)
    monkeypatch.setattr(memory_runs, "_native_runs", cache(_find_native_runs))
    place, _ = run_at(0, bytes(5000))
    for _ in range(2):
        copy_runs([place], [memoryview(b"\1" * 5000)])
    assert bytes(place) == b"\1" * 5000
    assert [record.message for record in caplog.records] == [
        "KV is copied and digested without the native library: built from other sources"
    ]
