"""A real decode engine computes while its store is slow, and uses the store again afterwards."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.kv_transfer.costs import LoadCosts
from engine.loop.core import EngineCore
from engine.request import EngineRequest, FinishReason
from engine.runtime.device import with_device_defaults
from engine.runtime.model_runner import ModelRunner
from kvstore.connector import KvConnectorScheduler
from kvstore.registry import open_store
from kvstore.store import GetStatus, KvObject
from kvstore.store_connector import StoreConnectorWorker
from kvstore.stores.memory import MemoryStore
from tests.support.checkpoints import tiny_checkpoint
from tests.support.engine_work import has_work
from tests.support.real_engines import build_core, hand_over, run_all, tokens_of
from tests.support.requests import engine_request

pytestmark = pytest.mark.alone

NUM_TOKENS = 4
PROMPT_TOKENS = 40


class HeldStore:
    """Holds the reads of a store until `is_open` is set."""

    def __init__(self, store: MemoryStore) -> None:
        self._get_frames_into = store.get_into
        self.is_open = threading.Event()
        store.get_into = self.get_into

    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        assert self.is_open.wait(60)
        return self._get_frames_into(keys, objects)


class Decode:
    """A decode engine on a held store, with a clock that tests can stop."""

    def __init__(self, model: Path, url: str) -> None:
        self._stopped_at: float | None = None
        store = open_store(url)
        assert isinstance(store, MemoryStore)
        self.held = HeldStore(store)
        config = with_device_defaults(
            EngineConfig(
                model=str(model),
                dtype="float32",
                max_model_len=256,
                num_gpu_blocks_override=64,
                kv_connector=url,
                enable_prefix_caching=False,
            )
        )
        connector = KvConnectorScheduler("memory", lease_s=60), StoreConnectorWorker(store)
        self.core = EngineCore(config, ModelRunner(config), connector, self._clock)
        self.metrics = self.core.kv_metrics.of("memory")

    def run(self, request: EngineRequest) -> tuple[list[int], int]:
        """Runs a request; returns its tokens and its number of loaded prompt tokens.

        Its loads may continue afterwards.
        """
        self.core.check(request)
        outputs = self.core.scheduler.add(request)
        self.core.run_step(outputs.extend)
        while self.core.scheduler.num_unfinished:
            self.core.wait()
            self.core.run_step(outputs.extend)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        return tokens_of(outputs), outputs[-1].cached_tokens

    def num_given_up(self, stage: str) -> float:
        return self.metrics.snapshot()[0]["baton_kv_loads_given_up", stage]

    def stop_clock_in(self, seconds: float) -> None:
        """Lets the time stand still later, so that loads are fast, on a busy machine too."""
        self._stopped_at = time.monotonic() + seconds

    def end_transfers(self) -> None:
        self.core.run_step([].extend)
        while has_work(self.core):
            self.core.wait()
            self.core.run_step([].extend)
        self.core.scheduler.check()
        assert self.core.scheduler.load().num_free_blocks == self.core.num_blocks

    def _clock(self) -> float:
        return time.monotonic() if self._stopped_at is None else self._stopped_at


@pytest.fixture
def model() -> Path:
    return tiny_checkpoint("llama")


@pytest.fixture
def decode(model: Path, tmp_path: Path) -> Iterator[Decode]:
    decode = Decode(model, f"memory://{tmp_path.name}")
    yield decode
    decode.held.is_open.set()
    decode.core.close()


@pytest.fixture
def prefill(model: Path, tmp_path: Path) -> Iterator[EngineCore]:
    core = build_core(model, "prefill", kv_connector=f"memory://{tmp_path.name}")
    yield core
    core.close()


def _requests(count: int) -> list[EngineRequest]:
    return [
        engine_request(
            request_id=f"r{number}",
            prompt_token_ids=tuple((31 * number + 7 * i) % 256 for i in range(PROMPT_TOKENS)),
            max_tokens=NUM_TOKENS,
        )
        for number in range(count)
    ]


def test_a_slow_stores_loads_are_dropped_and_it_is_used_again_once_it_is_fast(
    model: Path, prefill: EngineCore, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = LoadCosts.end  # it gets the seconds of another clock, too
    monkeypatch.setattr(LoadCosts, "end", lambda costs, load, now, _: end(costs, load, now))
    requests = _requests(7)
    whole = build_core(model, "both")
    expected = {name: tokens_of(out) for name, out in run_all(whole, requests).items()}
    whole.close()
    answers = run_all(prefill, requests)
    handed = [hand_over(request, answers[request.spec.request_id]) for request in requests]

    def check(request: EngineRequest, num_loaded: int) -> None:
        first = [progress.output_token_ids[0] for progress in request.progress]
        tokens, num_cached = decode.run(request)
        assert (first + tokens, num_cached) == (expected[request.spec.request_id], num_loaded)

    # Loads that hang are dropped; after four of them no load is started.
    for request in handed[:4]:
        check(request, 0)
    assert decode.num_given_up("loading") == 4
    check(handed[4], 0)
    assert decode.num_given_up("admission") == 1

    # The dropped loads end, and have touched no block of another request.
    decode.held.is_open.set()
    decode.end_transfers()

    # One trial load is fast, and from then on every request loads.
    decode.stop_clock_in(6.0)
    check(handed[5], PROMPT_TOKENS)
    check(handed[6], PROMPT_TOKENS)
    assert decode.num_given_up("admission") == 1
    decode.end_transfers()
