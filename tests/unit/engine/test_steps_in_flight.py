"""Steps of a pipeline: several are in flight, and end in order."""

import pytest

from engine.batch import ScheduledBatch
from tests.support.checked_engine import CheckedEngine, CheckedRequest
from tests.support.fake_model import fake_info
from tests.support.requests import engine_request


def test_a_step_that_cannot_be_submitted_ends_after_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = fake_info(4, 40)
    engine = CheckedEngine(
        info,
        50,
        async_scheduling=True,
        pipeline_parallel_size=3,
        kv_transfer_layer_slices=1,
        max_num_batched_tokens=2,
    )
    request = engine_request(request_id="a", prompt_token_ids=(0,) * 20, max_tokens=2)
    engine.add(CheckedRequest.of(request, info))
    submit, num_submitted = engine.runner.submit, []

    def fail_second(batch: ScheduledBatch) -> object:
        num_submitted.append(len(engine.core.scheduler.steps_in_flight) - 1)
        if len(num_submitted) == 2:
            raise RuntimeError("the other ranks cannot be reached")
        return submit(batch)

    monkeypatch.setattr(engine.runner, "submit", fail_second)
    ended = []
    for _ in range(2):
        engine.core.run_step(ended.extend)
    assert num_submitted == [0, 1]  # the step before is in flight
    assert [output.error is not None for output in ended] == [True]
    assert engine.core.scheduler.steps_in_flight == []
