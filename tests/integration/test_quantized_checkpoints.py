"""Models of quantized checkpoints: their tokens are those of `transformers` on the same weights."""

from contextlib import closing

import pytest

from engine.runtime.weights.loader import load_model
from tests.support.checkpoints import prompt_of, reference_greedy
from tests.support.quantized_layers import KINDS, quantized_folders
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request

_NUM_TOKENS = 16
_CASES = [
    ("llama", "gptq", {}),
    ("llama", "gptq in another order", {"tensor_parallel_size": 2}),
    ("llama", "awq", {"tensor_parallel_size": 2}),
    ("llama", "w8a16 groups with zero points", {}),
    ("llama", "w8a8 channels", {"tensor_parallel_size": 2}),
    ("llama", "fp8 blocks", {}),
    ("qwen3_moe", "gptq 8 bits, v2", {}),
    ("qwen3_moe", "fbgemm", {"tensor_parallel_size": 2}),
    ("gemma3", "w8a16 channels", {}),
]


def _greedy(path, prompt, **flags):
    with closing(build_core(path, "both", dtype="float32", **flags)) as core:
        request = engine_request("a", tuple(prompt), max_tokens=_NUM_TOKENS, ignore_eos=True)
        return tokens_of(run_all(core, [request])["a"])


@pytest.mark.parametrize(("variant", "form", "flags"), _CASES)
def test_greedy_tokens_are_those_of_transformers(variant, form, flags, tmp_path):
    quantized, dense = quantized_folders(variant, KINDS[form], tmp_path)
    prompt = prompt_of(30)
    assert _greedy(quantized, prompt, **flags) == reference_greedy(dense, prompt, _NUM_TOKENS)


def test_transformers_reads_the_same_checkpoint(tmp_path):
    """It takes `quantization_config` as it is written here."""
    quantized, dense = quantized_folders("llama", KINDS["w4a16 groups"], tmp_path)
    prompt = prompt_of(20)
    assert reference_greedy(quantized, prompt, 8) == reference_greedy(dense, prompt, 8)


@pytest.mark.parametrize(("stated", "expected"), [("float16", "bfloat16"), ("float32", "float32")])
def test_quantized_weights_are_not_computed_in_float16(stated, expected, tmp_path):
    folder, _ = quantized_folders("llama", KINDS["awq"], tmp_path, dtype=stated)
    model = load_model(str(folder), "auto", "cpu", progress=False, load_format="dummy")
    assert model.dtype == expected
