"""States of recurrent layers in a store: other engines go on at them, and no token changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.kv_cache.spec import StateSpacing
from engine.loop.core import EngineCore
from engine.request import CandidateProgress
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.real_engines import engine, run_all, tokens_of
from tests.support.requests import changed, engine_request

BLOCK = 8
NUM_TOKENS = 50
NUM_FEW = 4


def _reference(variant: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return reference_greedy(tiny_checkpoint(variant), list(prompt), num_tokens)


@contextmanager
def _opened(url: str, variant: str = "lfm2", **flags: object) -> Iterator[EngineCore]:
    flags = {"kv_connector": url, "kv_load_failure_policy": "fail"} | flags
    with engine(variant, block_size=BLOCK, **flags) as core:
        yield core


def _num_computed(core: EngineCore) -> int:
    return int(core.metrics.snapshot().histograms["baton_engine_step_tokens",].total)


@pytest.fixture(autouse=True)
def _states_every_64_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 512 tokens apart otherwise."""
    monkeypatch.setattr(StateSpacing, "of", lambda interval: StateSpacing(interval, 64))


def test_prompts_go_on_at_the_last_states_that_others_have_saved(tmp_path: Path) -> None:
    """A prompt's states are saved at multiples of 64 tokens, and at its last full block."""
    url = f"memory://{tmp_path.name}"
    long, other = tuple(prompt_of(140, seed=3)), tuple(prompt_of(140, seed=4))
    first = engine_request("first", long, max_tokens=NUM_FEW)
    with _opened(url) as saver, _opened(url) as core:
        assert tokens_of(run_all(saver, [first])["first"]) == _reference("lfm2", long, NUM_FEW)
        for place, num_cached in ((63, 0), (65, 64), (135, 128), (137, 136)):
            prompt = long[:place] + other[place:]
            core.scheduler.reset_prefix_cache()
            before = _num_computed(core)
            outputs = run_all(core, [changed(first, prompt_token_ids=prompt)])["first"]
            assert tokens_of(outputs) == _reference("lfm2", prompt, NUM_FEW)
            assert outputs[0].cached_tokens == num_cached
            assert _num_computed(core) - before == 140 - num_cached + NUM_FEW - 1


@pytest.mark.parametrize("variant", ["lfm2", "qwen3_5"])
def test_a_lost_request_resumes_at_any_token(variant: str, tmp_path: Path) -> None:
    flags = {"state_interval": BLOCK, "kv_publish": "1"}
    prompt = tuple(prompt_of(21, seed=5))
    request = engine_request("a", prompt, max_tokens=NUM_TOKENS)
    expected = _reference(variant, prompt, NUM_TOKENS)
    url = f"memory://{tmp_path.name}"
    with _opened(url, variant, **flags) as lost, _opened(url, variant, **flags) as core:
        assert tokens_of(run_all(lost, [request])["a"]) == expected
        for num_before in range(1, NUM_TOKENS):
            core.scheduler.reset_prefix_cache()
            before = _num_computed(core)
            progress = (CandidateProgress(0, tuple(expected[:num_before])),)
            resumed = changed(request, progress=progress)
            assert tokens_of(run_all(core, [resumed])["a"]) == expected[num_before:]
            # States are saved at 16, the last full block of the prompt, and at 64.
            num_known = len(prompt) + num_before
            num_loaded = 64 if num_known > 64 else 16
            computed = _num_computed(core) - before
            assert computed <= num_known - num_loaded + NUM_TOKENS - num_before - 1
