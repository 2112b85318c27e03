"""Parts of a step that run at the same time before the first step."""

import threading

import pytest
import torch

import kernels
from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.runtime.launch import launcher
from engine.runtime.launch.compile_ahead import compile_ahead, draw_once
from engine.runtime.launch.launcher import Launcher
from tests.support.checkpoints import tiny_checkpoint

_CPU = torch.device("cpu")
_TIMEOUT_S = 60


def test_parts_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=_TIMEOUT_S)
    passed = []

    def meet():
        barrier.wait()
        passed.append(torch.is_inference_mode_enabled())

    compile_ahead({"one": meet, "two": meet, "three": meet}, _CPU)
    assert passed == [True] * 3


def test_a_part_that_fails_leaves_the_others_and_the_start_alone(caplog):
    def fail():
        raise RuntimeError("no compiler")

    ran = []
    with caplog.at_level("INFO", "baton.engine"):
        compile_ahead({"broken": fail, "whole": lambda: ran.append(1)}, _CPU)
    assert ran == [1]
    assert "kernels of broken were not compiled ahead: no compiler" in caplog.text


@pytest.mark.parametrize("vocab_size", [50257, 32])
def test_draws_are_of_every_kind_and_at_both_alignments(monkeypatch, vocab_size):
    kinds, call = set(), kernels.draw_tokens

    def noted(logits, *args, logit_rows, filtered, **kwargs):
        kinds.add((logits.data_ptr() % 16 == 0, logit_rows is None, filtered))
        return call(logits, *args, logit_rows=logit_rows, filtered=filtered, **kwargs)

    monkeypatch.setattr(kernels, "draw_tokens", noted)
    draw_once(vocab_size, _CPU)
    assert len(kinds) == 4 * (2 if vocab_size % 4 else 1)


def test_the_parts_of_a_models_steps_run_without_a_pool():
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")), dtype="float32", num_threads=1, max_model_len=64
    )
    loaded = Launcher(config, progress=False, ranks=None)
    parts = loaded.parts_of_steps(loaded.trials())
    assert list(parts) == ["draws", "prompts", "short chunks"]
    for run in parts.values():
        run()


def test_a_gpu_that_launches_no_kernel_is_refused_before_the_model_is_loaded(monkeypatch):
    def fail(device):
        raise ConfigurationError(f"no kernel can be launched on {device}")

    monkeypatch.setattr(launcher, "resolve_device", lambda *named: torch.device("cuda", 0))
    monkeypatch.setattr(launcher, "check_launch", fail)
    monkeypatch.setattr(launcher, "load_model", None)
    with pytest.raises(ConfigurationError, match="no kernel can be launched on cuda:0"):
        Launcher(EngineConfig(model="none"), progress=False, ranks=None)
