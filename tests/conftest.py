"""Fixtures that tests of several kinds share."""

import ctypes
import functools
import gc
import os
import random
import re
import shutil
import signal
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Read when `triton` is first imported: its kernels run on the CPU then.
if os.environ.get("BATON_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

# Several processes run tests at once.
MAX_KEPT_BYTES = 1 << 30
MAX_GROWTH_BYTES = 512 << 20
LEFT_BYTES = pytest.StashKey()
"""Memory after the latest collection of garbage."""
FROZEN_BYTES = pytest.StashKey()
"""Memory after the latest one that visited all objects."""
GC_THRESHOLDS = gc.get_threshold()

# A shell that starts pytest in the background lets it ignore these, which every process that a test
# starts would inherit.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# A busy machine takes any time for an example. On CI the examples are the same each time; elsewhere
# new ones are looked for.
settings.register_profile(
    "baton",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("baton")


def pytest_configure(config):
    """Makes the folder of checkpoints and reference tokens, which all processes of a run share."""
    if "PYTEST_CHECKPOINTS" not in os.environ:
        folder = tempfile.mkdtemp(prefix="baton-checkpoints-")
        os.environ["PYTEST_CHECKPOINTS"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_ignore_collect(collection_path, config):
    """Leaves files out that have none of the selected tests: to import all takes half a minute."""
    if not collection_path.match("test_*.py"):
        return None
    text, selected = collection_path.read_text(), config.option.markexpr.split(" and ")
    has_slow = "mark.slow" in text or "mark.sampled" in text
    has_alone = "mark.alone" in text
    is_needless = ("slow" in selected and not has_slow) or ("alone" in selected and not has_alone)
    return is_needless or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Frees what a test has left, once pytest has dropped what its fixtures made."""
    ended = yield
    is_last = nextitem is None or nextitem.path != item.path
    free_garbage(item.config.stash, is_last=is_last)
    return ended


def free_garbage(stash, *, is_last):
    """Frees what tests have left: after each file, and after a test that has left much.

    Closed engines are in cycles of references, and so few objects that their weights would stay for
    long. What lives on after a file is kept from the garbage collector, which would visit the
    objects of all packages each time, until much more lives: a cycle that ends later, as that of a
    thread of its own, would stay for ever. Servers and benchmarks in this process change the
    collector's settings.
    """
    if not is_last and resident_bytes() < stash.get(LEFT_BYTES, 0) + MAX_GROWTH_BYTES:
        return
    collect_garbage()
    if is_last:
        if resident_bytes() > stash.get(FROZEN_BYTES, 0) + MAX_GROWTH_BYTES:
            gc.unfreeze()
            collect_garbage()
            stash[FROZEN_BYTES] = resident_bytes()
        gc.set_threshold(*GC_THRESHOLDS)
        gc.freeze()
    stash[LEFT_BYTES] = resident_bytes()


def collect_garbage():
    gc.collect()
    if resident_bytes() > MAX_KEPT_BYTES:
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes():
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keeps the garbage collector from what collecting imports, now and in later runs of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure():
    """Lets packages free what they hold, since some print what is left at the end."""
    gc.unfreeze()


def pytest_xdist_make_scheduler(config, log):
    """Gives the tests of a file to one process, and those of all files that share clusters too."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "shared clusters" if _uses_shared_clusters(config.rootpath / file) else file

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


@functools.cache
def _uses_shared_clusters(file: Path) -> bool:
    is_in_folder = file.parent.name == "e2e"
    return is_in_folder and bool(re.search(r"\b(http_cluster:|shared_cluster\b)", file.read_text()))


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by their marks
def pytest_collection_modifyitems(items):
    """Marks most cases of tests that are `sampled` as slow."""
    sampled = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            sampled[f"{item.path.name}::{item.originalname}"].append(item)
    for name, cases in sampled.items():
        one_in = cases[0].get_closest_marker("sampled").kwargs["one_in"]
        # The same ones each time.
        rest = random.Random(name).sample(cases, len(cases) - max(len(cases) // one_in, 1))
        for item in rest:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def fork_server():
    """Forks processes that compute, which need not import torch then; started when needed."""
    from tests.support.fork_server import ForkServer

    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def redis_server():
    """A real redis-server on a free port; see `tests.support.redis_server.RedisServer`."""
    # A GPU machine, which runs other tests, need not have the package that this imports.
    from tests.support.redis_server import running_redis_server

    with running_redis_server() as server:
        yield server


@pytest.fixture
def unread_pipe():
    """The writing end of a pipe whose reader has left, as `head` does."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fresh tensors are full of NaN, or of the largest integer, until something writes them."""
    import torch

    # Without it, torch refuses matrix products on CUDA in this mode.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
