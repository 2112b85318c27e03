"""Pages of a store's memory that are mapped before they are written to."""

import mmap
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.stores.shm import mapped_memory
from kvstore.stores.shm.mapped_memory import MappedMemory

PAGE = mmap.PAGESIZE
NUM_PAGES = 256


@pytest.fixture
def memory() -> Iterator[MappedMemory]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="baton-test-"))
    with closing(MappedMemory(folder / "memory")) as memory:
        memory.grow_to(2 * NUM_PAGES * PAGE)
        memory.provide(0, 2 * NUM_PAGES * PAGE)
        yield memory
    shutil.rmtree(folder)


def num_faults_of_writing(memory: MappedMemory, first_page: int) -> int:
    """Writes to `NUM_PAGES` pages; returns the page faults of this thread meanwhile."""
    view = memory._mapped((first_page + NUM_PAGES) * PAGE)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for page in range(first_page, first_page + NUM_PAGES):
        view[page * PAGE] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_mapped_in_pages_are_written_almost_without_page_faults(memory: MappedMemory) -> None:
    try:
        mmap.mmap(-1, PAGE).madvise(mapped_memory._MADV_POPULATE_WRITE)
    except OSError:
        pytest.skip("this system has no MADV_POPULATE_WRITE")
    if num_faults_of_writing(memory, 0) < NUM_PAGES // 2:
        pytest.skip("this system maps many pages per fault")
    memory.map_in(NUM_PAGES * PAGE, NUM_PAGES * PAGE)
    assert num_faults_of_writing(memory, NUM_PAGES) < NUM_PAGES // 16


def test_mapping_in_an_empty_range_does_nothing(memory: MappedMemory) -> None:
    memory.map_in(0, 0)
