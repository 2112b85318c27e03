"""Engines on stand-ins for CUDA graphs: with a decode tier's requests nearly all steps are replays,
and their tokens are those of eager steps.
"""

from collections import Counter
from contextlib import closing

import pytest

from engine.runtime.steps.device_steps import DeviceSteps
from engine.speculation import drafts
from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.constrained_requests import mixed_requests
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import changed, engine_request
from tests.support.runner_kinds import use_kind

pytestmark = pytest.mark.slow

_FLAGS = {
    "block_size": 8,
    "max_model_len": 96,
    "num_gpu_blocks_override": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "async_scheduling": True,
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
    },
}


@pytest.fixture(autouse=True)
def _any_number_of_drafts(monkeypatch):
    """Drafts as many tokens as allowed: what they cost is not known without measured steps."""
    monkeypatch.setattr(drafts.Drafts, "committed", lambda *_: None)


def _requests():
    """Returns constrained requests, some that repeat their prompts, and plain ones."""
    repeated = [
        engine_request(
            request_id=f"repeated {index}",
            prompt_token_ids=tuple(prompt_of(5, seed=index)) * 4,
            max_tokens=30,
            temperature=float(index % 2),
            seed=index,
        )
        for index in range(3)
    ]
    constrained = [changed(request, max_tokens=30) for request in mixed_requests()[:3]]
    beams = changed(repeated[0], request_id="beams", n=3, beam_width=3, max_tokens=8)
    return [*constrained, *repeated, beams]


def _tokens_and_steps(kind, monkeypatch):
    """Returns all tokens of a second run, whose prompts are cached, and how many steps of it were
    graphs.
    """
    is_captured = Counter()
    run = DeviceSteps._run

    def count(steps, step):
        is_captured[step.is_captured] += 1
        return run(steps, step)

    with monkeypatch.context() as patched:
        use_kind(kind, patched)
        patched.setattr(DeviceSteps, "_run", count)
        with closing(build_core(tiny_checkpoint("llama"), "both", **_FLAGS)) as core:
            run_all(core, _requests())
            is_captured.clear()
            outputs = run_all(core, _requests())
            values = core.metrics.snapshot().values
    checked = [values["baton_engine_draft_tokens", kind] for kind in ("accepted", "rejected")]
    assert sum(checked) > 10
    tokens = {
        name: [tokens_of(of_one, index) for index in range(3)] for name, of_one in outputs.items()
    }
    return tokens, is_captured


def test_tokens_are_those_of_eager_steps_and_nearly_all_steps_are_graphs(monkeypatch):
    eager, is_captured = _tokens_and_steps("device, eager", monkeypatch)
    assert not is_captured[True]
    tokens, is_captured = _tokens_and_steps("device, graphs", monkeypatch)
    assert tokens == eager
    assert is_captured[True] > 0.95 * is_captured.total()
