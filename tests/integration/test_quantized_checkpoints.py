"""Models of quantized checkpoints: their tokens are those of `transformers` on the same weights."""

import shutil
from contextlib import closing, nullcontext
from functools import partial

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
from baton.common.errors import ConfigurationError
from engine.models.linear import PackedModule
from engine.runtime.weights.loader import load_model
from kernels.formats import FORMATS
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.gguf_families import family_model, save_family
from tests.support.kernel_checks import native_only
from tests.support.quantized_checkpoints import quantized_model
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


@native_only("others compute with dense weights")
@pytest.mark.parametrize(
    ("form", "quantization", "kept_in", "head"),
    [("awq", "awq", "INT4_32", "float32"), (None, "int4", "INT4_32", "INT8")],
)
def test_layers_stay_in_their_formats(form, quantization, kept_in, head, tmp_path):
    folder = tiny_checkpoint("llama")
    if form:
        folder, _ = quantized_folders("llama", KINDS[form], tmp_path)
    model = load_model(str(folder), "float32", "cpu", progress=False, quantization=quantization)
    layers = [module for module in model.model.layers.modules() if isinstance(module, PackedModule)]
    assert len(layers) == 4 * 3
    assert all(kept_in in layer.weight.describe() for layer in layers)
    assert head in model.model.lm_head.weight.describe()


@pytest.mark.parametrize(("stated", "expected"), [("float16", "bfloat16"), ("float32", "float32")])
def test_quantized_weights_are_not_computed_in_float16(stated, expected, tmp_path):
    folder, _ = quantized_folders("llama", KINDS["awq"], tmp_path, dtype=stated)
    model = load_model(str(folder), "auto", "cpu", progress=False, load_format="dummy")
    assert model.dtype == expected


def _dense(folder, parent, rounded_to):
    """Writes a checkpoint with the numbers to which its weights are rounded."""
    written = parent / "rounded"
    shutil.copytree(folder, written)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        is_head = name == "lm_head.weight"
        if is_head or name.endswith("proj.weight"):
            formats = (FORMATS[each] for each in (rounded_to, "INT4_32", "INT8"))
            divides = [each for each in formats if tensor.shape[1] % (each.block or 1) == 0]
            rounded = kernels.quantize_rows(tensor, FORMATS["INT8"] if is_head else divides[0])
            tensors[name] = kernels.dequantize(rounded, torch.float32)
    save_file(tensors, written / "model.safetensors", {"format": "pt"})
    return written


@pytest.mark.parametrize(
    ("variant", "quantization", "rounded_to", "flags"),
    [
        ("llama", "int4", "INT4_32", {"tensor_parallel_size": 2}),  # 48 of 96 columns each
        ("llama", "int8", "INT8", {}),
        ("qwen3_moe", "int4-128", "INT4_128", {}),  # some experts have 40 columns
    ],
)
def test_weights_are_rounded_while_they_are_loaded(
    variant, quantization, rounded_to, flags, tmp_path
):
    folder, prompt = tiny_checkpoint(variant), prompt_of(30)
    expected = reference_greedy(_dense(folder, tmp_path, rounded_to), prompt, _NUM_TOKENS)
    assert _greedy(folder, prompt, quantization=quantization, **flags) == expected


def test_random_weights_are_rounded_too(tmp_path):
    (tmp_path / "config.json").write_text((tiny_checkpoint("llama") / "config.json").read_text())
    load = partial(load_model, str(tmp_path), "float32", "cpu", progress=False, load_format="dummy")
    plain, rounded = load(), load(quantization="int4")
    assert plain.fingerprint != rounded.fingerprint
    tables, layers = (
        [getattr(model.model, name).weight.data for model in (plain, rounded)]
        for name in ("embed_tokens", "lm_head")
    )
    assert torch.equal(*tables)
    assert not torch.equal(*layers)


@native_only("others compute with dense weights")
@pytest.mark.parametrize(("kind", "takes"), [("F16", True), ("Q8_0", False)])
def test_files_of_numbers_are_rounded_too(kind, takes, tmp_path):
    path = save_family(
        tmp_path / "model.gguf", family_model("llama"), gguf.GGMLQuantizationType[kind]
    )
    load = partial(load_model, str(path), "float32", "cpu", progress=False, quantization="int8")
    if takes:
        assert "INT8" in load().model.lm_head.weight.describe()
        return
    with pytest.raises(ConfigurationError, match="stored as gguf already"):
        load()


@pytest.mark.parametrize(("family", "num_tensors"), [("deepseek_v3", 3), ("gpt_oss", 8)])
def test_tensors_that_cannot_be_rounded_are_counted(family, num_tensors, caplog):
    load_model(
        *(str(tiny_checkpoint(family)), "float32", "cpu"), progress=False, quantization="int8"
    )
    (record,) = caplog.records
    assert f"int8 leaves {num_tensors} tensors, which the model stores" in record.getMessage()


def test_models_of_which_only_the_head_can_be_rounded_are_refused():
    with pytest.raises(ConfigurationError, match="is int8; the model stores its layers densely"):
        load_model(
            *(str(tiny_checkpoint("gpt2")), "auto", "cpu"), progress=False, quantization="int8"
        )


def test_types_without_kernels_are_counted(tmp_path, caplog):
    caplog.set_level("INFO", logger="baton.engine")
    path = save_family(
        tmp_path / "model.gguf", quantized_model("llama"), gguf.GGMLQuantizationType.TQ2_0
    )
    load_model(str(path), "float32", "cpu", progress=False)
    assert "tensors of types without kernels are dequantized: TQ2_0 (16)" in caplog.text


def test_random_weights_of_a_quantized_checkpoint_are_dense(tmp_path, caplog):
    folder, _ = quantized_folders("llama", KINDS["awq"], tmp_path)
    load_model(str(folder), "auto", "cpu", progress=False, load_format="dummy")
    (record,) = caplog.records
    assert "random weights are dense; those of" in record.getMessage()
    assert record.getMessage().endswith("are stored as awq")


@pytest.mark.parametrize(
    ("form", "quantization", "problem"),
    [
        ("awq", "gptq", "--quantization is gptq; the weights of .* are stored as awq$"),
        ("awq", "int8", "--quantization is int8; the weights of .* are stored as awq already"),
        (None, "fp8", "--quantization is fp8; the weights of .* are not quantized"),
    ],
)
def test_other_quantizations_than_the_stated_one_are_refused(form, quantization, problem, tmp_path):
    folder = tiny_checkpoint("llama")
    if form:
        folder, _ = quantized_folders("llama", KINDS[form], tmp_path)
        load_model(str(folder), "auto", "cpu", progress=False, quantization=form)
    with pytest.raises(ConfigurationError, match=problem):
        load_model(str(folder), "auto", "cpu", progress=False, quantization=quantization)


def test_biases_of_layers_without_one_must_be_zero(tmp_path):
    folder, _ = quantized_folders("llama", KINDS["gptq"], tmp_path)
    tensors, bias = load_file(folder / "model.safetensors"), torch.zeros(64)
    for number, problem in ((0.0, nullcontext()), (1.0, pytest.raises(ConfigurationError))):
        bias[5] = number
        tensors["model.layers.0.self_attn.o_proj.bias"] = bias
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with problem:
            load_model(str(folder), "float32", "cpu", progress=False)
