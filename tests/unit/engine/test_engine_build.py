"""Building an engine: a failure closes the parts that are already open."""

import pytest

import engine.runtime.model_runner
import kvstore.registry
from baton.common.errors import ConfigurationError
from engine.loop.build import build_engine
from kvstore.connector import KvConnectorScheduler
from tests.support.fake_connector import FakeWorker
from tests.support.fake_model import fake_config, fake_info
from tests.support.fake_runner import FakeRunner


class RefusingWorker(FakeWorker):
    """The worker half of a connector that refuses every pool; it records that it is closed."""

    def __init__(self, closed: list[str]) -> None:
        super().__init__({})
        self._closed = closed

    def register_pool(self, *pool: object) -> None:
        raise ConfigurationError("not this pool")

    def close(self) -> None:
        self._closed.append("connector")


class ClosedRunner(FakeRunner):
    def __init__(self, closed: list[str]) -> None:
        super().__init__(fake_info(4, 64), 8)
        self._closed = closed

    def close(self) -> None:
        self._closed.append("runner")


@pytest.mark.parametrize("fails_at", ["model", "pool"])
def test_a_failed_build_closes_the_runner_and_the_connector(
    fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def load_model(config: object, ranks: None) -> FakeRunner:
        if fails_at == "model":
            raise ConfigurationError("no such model")
        return ClosedRunner(closed)

    connector = (KvConnectorScheduler("fake", lease_s=1), RefusingWorker(closed))
    monkeypatch.setattr(kvstore.registry, "open_connector", lambda *_: connector)
    monkeypatch.setattr(engine.runtime.model_runner, "ModelRunner", load_model)
    with pytest.raises(ConfigurationError, match="no"):
        build_engine(fake_config(block_size=4, device="cpu", kv_connector="fake://"))
    assert closed == (["connector"] if fails_at == "model" else ["runner", "connector"])
