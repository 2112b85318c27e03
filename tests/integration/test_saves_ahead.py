"""Saves that start before their step: each layer is copied once it is computed, and not before."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from kvstore.jobs import SaveJob, SaveResult
from kvstore.registry import open_store
from kvstore.store import KvObject, StoreUnavailableError
from kvstore.transfer_form import BlockSlicing, TransferForm
from tests.support.connector_rig import LAYOUT, TIMEOUT_S, ConnectorRig, keys
from tests.support.kv_urls import fresh_shm_name

BY_LAYER = TransferForm(LAYOUT.block_size, LAYOUT.dtype, num_layer_slices=LAYOUT.num_layers)
STEP = 7
BLOCKS = (5, 2, 9)


@pytest.fixture(params=["memory", "shm"])
def store_url(request: pytest.FixtureRequest, tmp_path) -> Iterator[str]:
    if request.param == "memory":
        yield f"memory://{tmp_path.name}"
    else:
        with fresh_shm_name() as name:
            yield f"shm://{name}?max_bytes=64MiB"


def make_rig(url: str, form: TransferForm = BY_LAYER) -> ConnectorRig:
    """Returns a rig whose pool is all NaN: no layer of it is computed yet."""
    rig = ConnectorRig(open_store(url), form=form)
    rig.computed = rig.pool.clone()
    rig.pool.fill_(torch.nan)
    return rig


def start_ahead(rig: ConnectorRig, block_ids: Sequence[int] = BLOCKS, job_id: int = 0) -> None:
    rig.start(saves=(SaveJob(job_id, keys(len(block_ids)), tuple(block_ids), step=STEP),))


def compute(rig: ConnectorRig, layer: int) -> None:
    """Writes a layer, as a step does before it reports the layer."""
    rig.pool[:, layer] = rig.computed[:, layer]


def object_keys(rig: ConnectorRig, layer: int, form: TransferForm = BY_LAYER) -> list[bytes]:
    slicing = BlockSlicing(LAYOUT, form)
    return [slicing.object_keys([key])[layer] for key in keys(len(BLOCKS))]


def await_held(rig: ConnectorRig, wanted: Sequence[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while rig.store.contains_prefix(wanted) < len(wanted):
        assert time.monotonic() < deadline, "nothing is saved"
        rig.woken.wait(0.005)


def check_loads(rig: ConnectorRig) -> None:
    """Checks that the saved blocks are the computed ones."""
    rig.pool.fill_(torch.nan)
    targets = [20, 21, 22]
    assert rig.load(targets).num_blocks == len(targets)
    assert torch.equal(rig.pool[targets], rig.computed[list(BLOCKS)])


def test_each_layer_is_saved_once_it_is_computed(store_url: str) -> None:
    rig = make_rig(store_url)
    start_ahead(rig)
    assert rig.store.contains_prefix(object_keys(rig, 0)) == 0
    for layer in range(LAYOUT.num_layers):
        compute(rig, layer)
        rig.worker.layers_computed(STEP, layer + 1)
        await_held(rig, object_keys(rig, layer))
        later = [key for other in range(layer + 1, 2) for key in object_keys(rig, other)]
        assert not any(rig.store.contains_prefix([key]) for key in later)
    assert rig.results(1) == [SaveResult(0, committed=True)]
    rig.worker.step_ended(STEP, computed=True)
    check_loads(rig)
    rig.worker.close()


def test_layers_that_were_not_reported_are_saved_when_the_step_ends(store_url: str) -> None:
    rig = make_rig(store_url)
    start_ahead(rig)
    compute(rig, 0)
    rig.worker.layers_computed(STEP, 1)
    rig.worker.layers_computed(STEP + 1, 2)  # layers of another step
    await_held(rig, object_keys(rig, 0))
    compute(rig, 1)
    rig.worker.step_ended(STEP, computed=True)
    assert rig.results(1) == [SaveResult(0, committed=True)]
    check_loads(rig)
    rig.worker.close()


def test_no_more_layers_are_saved_after_their_step_failed(store_url: str) -> None:
    rig = make_rig(store_url)
    start_ahead(rig)
    compute(rig, 0)
    rig.worker.layers_computed(STEP, 1)
    await_held(rig, object_keys(rig, 0))
    rig.worker.step_ended(STEP, computed=False)
    assert rig.results(1) == [SaveResult(0, committed=False, error="failed")]
    assert rig.store.contains_prefix(object_keys(rig, 1)) == 0
    rig.worker.layers_computed(STEP, 2)  # after the step ended
    assert rig.store.contains_prefix(object_keys(rig, 1)) == 0
    rig.worker.close()


def test_layers_that_wait_for_a_thread_when_their_step_fails_are_not_saved(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(store_url)
    put, entered, may_continue = rig.store.put, threading.Semaphore(0), threading.Event()

    def put_later(keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        entered.release()
        assert may_continue.wait(TIMEOUT_S)
        put(keys, objects)

    monkeypatch.setattr(rig.store, "put", put_later)
    rig.start(saves=tuple(SaveJob(number, keys(1, 100 + number), (30,)) for number in (1, 2)))
    for _ in range(2):  # one save in each thread
        assert entered.acquire(timeout=TIMEOUT_S)
    start_ahead(rig)
    compute(rig, 0)
    rig.worker.layers_computed(STEP, 1)
    rig.worker.step_ended(STEP, computed=False)
    may_continue.set()
    assert SaveResult(0, committed=False, error="failed") in rig.results(3)
    assert rig.store.contains_prefix(object_keys(rig, 0)) == 0
    rig.worker.close()


@pytest.mark.parametrize("computed", [True, False])
def test_a_save_that_converts_types_waits_for_its_step_to_end(
    computed: bool, store_url: str
) -> None:
    form = replace(BY_LAYER, dtype="bfloat16")
    rig = make_rig(store_url, form)
    start_ahead(rig)
    compute(rig, 0)
    rig.worker.layers_computed(STEP, 1)
    compute(rig, 1)
    rig.worker.layers_computed(STEP, 2)
    assert rig.worker.poll().saves == ()
    rig.worker.step_ended(STEP, computed=computed)
    error = "" if computed else "failed"
    assert rig.results(1) == [SaveResult(0, committed=computed, error=error)]
    held = rig.store.contains_prefix(object_keys(rig, 1, form))
    assert held == (len(BLOCKS) if computed else 0)
    rig.worker.close()


def test_a_save_reports_its_wait_apart_from_its_work(store_url: str) -> None:
    rig = make_rig(store_url)
    started_at = time.monotonic()
    start_ahead(rig)
    compute(rig, 0)
    rig.worker.layers_computed(STEP, 1)
    await_held(rig, object_keys(rig, 0))
    begun_at = time.monotonic()  # the worker's thread may begin to wait a little later
    while time.monotonic() - begun_at < 0.3:
        rig.woken.wait(0.01)
    for layer in range(1, LAYOUT.num_layers):
        compute(rig, layer)
    rig.worker.layers_computed(STEP, LAYOUT.num_layers)
    (result,) = rig.results(1)
    assert result.waited >= 0.05
    assert 0 < result.seconds <= time.monotonic() - started_at - result.waited
    rig.worker.close()


def test_a_failed_save_reports_its_time(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(store_url)

    def fail_late(keys: Sequence[bytes], frames: Sequence[object]) -> None:
        begun_at = time.monotonic()
        while time.monotonic() - begun_at < 0.05:
            rig.woken.wait(0.01)
        raise StoreUnavailableError("full")

    monkeypatch.setattr(rig.store, "put", fail_late)
    start_ahead(rig)
    rig.worker.step_ended(STEP, computed=True)
    (result,) = rig.results(1)
    assert result == SaveResult(0, committed=False, error="unavailable")
    assert result.seconds >= 0.05
    rig.worker.close()


def test_close_drops_saves_that_wait_for_their_step(store_url: str) -> None:
    rig = make_rig(store_url)
    start_ahead(rig)
    rig.worker.close()
    with closing(open_store(store_url)) as store:
        assert store.contains_prefix(keys(1)) == 0
