"""The thread pool of the kernels: more threads than cores, several callers, forks."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import pytest
import torch

import kernels
from baton.common.errors import InvalidArgumentError
from tests.support.attention_cases import make_case
from tests.support.kernel_checks import DTYPES, filled_weight, native_only, normal

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
LIMIT_S = 60


@pytest.fixture
def threads():
    """Sets the number of threads; restores it after the test."""
    before = kernels.num_threads()
    yield kernels.set_num_threads
    kernels.set_num_threads(before)


def some_work(dtype=torch.float32, seed=0):
    """Returns a function that runs several kernels and returns their results."""
    weight = filled_weight(normal(100, 64, dtype=dtype, seed=seed))
    hidden, norm = normal(17, 64, dtype=dtype, seed=seed), normal(64, dtype=dtype)
    logits = normal(9, 3000, seed=seed)
    case = make_case([(70, 1), (0, 30)], head_dim=16, dtype=dtype, seed=seed)

    def work():
        return [
            kernels.linear(hidden, weight),
            kernels.rms_norm(hidden, norm, 1e-6),
            *kernels.row_maxima(logits),
            case.attend(),
        ]

    return work


def same(results, expected):
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def reaches_thread_count(num_threads):
    """Waits for a number of threads, as the system counts an ended thread for a moment more."""
    deadline = time.monotonic() + 10
    while psutil.Process().num_threads() != num_threads:
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_thread_is_refused(threads, count):
    with pytest.raises(InvalidArgumentError, match=f"num_threads is {count}; it must be >= 1"):
        threads(count)


def test_num_threads_returns_the_number_set(threads):
    for count in (1, 4, 2):
        threads(count)
        assert kernels.num_threads() == count
        assert torch.get_num_threads() == count  # what native kernels leave to torch


@native_only("torch keeps its threads")
def test_threads_are_created_and_ended(threads):
    threads(1)
    work = some_work()
    work()
    before = psutil.Process().num_threads()
    for count in (4, 2, 7, 1):
        threads(count)
        work()
        assert reaches_thread_count(before + count - 1)


@native_only("torch's bits may depend on its threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(threads, dtype):
    threads(1)
    work = some_work(dtype)
    expected = work()
    for count in (4, 2, 9, 3, 1, 4):
        threads(count)
        assert same(work(), expected)


@native_only("torch's threads are not Baton's")
def test_thousands_of_tiny_jobs_on_more_threads_than_cores(threads):
    weight, hidden = filled_weight(normal(70, 8)), normal(1, 8)
    threads(1)
    expected = kernels.linear(hidden, weight)
    threads(4)
    for _ in range(5000):
        assert torch.equal(kernels.linear(hidden, weight), expected)


@native_only("torch's threads are not Baton's")
@pytest.mark.parametrize("count", [1, 4])
def test_several_python_threads_may_call_kernels(threads, count):
    works = [some_work(seed=seed) for seed in range(3)]
    expected = [work() for work in works]
    threads(count)

    def run(index):
        return all(same(works[index](), expected[index]) for _ in range(200))

    with ThreadPoolExecutor(len(works)) as pool:
        assert all(pool.map(run, range(len(works)), timeout=LIMIT_S))


@native_only("torch's threads are not Baton's")
def test_the_number_of_threads_may_change_during_computation(threads):
    work, is_over = some_work(), Event()
    expected = work()

    def run():
        results = []
        while not is_over.is_set():
            results.append(same(work(), expected))
        return results

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            for turn in range(200):
                threads(1 + turn % 4)
                assert same(work(), expected)
        finally:
            is_over.set()
        results = running.result(timeout=LIMIT_S)
    assert results
    assert all(results)


@native_only("torch handles its threads in forks itself")
def test_kernels_work_in_forked_children():
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.forking_process"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
