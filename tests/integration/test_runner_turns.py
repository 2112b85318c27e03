"""`ModelRunner` computes in its turn, and waits for a turn only to compute."""

from contextlib import ExitStack

import pytest

from engine.batch import ScheduledBatch, ScheduledChunk, StepOutput, TableUpdate
from engine.config import EngineConfig
from engine.runtime.launch import launcher
from engine.runtime.launch.pools import Pools
from engine.runtime.launch.trial_steps import TrialSteps
from engine.runtime.model_runner import ModelRunner
from engine.runtime.turns import Turns
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.driven_requests import GREEDY, DrivenRequest, run_step
from tests.support.turn_taker import is_held, wait_until

PROMPT = tuple(prompt_of(21, seed=7))
TABLE = (4, 5, 6)


@pytest.fixture
def make(tmp_path):
    """Makes runners that share `tmp_path`."""
    with ExitStack() as made:

        def make():
            config = EngineConfig(
                model=str(tiny_checkpoint("llama")),
                dtype="float32",
                device="cpu",
                max_model_len=48,
                num_gpu_blocks_override=16,
                swap_space=2**20,
                turns_folder=str(tmp_path),
            )
            runner = ModelRunner(config, progress=False)
            made.callback(runner.close)
            return runner

        yield make


def step_with_prompt(number):
    chunk = ScheduledChunk(0, PROMPT, 0, (GREEDY,))
    return ScheduledBatch(number, (chunk,), table_updates=(TableUpdate(0, 0, 0, TABLE),))


def test_a_step_computes_in_its_turn(make, tmp_path):
    runner, neighbour = make(), Turns(str(tmp_path))
    with neighbour.wait_for_turn():
        submitted = runner.submit(step_with_prompt(1))
        wait_until(lambda: is_held(tmp_path / "next"))
        assert not submitted.done()
    assert len(submitted.result(timeout=60).chunks[0].token_ids) == 1
    assert not is_held(tmp_path / "turn")
    neighbour.close()


def test_a_step_without_tokens_does_not_wait(make, tmp_path):
    runner, neighbour = make(), Turns(str(tmp_path))
    tables = ScheduledBatch(1, table_updates=(TableUpdate(0, 0, 0, TABLE),), swap_outs=((4, 0),))
    with neighbour.wait_for_turn():
        assert runner.execute(tables) == StepOutput(1)
    neighbour.close()


def test_a_step_that_fails_ends_its_turn(make, tmp_path, monkeypatch):
    runner = make()
    held = []

    def fail(*arguments):
        held.append(is_held(tmp_path / "turn"))
        raise ZeroDivisionError

    monkeypatch.setattr(runner._steps, "launch", fail)
    with pytest.raises(ZeroDivisionError):
        runner.execute(step_with_prompt(1))
    assert held == [True]
    assert not is_held(tmp_path / "turn")


def test_the_model_is_loaded_outside_of_a_turn_and_timed_in_one(make, tmp_path, monkeypatch):
    held = {}
    (tmp_path / "turn").touch()

    def noting(name, function):
        def note(*arguments, **named):
            held[name] = is_held(tmp_path / "turn")
            return function(*arguments, **named)

        return note

    monkeypatch.setattr(launcher, "load_model", noting("load", launcher.load_model))
    for owner, name in (
        (TrialSteps, "profile"),
        (TrialSteps, "time_prompt_token"),
        (Pools, "time_swapped_block"),
    ):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    make()
    assert held.pop("load") is False
    assert len(held) == 3
    assert all(held.values())
    assert not is_held(tmp_path / "turn")


def test_one_thread_steps_two_engines_that_take_turns(make):
    runners = [make(), make()]
    requests = [DrivenRequest(PROMPT, 0, [TABLE]) for _ in runners]
    for step in range(8):
        for runner, request in zip(runners, requests, strict=True):
            run_step(runner, step, [request])
    expected = reference_greedy(tiny_checkpoint("llama"), PROMPT, 8)
    assert [request.drawn for request in requests] == [expected, expected]


def test_a_closed_runner_does_not_wait(make, tmp_path, caplog):
    runner, neighbour = make(), Turns(str(tmp_path))
    runner.close()
    runner.close()
    with neighbour.wait_for_turn(), runner.turns.wait_for_turn():
        pass
    assert caplog.records == []  # no warning about a stopped engine
    neighbour.close()
