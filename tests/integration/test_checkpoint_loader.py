"""Loading checkpoints: the result, the memory used, and the error for each broken folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
from baton.common.errors import ConfigurationError
from baton.common.model_files.files import open_model_files
from engine.runtime.weights import checkpoint as checkpoint_module
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.runtime.weights.loader import LoadedModel, load_model
from tests.support.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, tiny_checkpoint
from tests.support.tokenizer_folders import write_byte_level_folder

WEIGHTS = "model.safetensors"


def load(folder: Path | str, dtype: str = "auto") -> LoadedModel:
    return load_model(str(folder), dtype, "cpu", progress=False)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the plain Llama checkpoint, which tests may break."""
    return copy_of("llama", tmp_path)


def copy_of(variant: str, parent: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint(variant), parent / variant))


def change_json(file: Path, **fields) -> None:
    content = json.loads(file.read_text())
    content.update(fields)
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "drop"}))


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors), folder / WEIGHTS)


def fails_with(folder: Path | str, *parts: str) -> None:
    """Asserts that loading fails with one line that contains all of `parts`."""
    with pytest.raises(ConfigurationError) as failure:
        load(folder)
    assert "\n" not in failure.value.message
    assert len(failure.value.message) < 1000
    for part in parts:
        assert part in failure.value.message


def same_weights(first: LoadedModel, second: LoadedModel) -> bool:
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


# Loaded values


@pytest.mark.parametrize(
    ("stored", "requested", "expected"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float16"),
        ("drop", "auto", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_is_the_requested_one_or_else_the_stored_one(folder, stored, requested, expected):
    change_json(folder / "config.json", dtype=stored)
    model = load(folder, requested)
    assert model.dtype == expected
    dtypes = {parameter.dtype for parameter in model.model.parameters()}
    assert dtypes == {getattr(torch, expected)}


def test_eos_ids_come_from_the_files_and_the_tokenizer(folder):
    change_json(folder / "generation_config.json", eos_token_id=[7, VOCAB_SIZE])
    assert load(folder).eos_token_ids == (7, EOS_TOKEN_ID)


def test_the_generation_config_is_optional(folder):
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_token_ids == (EOS_TOKEN_ID,)


def test_shards_and_a_single_file_load_the_same_weights(tmp_path):
    sharded = copy_of("llama_sharded", tmp_path)
    before = load(sharded)
    tensors = {}
    for shard in sharded.glob("*.safetensors"):
        tensors.update(load_file(shard))
        shard.unlink()
    (sharded / "model.safetensors.index.json").unlink()
    save_file(tensors, sharded / WEIGHTS)
    assert same_weights(before, load(sharded))


@pytest.mark.parametrize(("variant", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_checkpoints_of_the_bare_model_are_loaded(tmp_path, variant, prefix):
    folder = copy_of(variant, tmp_path)
    before = load(folder)
    change_weights(folder, lambda tensors: {k.removeprefix(prefix): v for k, v in tensors.items()})
    assert same_weights(before, load(folder))


def test_harmless_extra_tensors_are_ignored(tmp_path, caplog):
    tied, gpt2 = copy_of("llama_tied_biased", tmp_path), copy_of("gpt2", tmp_path)
    embedding = load_file(tied / WEIGHTS)["model.embed_tokens.weight"]
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    drafting = {"mtp.fc.weight": torch.ones(2, 2)}  # Qwen3-Next's layers for draft tokens
    extra = inverse | drafting | {"lm_head.weight": embedding.clone()}
    change_weights(tied, lambda tensors: tensors | extra)
    masks = {"transformer.h.0.attn.bias": torch.ones(1), "h.1.attn.masked_bias": torch.ones(1)}
    change_weights(gpt2, lambda tensors: {**tensors, **masks})
    assert same_weights(load(tied), load(tiny_checkpoint("llama_tied_biased")))
    assert "has 1 tensors of layers that draft tokens, which are not used" in caplog.text
    assert same_weights(load(gpt2), load(tiny_checkpoint("gpt2")))


def test_names_of_gpt_neox_may_be_older_or_newer(tmp_path):
    folder = copy_of("gpt_neox", tmp_path)
    before = load(folder)
    prefix = "gpt_neox.layers.0.attention"
    constants = {f"{prefix}.bias": torch.ones(1), f"{prefix}.masked_bias": torch.ones(1)}
    constants[f"{prefix}.rotary_emb.inv_freq"] = torch.ones(4)
    change_weights(folder, lambda tensors: tensors | constants)
    assert same_weights(before, load(folder))
    newer = {"embed_out.weight": "lm_head.weight"}
    change_weights(folder, lambda tensors: {newer.get(k, k): v for k, v in tensors.items()})
    assert same_weights(before, load(folder))
    bare = {"lm_head.weight": "lm_head.weight"}
    change_weights(
        folder, lambda tensors: {bare.get(k, k.partition(".")[2]): v for k, v in tensors.items()}
    )
    assert same_weights(before, load(folder))


# Fingerprint


def test_the_fingerprint_does_not_depend_on_the_folder(folder):
    assert load(folder).fingerprint == load(tiny_checkpoint("llama")).fingerprint
    assert len(load(folder).fingerprint) == 16


def test_the_tokenizer_digest_is_that_of_the_folder_that_a_router_reads(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    assert load(folder).tokenizer_digest == ""  # a checkpoint for token ids only
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_byte_level_folder(tokenizer)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    assert load(folder).tokenizer_digest == open_model_files(tokenizer).tokenizer_digest() != ""


def test_one_changed_bit_changes_the_fingerprint(folder, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "_HASH_PART_BYTES", 10_000)
    monkeypatch.setattr(checkpoint_module, "_HASH_READ_BYTES", 3_000)
    content = bytearray((folder / WEIGHTS).read_bytes())
    seen = {open_checkpoint(str(folder)).fingerprint()}
    for position in (len(content) - 1, len(content) // 2, 10_000, 9_999):
        content[position] ^= 1
        (folder / WEIGHTS).write_bytes(content)
        seen.add(open_checkpoint(str(folder)).fingerprint())
    assert len(seen) == 5


def test_a_changed_config_changes_the_fingerprint(folder):
    before = load(folder).fingerprint
    change_json(folder / "config.json", rms_norm_eps=1e-5)
    assert load(folder).fingerprint != before


def test_the_fingerprint_does_not_depend_on_the_size_of_reads(folder, monkeypatch):
    before = open_checkpoint(str(folder)).fingerprint()
    monkeypatch.setattr(checkpoint_module, "_HASH_READ_BYTES", 7)
    assert open_checkpoint(str(folder)).fingerprint() == before


# Broken folders


def test_a_missing_folder_is_an_error(tmp_path):
    fails_with(tmp_path / "nowhere", "nowhere", "is not a folder")


def test_a_hub_name_without_a_network_is_an_error(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    fails_with("nobody/no-model", "nobody/no-model", "cannot be reached", "local cache")


def test_a_name_that_the_hub_does_not_allow_is_an_error():
    fails_with("no model", "no model is not a folder here", "Repo id")


def test_a_folder_without_a_config_is_an_error(folder):
    (folder / "config.json").unlink()
    fails_with(folder, str(folder), "has no config.json")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_config_that_is_not_json_is_an_error(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    fails_with(folder, "config.json", "JSON")


@pytest.mark.parametrize(
    ("architectures", "model_type", "named"),
    [
        (["Qwen4ForCausalLM"], "llama", "similar ones are Qwen"),
        ("drop", "bert", "None"),
        ([], "drop", "None"),
    ],
)
def test_an_unknown_architecture_is_an_error(folder, architectures, model_type, named):
    change_json(folder / "config.json", architectures=architectures, model_type=model_type)
    fails_with(folder, named, "unknown", "docs/models.md")


@pytest.mark.parametrize("model_type", ["gpt2", "drop"])
def test_an_architecture_of_another_model_type_is_an_error(folder, model_type):
    change_json(folder / "config.json", model_type=model_type)
    fails_with(folder, "config.json", "model_type", "'llama'")


def test_a_config_field_of_the_wrong_type_is_an_error(folder):
    change_json(folder / "config.json", hidden_size="large")
    fails_with(folder, "config.json", "hidden_size")


def test_an_unsupported_dtype_is_an_error(folder):
    change_json(folder / "config.json", dtype="float64")
    fails_with(folder, "float64", "--dtype")


def test_a_checkpoint_with_too_few_bits_is_an_error(folder):
    change_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 3})
    fails_with(folder, "config.json", "quantization_config.bits 3 is not supported")


def test_a_missing_shard_is_an_error(tmp_path):
    folder = copy_of("llama_sharded", tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    fails_with(folder, "model-00002-of-00003.safetensors", "model.safetensors.index.json")


def test_an_index_without_a_map_is_an_error(tmp_path):
    folder = copy_of("llama_sharded", tmp_path)
    change_json(folder / "model.safetensors.index.json", weight_map="drop")
    fails_with(folder, "model.safetensors.index.json", "weight_map")


def test_a_folder_with_only_pickled_weights_is_an_error(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    fails_with(folder, ".bin", "convert them to safetensors")


def test_a_folder_without_weights_is_an_error(folder):
    (folder / WEIGHTS).unlink()
    fails_with(folder, "model.safetensors")


@pytest.mark.parametrize("kept_bytes", [0, 5, 2_000, -1])
def test_truncated_weights_are_an_error(folder, kept_bytes):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept_bytes])
    fails_with(folder, WEIGHTS, "not a readable safetensors file")


def test_a_missing_tensor_is_an_error(folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    change_weights(folder, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    fails_with(folder, f"lacks tensor {name}")


def test_an_untied_model_without_its_head_is_an_error(folder):
    change_weights(folder, lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    fails_with(folder, "lacks tensor lm_head.weight")


def test_a_tensor_of_another_shape_is_an_error(folder):
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(folder, lambda t: {**t, name: t[name][:, :-1].contiguous()})
    fails_with(folder, WEIGHTS, name, "[64, 95]", "[64, 96]")


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_a_transposed_tensor_is_an_error(tmp_path, variant):
    """The matrix is [in, out] in place of [out, in]."""
    folder = copy_of(variant, tmp_path)
    name = {"llama": "model.layers.0.mlp.up_proj.weight", "gpt2": "transformer.h.0.mlp.c_fc.weight"}
    change_weights(folder, lambda t: {**t, name[variant]: t[name[variant]].t().contiguous()})
    fails_with(folder, name[variant], "shape")


def test_an_unexpected_tensor_is_an_error(folder):
    change_weights(folder, lambda t: {**t, "model.layers.0.mlp.router.weight": torch.ones(2)})
    fails_with(folder, "model.layers.0.mlp.router.weight", "does not have")


def test_integer_weights_are_an_error(folder):
    name = "model.norm.weight"
    change_weights(folder, lambda t: {**t, name: t[name].to(torch.int8)})
    fails_with(folder, WEIGHTS, name, "I8; config.json does not say how it is quantized")


# Memory


_MEASURED_LOAD = """
import sys, threading
from engine.runtime.weights import loader

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

import transformers.models.auto  # so that imports do not count
loader.load_model(sys.argv[2], "auto", "cpu", progress=False)
peak, done = anonymous_bytes(), threading.Event()
base = peak

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
model = loader.load_model(sys.argv[1], "auto", "cpu", progress=True)
done.set()
watcher.join()
parts = model.model.checkpoint_tensors().values()
weights = sum(part.target.nbytes for of_tensor in parts for part in of_tensor)
print(weights, max(peak, anonymous_bytes()) - base)
"""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    """A Llama of about 200 MB in two shards."""
    import transformers

    folder = tmp_path_factory.mktemp("large")
    config = transformers.LlamaConfig(
        vocab_size=4000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=3,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {
        name: torch.full(tensor.shape, 0.01)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    names, weight_map = sorted(tensors), {}
    for shard, chosen in enumerate((names[::2], names[1::2])):
        file = f"shard-{shard}.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        weight_map.update(dict.fromkeys(chosen, file))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_never_holds_a_second_copy_of_the_weights(large_checkpoint):
    command = [sys.executable, "-c", _MEASURED_LOAD, large_checkpoint, tiny_checkpoint("llama")]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    weights, peak = map(int, result.stdout.split())
    assert weights > 180e6
    assert 0.9 * weights < peak < 1.25 * weights
    assert "Loading weights: 100%" in result.stderr


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_the_error_of_too_little_memory_names_the_size_of_the_weights(monkeypatch, folder, error):
    def make_weight(*arguments):
        if arguments[3].type == "meta":
            return right(*arguments)
        raise error

    right = kernels.make_weight
    monkeypatch.setattr(kernels, "make_weight", make_weight)
    fails_with(folder, "cannot allocate", "MiB on cpu", str(folder))
