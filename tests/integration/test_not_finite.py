"""Only the request whose logits are not finite fails, and its blocks are freed."""

import math

import pytest

from baton.common.errors import InternalError
from engine.config import EngineConfig
from engine.loop.core import EngineCore
from engine.request import FinishReason
from engine.runtime.model_runner import ModelRunner
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.requests import engine_request


@pytest.fixture
def engine_and_pool():
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")),
        device="cpu",
        dtype="float32",
        max_model_len=128,
        num_gpu_blocks_override=32,
    )
    runner = ModelRunner(config, progress=False)
    engine = EngineCore(config, runner)
    yield engine, runner.kv_pool
    engine.close()


def test_only_the_poisoned_request_fails(engine_and_pool):
    engine, pool = engine_and_pool
    prompts = {"good": prompt_of(20, seed=1), "bad": prompt_of(30, seed=2)}
    for request_id, prompt in prompts.items():
        engine.scheduler.add(
            engine_request(request_id=request_id, prompt_token_ids=tuple(prompt), max_tokens=5)
        )
    first = []
    engine.run_step(first.extend)
    outputs = {output.request_id: output for output in first}
    tokens = {request_id: list(output.token_ids) for request_id, output in outputs.items()}
    _poison_blocks_of(engine, "bad", pool)
    last = outputs
    for _ in range(5):
        step_outputs = []
        engine.run_step(step_outputs.extend)
        for output in step_outputs:
            tokens[output.request_id] += output.token_ids
            last[output.request_id] = output
    assert tokens["good"] == reference_greedy(tiny_checkpoint("llama"), prompts["good"], 5)
    assert last["good"].finish_reason is FinishReason.LENGTH
    assert len(tokens["bad"]) == 1
    assert last["bad"].finish_reason is FinishReason.ERROR
    assert isinstance(last["bad"].error, InternalError)
    assert engine.scheduler.load().num_free_blocks == engine.num_blocks


def _poison_blocks_of(engine, request_id, pool):
    """Writes NaN to a request's KV, as a broken kernel or a device fault might."""
    group = engine.scheduler._groups[request_id]
    pool[list(group.held_blocks())] = math.nan
