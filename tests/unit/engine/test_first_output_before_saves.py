"""Outputs are delivered before the next forward pass, and before saves start."""

from collections.abc import Sequence

import pytest

from engine.batch import ScheduledBatch, StepOutput
from engine.loop.core import EngineCore
from engine.request import EngineOutput, FinishReason
from kvstore.connector import KvConnectorScheduler
from kvstore.jobs import SaveJob
from tests.support.fake_connector import FakeWorker
from tests.support.fake_runner import FakeRunner, fake_config, fake_info
from tests.support.prefill_core import with_role
from tests.support.requests import engine_request

BLOCK_SIZE = 4


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
            kv_connector="fake://",
            max_num_batched_tokens=BLOCK_SIZE,
            async_scheduling=False,
        )
        scheduler = KvConnectorScheduler("fake", lease_s=60, finds_by_key=False)
        self.core = with_role(EngineCore(config, self.runner, (scheduler, self.worker)), "prefill")

    def add(self, request_id: str, prompt: tuple[int, ...]) -> None:
        self.core.scheduler.add(
            engine_request(request_id=request_id, prompt_token_ids=prompt, max_tokens=4)
        )

    def num_computed(self, request_id: str) -> int:
        return self.core.scheduler._groups[request_id].lead.num_computed

    def step(self) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        self.core.run_step(outputs.extend)
        return outputs

    def step_after_transfers(self) -> tuple[list[EngineOutput], int]:
        """Ends all transfers and runs a step. Returns its outputs and the number of batches run."""
        self.worker.end_all()
        before = self.runner.num_executed
        outputs = self.step()
        return outputs, self.runner.num_executed - before


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


def test_saved_blocks_are_reported_before_the_next_chunk_is_computed(prefill: Prefill) -> None:
    prefill.add("a", (0,) * 3 * BLOCK_SIZE)
    assert prefill.step() == []  # the first chunk

    (output,), num_executed = prefill.step_after_transfers()

    assert output.saved is not None
    assert len(output.saved.block_keys) == 1
    assert num_executed == 0
    assert not prefill.core.is_stalled  # the caller runs the next step at once
    prefill.step()
    assert prefill.runner.num_executed == 2


def test_a_handoff_is_sent_before_the_chunk_of_another_prompt_is_computed(prefill: Prefill) -> None:
    prefill.add("a", (0,) * BLOCK_SIZE)
    prefill.add("b", (1,) * 3 * BLOCK_SIZE)
    (first,) = prefill.step()
    assert first.token_ids

    outputs, num_executed = prefill.step_after_transfers()

    assert outputs[-1].finish_reason is FinishReason.HANDOFF
    assert outputs[-1].handoff is not None
    assert num_executed == 0


def test_first_tokens_are_delivered_before_their_saves_start(prefill: Prefill) -> None:
    pending: list[list[object]] = []
    prefill.add("a", (0,) * BLOCK_SIZE)

    def on_outputs(outputs: Sequence[EngineOutput]) -> None:
        assert outputs[0].token_ids
        pending.append([*prefill.worker.pending])

    prefill.core.run_step(on_outputs)
    assert pending == [[]]
    assert [type(job) for job in prefill.worker.pending] == [SaveJob]


def test_blocks_saved_during_a_step_are_reported_during_that_step(prefill: Prefill) -> None:
    num_committed: list[int] = []
    outputs: list[EngineOutput] = []

    def on_outputs(early: Sequence[EngineOutput]) -> None:
        outputs.extend(early)
        num_committed.append(prefill.num_computed("a"))

    prefill.add("a", (0,) * 3 * BLOCK_SIZE)
    prefill.step()  # the first chunk
    prefill.worker.ends_in_steps = True

    prefill.core.run_step(on_outputs)

    (early,) = outputs
    assert early.saved is not None
    assert len(early.saved.block_keys) == 1
    assert prefill.runner.num_executed == 2
    assert num_committed == [BLOCK_SIZE], "the second chunk is not committed yet"
    assert prefill.num_computed("a") == 2 * BLOCK_SIZE


def fail(outputs: Sequence[EngineOutput]) -> None:
    raise ValueError("a bug")


def test_an_error_in_early_delivery_is_raised_after_the_step_is_committed(prefill: Prefill) -> None:
    prefill.add("a", (0,) * 3 * BLOCK_SIZE)
    prefill.step()
    prefill.worker.ends_in_steps = True
    with pytest.raises(ValueError, match="a bug"):
        prefill.core.run_step(fail)
    assert prefill.num_computed("a") == 2 * BLOCK_SIZE, "the step itself has not failed"
    assert prefill.core.scheduler.num_unfinished


def test_an_error_in_early_delivery_is_raised_once(prefill: Prefill) -> None:
    """`LLM` raises the error of a failed request from its handler and reuses the engine."""
    prefill.add("a", (0,) * 3 * BLOCK_SIZE)
    prefill.step()
    prefill.worker.ends_in_steps = True
    with pytest.raises(ValueError, match="a bug"):
        prefill.core.run_step(fail)
    prefill.core.scheduler.abort(["a"])

    prefill.add("b", (1,) * BLOCK_SIZE)
    outputs = [*prefill.step(), *prefill.step()]
    assert any(output.request_id == "b" and output.token_ids for output in outputs)
