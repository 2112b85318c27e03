"""Models in GGUF files with several formats: tokens, ranks, shared weights, and what is kept."""

import pytest
import torch

from tests.support.described_models import described_model
from tests.support.quantized_checkpoints import MIXTURES, save_quantized
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request

# Longer than the windows of the layers that have one.
PROMPT = tuple(number % 251 for number in range(70))
NUM_TOKENS = 16


def greedy(path, **flags):
    core = build_core(path, "both", **flags)
    try:
        request = engine_request("a", PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
        return tokens_of(run_all(core, [request])["a"])
    finally:
        core.close()


@pytest.mark.parametrize("name", MIXTURES)
def test_tokens_are_those_of_transformers_with_the_numbers_of_the_file(name, tmp_path):
    path = save_quantized(tmp_path / "model.gguf", name)
    drawn = greedy(path)
    tokens = torch.tensor([[*PROMPT, *drawn]])
    with torch.inference_mode():
        logits = described_model(path)(tokens).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == drawn
