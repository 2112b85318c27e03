"""What transfers bring is told before the forward pass that comes next, not after it."""

import threading
from collections.abc import Callable, Sequence

import pytest

from engine.batch import DrawParams, ScheduledBatch, StepOutput
from engine.core import EngineCore
from engine.engine_thread import EngineThread
from engine.request import FinishReason, RequestOutput
from kvstore.connector import KvConnectorScheduler
from kvstore.jobs import SaveJob
from tests.support.fake_connector import FakeWorker
from tests.support.fake_runner import FakeRunner, fake_config, fake_info
from tests.support.requests import engine_request

BLOCK_SIZE = 4
GREEDY = DrawParams(temperature=0, top_k=0, top_p=1, seed=0)


class CountingRunner(FakeRunner):
    num_executed = 0

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self.num_executed += 1
        return super().execute(batch)


class Prefill:
    """A prefill engine that computes a block per step."""

    def __init__(self) -> None:
        self.runner = CountingRunner(
            fake_info(block_size=BLOCK_SIZE, max_model_len=64), num_blocks=32
        )
        self.worker = FakeWorker({})
        config = fake_config(
            block_size=BLOCK_SIZE,
            role="prefill",
            kv_connector="fake://",
            max_num_batched_tokens=BLOCK_SIZE,
            async_scheduling=False,
        )
        scheduler = KvConnectorScheduler("fake", lease_s=60, finds_by_key=False)
        self.core = EngineCore(config, self.runner, (scheduler, self.worker))

    def add(self, request_id: str, prompt: tuple[int, ...]) -> None:
        self.core.add_request(
            engine_request(request_id=request_id, prompt_token_ids=prompt, max_tokens=4)
        )

    def step_after_transfers(self) -> tuple[list[RequestOutput], int]:
        """Ends what is under way, and steps: what is told, and how many batches ran."""
        self.core.start_transfers()
        self.worker.end_all()
        before = self.runner.num_executed
        outputs = self.core.step()
        return outputs, self.runner.num_executed - before


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


def test_saved_blocks_are_told_before_the_next_chunk_is_computed(prefill: Prefill) -> None:
    prefill.add("a", (0,) * 3 * BLOCK_SIZE)
    assert prefill.core.step() == []  # the first chunk

    (told,), num_executed = prefill.step_after_transfers()

    assert told.saved is not None
    assert len(told.saved.block_keys) == 1
    assert num_executed == 0
    assert not prefill.core.is_stalled  # the caller steps on at once
    prefill.core.step()
    assert prefill.runner.num_executed == 2


def test_a_handoff_does_not_wait_for_another_prompts_chunk(prefill: Prefill) -> None:
    prefill.add("a", (0,) * BLOCK_SIZE)
    prefill.add("b", (1,) * 3 * BLOCK_SIZE)
    (first,) = prefill.core.step()
    assert first.token_ids

    outputs, num_executed = prefill.step_after_transfers()

    assert outputs[-1].finish_reason is FinishReason.HANDOFF
    assert outputs[-1].handoff is not None
    assert num_executed == 0


def test_first_tokens_are_told_before_what_is_saved_is_copied(prefill: Prefill) -> None:
    prefill.add("a", (0,) * BLOCK_SIZE)
    (first,) = prefill.core.step()
    assert first.token_ids
    assert prefill.worker.pending == []
    prefill.core.start_transfers()
    assert [type(job) for job in prefill.worker.pending] == [SaveJob]


def test_blocks_are_told_that_are_saved_while_a_chunk_is_computed(prefill: Prefill) -> None:
    told: list[RequestOutput] = []
    prefill.core.tell_early(told.extend)
    prefill.add("a", (0,) * 3 * BLOCK_SIZE)
    assert prefill.core.step() == []  # the first chunk
    prefill.core.start_transfers()
    prefill.worker.ends_in_steps = True

    outputs = prefill.core.step()

    assert outputs == []
    (early,) = told
    assert early.saved is not None
    assert len(early.saved.block_keys) == 1
    assert prefill.runner.num_executed == 2


def test_news_that_cannot_be_taken_in_end_the_engine_and_not_the_step(prefill: Prefill) -> None:
    def fail(outputs: list[RequestOutput]) -> None:
        raise ValueError("a bug")

    prefill.core.tell_early(fail)
    prefill.add("a", (0,) * 3 * BLOCK_SIZE)
    prefill.core.step()
    prefill.core.start_transfers()
    prefill.worker.ends_in_steps = True
    with pytest.raises(ValueError, match="a bug"):
        prefill.core.step()
    assert prefill.core.has_unfinished, "no request is blamed"


class Told:
    """A core of one step that hears, and a listener that says, what comes when."""

    is_stalled = True

    def __init__(self) -> None:
        self.order: list[str] = []
        self._over = threading.Event()

    def step(self) -> list[RequestOutput]:
        return [] if self.order else [RequestOutput("a", token_ids=(1,))]

    def tell_early(self, tell: Callable[[list[RequestOutput]], None]) -> None:
        """Nothing comes while it steps."""

    def start_transfers(self) -> None:
        self.order.append("transfers")

    def wait(self) -> None:
        self._over.wait(20)

    def wake(self) -> None:
        self._over.set()

    def load(self) -> None:
        """Nobody asks."""

    def close(self) -> None:
        """Nothing is open."""

    def call_soon_threadsafe(self, handler: Callable[..., None], *arguments: object) -> None:
        self.order.append("outputs")
        self._over.set()

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """The loop above calls nobody."""


def test_the_engines_thread_tells_outputs_before_it_starts_transfers() -> None:
    told = Told()
    thread = EngineThread(told, told, told)  # type: ignore[arg-type]
    thread.start()
    assert told._over.wait(20)
    thread.stop()
    thread.join(20)
    assert told.order[:2] == ["outputs", "transfers"]
