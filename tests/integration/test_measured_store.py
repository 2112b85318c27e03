"""The metrics of a store connector's worker count what its backend did."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.codec import HEADER_BYTES
from kvstore.conformance.objects import blank
from kvstore.guard.metrics import KvMetrics
from kvstore.jobs import LoadJob, SaveJob
from kvstore.registry import open_store
from kvstore.store import KvStore, StoreUnavailableError
from tests.support.connector_rig import LAYOUT, ConnectorRig, keys

OBJECT_BYTES = HEADER_BYTES + LAYOUT.block_bytes


class Rig(ConnectorRig):
    def __init__(self, store: KvStore) -> None:
        super().__init__(store)
        metrics = KvMetrics()
        self.worker.measure(metrics, "memory")
        self.metrics = metrics.of("memory")

    def value(self, *series: str) -> float:
        return self.metrics.snapshot()[0][series]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(open_store(f"memory://{tmp_path.name}"))
    yield rig
    rig.worker.close()


def test_saved_and_loaded_bytes_and_objects_are_counted(rig: Rig) -> None:
    rig.save(range(10))
    rig.load(range(20, 30))
    for direction in ("save", "load"):
        assert rig.value("baton_kv_objects", direction) == 10
        assert rig.value("baton_kv_bytes", direction) == 10 * OBJECT_BYTES
    assert rig.value("baton_kv_stored_objects") == 10
    assert rig.value("baton_kv_stored_bytes") == 10 * OBJECT_BYTES


def test_blocks_that_the_store_holds_are_counted_as_skipped(rig: Rig) -> None:
    rig.save(range(4))
    job = SaveJob(5, keys(6), tuple(range(6)), num_found=6)
    rig.start(saves=(job,))
    rig.results(1)
    assert rig.value("baton_kv_skipped_objects") == 4
    assert rig.value("baton_kv_objects", "save") == 6


def test_a_load_reports_the_time_that_its_bytes_took(rig: Rig) -> None:
    rig.save(range(4))
    assert 0 < rig.load(range(4)).seconds < 10
    rig.start(loads=(LoadJob(1, keys(4), tuple(range(4))),), cancelled_loads=(1,))
    (cancelled,) = rig.results(1)
    assert cancelled.error == "cancelled"


def test_corrupt_objects_and_open_breakers_are_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = blank(OBJECT_BYTES)
    rig.store.put(keys(1), [foreign])
    assert rig.load([3]).error == "corrupt"
    assert rig.value("baton_kv_verify_failures") == 1
    assert rig.value("baton_kv_open_breakers", "load") == 0

    def refuse(*args: object) -> None:
        raise StoreUnavailableError("down")

    monkeypatch.setattr(rig.store, "get_into", refuse)
    assert rig.load([3]).error == "unavailable"
    assert rig.value("baton_kv_open_breakers", "load") == 1
    assert rig.value("baton_kv_open_breakers", "save") == 1  # it would not answer puts either
    assert rig.value("baton_kv_breaker_openings", "load") == 1
