"""`ConnectorDriver`: transfers, bounded waits, connectors that break the contract."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from baton.common.errors import ConfigurationError
from kvstore.connector import KvConnectorScheduler
from kvstore.driver import ConnectorDriver, ContractError
from kvstore.jobs import ConnectorWork, LoadResult, LookupResult, SaveResult, TransferResults
from kvstore.layout import KvLayout
from kvstore.registry import open_connector
from tests.support.fake_connector import FakeWorker

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, block_size=4, head_dim=4, dtype="float32")
KEYS = (b"a" * 32, b"b" * 32)


class ScriptedWorker(FakeWorker):
    """Reports the results that the test puts into `scripted`."""

    def __init__(self) -> None:
        super().__init__({})
        self.scripted: list[TransferResults] = []
        self.is_closed = False

    def register_pool(self, *pool: object) -> None:
        pass

    def start(self, work: ConnectorWork) -> None:
        pass

    def poll(self) -> TransferResults:
        return self.scripted.pop(0) if self.scripted else TransferResults()

    def close(self) -> None:
        self.is_closed = True


def new_pool() -> torch.Tensor:
    return torch.randn(8, *LAYOUT.block_shape)


@pytest.fixture
def worker() -> ScriptedWorker:
    return ScriptedWorker()


@pytest.fixture
def scripted_driver(worker: ScriptedWorker) -> ConnectorDriver:
    return ConnectorDriver((KvConnectorScheduler("fake", lease_s=1), worker), new_pool(), LAYOUT)


@pytest.fixture(params=["memory://{}", "grpc://", "multi://grpc://,memory://{}"])
def driver(request: pytest.FixtureRequest) -> Iterator[ConnectorDriver]:
    url = request.param.format(uuid.uuid4().hex)
    with closing(ConnectorDriver(open_connector(url), new_pool(), LAYOUT)) as driver:
        yield driver


def test_saved_blocks_are_loaded_until_they_are_forgotten(driver: ConnectorDriver) -> None:
    assert driver.save(KEYS, (0, 1), lease_id="lease").committed
    handoff = driver.make_handoff(KEYS, "lease")
    assert handoff.num_tokens == 2 * LAYOUT.block_size
    assert driver.load(handoff, (4, 5)) == LoadResult(1, 2)
    assert torch.equal(driver.pool[4:6], driver.pool[:2])

    driver.forget(KEYS, "lease")
    assert driver.load(handoff, (6, 7)).num_blocks == 0
    assert driver.look_up(KEYS) == 0
    held = [job_id for job_id, saved in driver.saves.items() if saved.is_held]
    assert driver.released == held


def test_each_hand_over_has_its_own_lease(driver: ConnectorDriver) -> None:
    first, second = driver.hand_over(KEYS, (0, 1), 3), driver.hand_over(KEYS, (0, 1), 3)
    assert first.handoff_id != second.handoff_id
    assert first.num_tokens == LAYOUT.block_size + 3
    assert driver.load(first, (4, 5)).num_blocks == 2


def test_a_hand_over_raises_if_its_save_fails(
    scripted_driver: ConnectorDriver, worker: ScriptedWorker
) -> None:
    failed = SaveResult(0, committed=False, error="unavailable")
    worker.scripted = [TransferResults(saves=(failed,))]
    with pytest.raises(RuntimeError, match="unavailable"):
        scripted_driver.hand_over(KEYS, (0, 1))


CALLS: list[Callable[[ConnectorDriver], object]] = [
    lambda driver: driver.save(KEYS, (0, 1)),
    lambda driver: driver.look_up(KEYS),
]


@pytest.mark.parametrize("call", CALLS, ids=["save", "look-up"])
def test_waits_are_bounded(
    worker: ScriptedWorker, call: Callable[[ConnectorDriver], object]
) -> None:
    connector = KvConnectorScheduler("fake", lease_s=1), worker
    driver = ConnectorDriver(connector, new_pool(), LAYOUT, timeout_s=0.05)
    began_at = time.monotonic()
    with pytest.raises(TimeoutError, match=r"takes longer than 0\.05 s"):
        call(driver)
    assert time.monotonic() - began_at >= 0.05


def test_a_wait_may_have_its_own_timeout(scripted_driver: ConnectorDriver) -> None:
    with pytest.raises(TimeoutError, match="removal of blocks"):
        scripted_driver.forget(KEYS, "lease", timeout_s=0.01)


SAVED = SaveResult(3, committed=True)
HELD = SaveResult(3, committed=True, is_held=True)


@pytest.mark.parametrize(
    "results",
    [
        TransferResults(loads=(LoadResult(3, 1), LoadResult(3, 1))),
        TransferResults(saves=(SAVED, SAVED)),
        TransferResults(lookups=(LookupResult(3, 1), LookupResult(3, 0))),
        TransferResults(released=(3,)),
        TransferResults(saves=(SAVED,), released=(3,)),
        TransferResults(saves=(HELD,), released=(3, 3)),
    ],
    ids=["load", "save", "look-up", "unknown release", "not held", "released twice"],
)
def test_a_broken_contract_is_an_error(
    scripted_driver: ConnectorDriver, worker: ScriptedWorker, results: TransferResults
) -> None:
    worker.scripted = [results]
    with pytest.raises(ContractError, match="3 "):
        scripted_driver.step()


def test_a_second_result_is_an_error_in_a_later_step(
    scripted_driver: ConnectorDriver, worker: ScriptedWorker
) -> None:
    worker.scripted = [TransferResults(saves=(SAVED,)), TransferResults(saves=(SAVED,))]
    scripted_driver.step()
    with pytest.raises(ContractError, match="save 3 ended twice"):
        scripted_driver.step()


def test_a_connector_that_refuses_the_pool_is_closed(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*pool: object) -> None:
        raise ConfigurationError("no such pool")

    monkeypatch.setattr(worker, "register_pool", refuse)
    with pytest.raises(ConfigurationError):
        ConnectorDriver((KvConnectorScheduler("fake", lease_s=1), worker), new_pool(), LAYOUT)
    assert worker.is_closed
