"""Models in GGUF files: their weights are those of `gguf`, their tokens those of `transformers`."""

import copy

import gguf
import numpy as np
import pytest
import torch
import transformers

from baton.common.errors import ConfigurationError
from baton.common.model_files.gguf import GgufFile
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.runtime.weights.gguf_weights import GgufWeights
from engine.runtime.weights.loader import load_model
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
NUM_TOKENS = 16


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
    with GgufWeights(GgufFile(path).header, path, torch.float32) as tensors:
        assert set(tensors.keys()) == set(rounded)
        for name, expected in rounded.items():
            assert torch.equal(tensors.get_tensor(name), expected), name


def test_prefill_and_decode_share_the_kv_of_one_file(tmp_path):
    """The fingerprint, which is part of all KV keys, follows the bytes, not the name."""
    model = copied_model("llama")
    path = tmp_path / "a.gguf"
    folder = save_rounded(tmp_path / "folder", model, save_model(path, model, Kind.Q8_0))
    copied = tmp_path / "b.gguf"
    copied.write_bytes(path.read_bytes())
    connector = f"memory://{tmp_path.name}"
    prefill = build_core(path, "prefill", kv_connector=connector)
    decode = build_core(copied, "decode", kv_connector=connector, kv_load_failure_policy="fail")
    try:
        split, prompt = SplitRun(prefill, decode), prompt_of(40)
        split.run([engine_request("a", tuple(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)])
        tokens = [*tokens_of(split.prefilled["a"]), *tokens_of(split.outputs["a"])]
        assert tokens == reference_greedy(folder, prompt, NUM_TOKENS)
    finally:
        prefill.close()
        decode.close()


def test_the_fingerprint_follows_the_bytes(tmp_path):
    path = tmp_path / "model.gguf"
    save_model(path, copied_model("llama"), Kind.Q4_0)
    before = open_checkpoint(str(path)).fingerprint()
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    assert open_checkpoint(str(path)).fingerprint() != before


def test_a_model_may_be_split_into_several_files(tmp_path):
    """Also when the output head, which has other weights than the embedding, is in another one."""
    model, prompt = copied_model("qwen3_untied"), prompt_of(30)
    rounded = save_model(tmp_path / "model.gguf", model, Kind.Q8_0, part_tensors=7)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) > 3
    checkpoint = open_checkpoint(str(parts[0]))
    assert checkpoint.weight_files == tuple(parts)
    folder = save_rounded(tmp_path / "folder", model, rounded)
    assert greedy(parts[0], prompt) == reference_greedy(folder, prompt, NUM_TOKENS)
    data = bytearray(parts[1].read_bytes())
    data[-40] ^= 1
    before = checkpoint.fingerprint()
    parts[1].write_bytes(data)
    assert checkpoint.fingerprint() != before


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.F32, "float32"),
        (Kind.F16, "float16"),
        (Kind.BF16, "bfloat16"),
        (Kind.Q4_1, "bfloat16"),
    ],
)
def test_the_compute_type_is_that_of_the_files_matrices(kind, dtype, tmp_path):
    path = tmp_path / "model.gguf"
    rounded = save_model(path, copied_model("qwen2"), kind)
    loaded = load_model(str(path), "auto", "cpu", progress=False)
    assert loaded.dtype == dtype
    assert loaded.eos_token_ids == (257,)
    norm = loaded.model.checkpoint_tensors()["model.norm.weight"][0].target
    assert torch.equal(norm, rounded["model.norm.weight"].to(getattr(torch, dtype)))


def block_bytes(kind, num_rows, num_columns):
    """Random blocks of a type without a quantizer; halves of floats in them are small numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(3).integers(0, 256, (num_rows * num_columns // block, size))
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    blocks[:, -2:] = scale  # Q6_K's place
    blocks[:, :2] = scale  # the others'
    blocks[:, 2:4] = scale
    return blocks.astype(np.uint8).reshape(num_rows, -1)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ2_XXS])
def test_types_that_only_llama_cpp_writes_are_read(kind, tmp_path, monkeypatch):
    """Read a few rows at a time, with the rows of Q in the order of rotary halves."""
    monkeypatch.setattr("engine.runtime.weights.gguf_weights._PIECE_ELEMENTS", 1000)
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=4, vocab_size=300
    )
    stored = block_bytes(kind, 256, 256), kind
    tensors = {"blk.0.attn_q.weight": stored, "blk.0.attn_v.weight": stored}
    tensors["token_embd.weight"] = np.zeros((300, 256), np.float16), None
    path = write_gguf(tmp_path / "model.gguf", model_metadata(config), tensors)
    expected = torch.from_numpy(dequantized(stored))
    with GgufWeights(GgufFile(path).header, path, torch.float32) as found:
        assert torch.equal(found.get_tensor("model.layers.0.self_attn.v_proj.weight"), expected)
        query = found.get_tensor("model.layers.0.self_attn.q_proj.weight").view(4, 64, 256)
    assert torch.equal(query[:, :32], expected.view(4, 64, 256)[:, ::2])
    assert torch.equal(query[:, 32:], expected.view(4, 64, 256)[:, 1::2])


def test_llama_3_scaling_is_read_from_its_tensor(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        head_dim=128, max_position_embeddings=2**17, rope_parameters=rope
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 128, 2) / 128)
    divisors = (plain / scaled).numpy().astype(np.float32)
    found = read_rope(tmp_path, config, divisors)
    assert found.pop("rope_type") == rope.pop("rope_type")
    assert found == pytest.approx(rope)
    with pytest.raises(ConfigurationError, match=r"rope_freqs.weight has other values than"):
        read_rope(tmp_path, config, divisors[::-1].copy())
    with pytest.raises(ConfigurationError, match=r"tensor rope_freqs.weight is not supported"):
        read_rope(tmp_path, config, divisors[:-1].copy())


def read_rope(tmp_path, config, divisors):
    embedding = np.zeros((300, config.hidden_size), np.float16)
    tensors = {"token_embd.weight": (embedding, None), "rope_freqs.weight": (divisors, None)}
    path = write_gguf(tmp_path / "model.gguf", model_metadata(config), tensors)
    return GgufFile(path).read_json("config.json")["rope_parameters"]


def refused(tmp_path, change):
    """Returns the error for a file of one layer after `change(tensors)`."""
    model = copied_model("llama")
    tensors = {
        gguf_name(name): (weight.numpy(), None) for name, weight in model.state_dict().items()
    }
    change(tensors)
    path = write_gguf(tmp_path / "model.gguf", model_metadata(model.config), tensors)
    with pytest.raises(ConfigurationError) as caught:
        load_model(str(path), "float32", "cpu", progress=False)
    return str(caught.value)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path):
    integers = np.zeros((64, 64), np.int8)
    name = "blk.1.attn_q.weight"
    error = refused(tmp_path, lambda tensors: tensors.update({name: (integers, None)}))
    assert f"tensor {name} has the type I8, which is not supported" in error
    error = refused(tmp_path, lambda tensors: tensors.pop("output_norm.weight"))
    assert "lacks tensor model.norm.weight" in error
    error = refused(tmp_path, lambda tensors: tensors.update(x=(np.zeros(3, np.float32), None)))
    assert "has tensor x" in error
    narrow = np.zeros((60, 64), np.float32)
    error = refused(tmp_path, lambda tensors: tensors.update({name: (narrow, None)}))
    assert f"tensor {name} has shape [60, 64]; its rows come in groups of 16" in error


def test_a_file_that_ends_within_its_weights_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    save_model(path, copied_model("llama"), Kind.F32)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match="it ends within tensor "):
        load_model(str(path), "float32", "cpu", progress=False)
