"""Ctrl-C in a step ends the step's requests, and the engine goes on."""

import pytest

from engine.batch import ScheduledBatch, StepOutput
from engine.request import EngineOutput
from tests.support.checked_engine import CheckedEngine
from tests.support.driven_scheduler import request
from tests.support.engine_work import has_work
from tests.support.fake_model import expected_tokens, fake_info

EXPECTED = {"a": (1, *(1,) * 5), "b": (2, *(1,) * 5), "c": (3, *(1,) * 5)}


class InterruptedWait:
    """A pending output whose first wait is interrupted while the step computes."""

    def __init__(self, pending: object) -> None:
        self._pending = pending
        self._is_interrupted = False

    def result(self) -> StepOutput:
        if not self._is_interrupted:
            self._is_interrupted = True
            raise KeyboardInterrupt
        return self._pending.result()


def interrupt(engine: CheckedEngine, method: str) -> None:
    """Interrupts the next call of the runner's method, before or while the step computes."""
    runner = engine.runner
    original = getattr(runner, method)

    def interrupted(batch: ScheduledBatch) -> object:
        setattr(runner, method, original)
        if method == "submit":
            return InterruptedWait(original(batch))
        raise KeyboardInterrupt

    setattr(runner, method, interrupted)


def generate(engine: CheckedEngine, *names: str) -> dict[str, list[int]]:
    """Does what `LLM.generate` does."""
    tokens: dict[str, list[int]] = {name: [] for name in names}

    def take(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            tokens[output.request_id] += output.token_ids

    try:
        for name in names:
            engine.core.scheduler.add(request(name, first_token=ord(name) - ord("a") + 1))
        while has_work(engine.core):
            engine.core.run_step(take)
            engine.core.scheduler.check()
    finally:
        engine.core.scheduler.abort(names)
    return tokens


@pytest.mark.parametrize("method", ["execute", "submit"])
def test_after_an_interrupt_in_a_step_the_engine_goes_on(method: str) -> None:
    overlaps = method == "submit"
    engine = CheckedEngine(
        fake_info(4, 64), 6, async_scheduling=overlaps, submits="late", max_num_seqs=2
    )
    for _ in range(4):  # each would leak a block of six
        interrupt(engine, method)
        with pytest.raises(KeyboardInterrupt):
            generate(engine, "a", "b", "c")
        engine.core.scheduler.check()
        assert not has_work(engine.core)
        assert engine.core.scheduler.load().num_free_blocks == 6

    tokens = generate(engine, "a", "b", "c")
    assert tokens == {name: expected_tokens(EXPECTED[name], 4) for name in "abc"}
    engine.check_is_empty()
    assert not engine.runner.failures
