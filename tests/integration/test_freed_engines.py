"""Engines that were closed: their memory is free at once, without Python's garbage collector."""

import gc
import weakref

import pytest

from baton import LLM, SamplingParams, StructuredOutputs
from baton.common.errors import UnavailableError
from engine.config import EngineConfig
from engine.loop.async_engine import AsyncEngine
from engine.loop.build import build_engine
from tests.support.checkpoints import tiny_checkpoint
from tests.support.requests import engine_request
from tests.support.runner_kinds import use_kind

PROMPT = [3, 4, 5] * 12
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FORMED = SamplingParams(max_tokens=6, structured_outputs=StructuredOutputs(regex="[a-z]{4}"))
RARE = ("qwen3_moe", "lfm2", "deepseek_v2")
ITSELF = "the served model"
ARGUMENTS = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 24}


@pytest.fixture(autouse=True)
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("variant", "arguments"),
    [
        ("llama", {}),
        ("llama", {"async_scheduling": True, "speculative_config": {"method": "ngram"}}),
        ("llama", {"speculative_config": {"model": ITSELF, "num_speculative_tokens": 2}}),
        ("llama", {"kv_connector": "memory://freed"}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in RARE),
    ],
)
def test_a_closed_llm_is_freed(variant, arguments):
    """Its weights when it is closed, all of it with the last reference."""
    path = tiny_checkpoint(variant)
    drafts = arguments.get("speculative_config", {})
    if drafts.get("model") == ITSELF:
        arguments = {"speculative_config": {**drafts, "model": str(path)}}
    llm = LLM(str(path), **ARGUMENTS, **arguments)
    params = FORMED if "kv_connector" in arguments else PARAMS
    llm.generate([PROMPT] * 2, params, use_tqdm=False)
    core, runner = weakref.ref(llm._core), weakref.ref(llm._core._runner)
    model, steps = weakref.ref(runner()._model), weakref.ref(runner()._steps)
    llm.close()
    assert (model(), steps()) == (None, None)
    with pytest.raises(UnavailableError, match="this LLM was closed"):
        llm.generate([PROMPT], PARAMS, use_tqdm=False)
    llm.close()
    del llm
    assert (core(), runner()) == (None, None)


def test_a_step_in_flight_does_not_keep_the_weights(monkeypatch):
    """As after an answer that has ended sooner than it might have."""
    use_kind("device, eager", monkeypatch)
    path = str(tiny_checkpoint("llama"))
    core = build_engine(EngineConfig(model=path, async_scheduling=True, **ARGUMENTS))
    core.scheduler.add(engine_request("a", tuple(PROMPT), max_tokens=20, ignore_eos=True))
    for _ in range(3):
        core.run_step(lambda outputs: None)
    assert core._loop.is_in_flight
    runner = core._runner
    model, steps = weakref.ref(runner._model), weakref.ref(runner._steps)
    core.close()
    assert (model(), steps()) == (None, None)


@pytest.mark.parametrize("kind", ["host", "device, graphs"])
async def test_a_closed_engine_of_a_worker_has_no_weights(kind, monkeypatch):
    use_kind(kind, monkeypatch)
    config = EngineConfig(model=str(tiny_checkpoint("llama")), **ARGUMENTS)
    engine = await AsyncEngine.start(config)
    runner = engine._core._runner
    model, steps = weakref.ref(runner._model), weakref.ref(runner._steps)
    await engine.close()
    assert (model(), steps()) == (None, None)
