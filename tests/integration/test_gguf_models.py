"""Models in GGUF files: their weights are those of `gguf`, their tokens those of `transformers`."""

import copy

import gguf
import numpy as np
import pytest
import torch
import transformers

from baton.errors import ConfigurationError
from baton.gguf import GgufFile
from engine.runtime.checkpoint import open_checkpoint
from engine.runtime.gguf_weights import GgufWeights
from engine.runtime.loader import load_model
from tests.support.checkpoints import (
    prompt_of,
    reference_greedy,
    reference_model,
    tiny_checkpoint,
)
from tests.support.gguf_files import (
    dequantized,
    gguf_name,
    model_metadata,
    save_model,
    save_rounded,
    write_gguf,
)
from tests.support.real_engines import SplitRun, build_core, run_all, tokens_of
from tests.support.requests import engine_request

Kind = gguf.GGMLQuantizationType
CASES = [
    ("llama", Kind.F32),
    ("llama_tied_biased", Kind.Q4_0),
    ("llama_sharded", Kind.F16),  # heads of 24 elements in a model of width 64
    ("qwen2", Kind.Q8_0),
    ("qwen3", Kind.BF16),
    ("qwen3_untied", Kind.Q4_1),
]
NUM_TOKENS = 24


def copied_model(variant):
    return copy.deepcopy(reference_model(tiny_checkpoint(variant)))


def greedy(path, prompt):
    core = build_core(path, "both")
    try:
        request = engine_request("a", tuple(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
        return tokens_of(run_all(core, [request])["a"])
    finally:
        core.close()


@pytest.mark.parametrize(("variant", "kind"), CASES)
def test_greedy_tokens_are_those_of_transformers(variant, kind, tmp_path):
    model = copied_model(variant)
    path = tmp_path / "model.gguf"
    rounded = save_model(path, model, kind)
    folder = save_rounded(tmp_path / "folder", model, rounded)
    prompt = prompt_of(30)
    assert greedy(path, prompt) == reference_greedy(folder, prompt, NUM_TOKENS)
    with GgufWeights(GgufFile(path).header, torch.float32) as tensors:
        assert set(tensors.keys()) == set(rounded)
        for name, expected in rounded.items():
            assert torch.equal(tensors.get_tensor(name), expected), name
