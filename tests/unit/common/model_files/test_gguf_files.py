"""`GgufFile`: what a file says of its model, and files that are refused before weights are read."""

import struct

import gguf
import numpy as np
import pytest

from baton.common.errors import ConfigurationError
from baton.common.model_files.gguf import GgufFile
from baton.common.model_files.gguf.header import read_header
from baton.common.model_files.named_models import default_model_name
from router.requests.generation_config import load_default_params
from tests.support.gguf_files import BYTE_TOKENIZER, CONTROL, NORMAL, write_gguf

KEYS = {
    "general.architecture": "llama",
    **BYTE_TOKENIZER,
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = {"token_embd.weight": (np.zeros((259, 64), np.float16), None)}


def written(tmp_path, tensors=None, **changes):
    """A file without weights of layers; `changes` are keys with `__` for a dot, None for none."""
    keys = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    return GgufFile(write_gguf(tmp_path / "model.gguf", keys, EMBEDDING | (tensors or {})))


def test_the_config_has_the_names_of_config_json(tmp_path):
    config = written(
        tmp_path, llama__attention__head_count_kv=2, llama__rope__freq_base=5e4
    ).read_json("config.json")
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "vocab_size": 259,
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general__architecture": "bert"}, "general.architecture 'bert' is not supported"),
        ({"general__type": "adapter"}, "general.type 'adapter'"),
        ({"llama__expert_count": 8}, "it has no llama.expert_used_count"),
        ({"llama__attention__sliding_window": 511}, "llama.attention.sliding_window 511"),
        ({"llama__tensor_data_layout": "other"}, "llama.tensor_data_layout 'other'"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale 0.5"),
        ({"llama__context_length": 2**31}, "llama.context_length 2147483648 is not supported"),
        ({"llama__context_length": True}, "llama.context_length True is not supported"),
        ({"llama__block_count": [2, 2]}, r"llama.block_count \[2, 2\] is not supported"),
        ({"llama__attention__head_count_kv": [2, 4]}, r"head_count_kv \[2, 4\] is not supported"),
        ({"llama__attention__head_count_kv": [2]}, r"head_count_kv \[2\] is not supported"),
        ({"llama__attention__head_count_kv": [True, True]}, r"head_count_kv \[True, True\]"),
        (
            {"llama__rope__scaling__factor": 0.5, "llama__rope__scaling__yarn_ext_factor": 1.0},
            "ext",
        ),
        ({"llama__rope__scale_linear": 2.0}, "llama.rope.scale_linear 2.0"),
        ({"llama__rope__scaling__alpha": 2.0}, "llama.rope.scaling.alpha 2.0"),
        ({"llama__attention__causal": False}, "llama.attention.causal False"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length 8"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count 8"),
        ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type 'longrope'"),
        ({"llama__rope__scaling__type": "linear"}, "it has no llama.rope.scaling.factor"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0},
            "it has no llama.rope.scaling.original_context_length",
        ),
        ({"llama__rope__scaling__attn_factor": 1.5}, "llama.rope.scaling.attn_factor 1.5"),
        ({"llama__feed_forward_length": [96, 64]}, r"llama.feed_forward_length \[96, 64\]"),
        ({"llama__block_count": None}, "it has no llama.block_count"),
        ({"llama__attention__layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon 0.0"),
        ({"llama__rope__freq_base": "high"}, "llama.rope.freq_base 'high' is not supported"),
        ({"llama__rope__freq_base": 0.0}, "llama.rope.freq_base 0.0 is not supported"),
        ({"llama__rope__freq_base": -1.0}, "llama.rope.freq_base -1.0 is not supported"),
        ({"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base nan is not supported"),
        ({"llama__rope__scaling__factor": "4"}, "llama.rope.scaling.factor '4' is not supported"),
        ({"llama__rope__scaling__factor": [4]}, r"llama.rope.scaling.factor \[4\] is not supp"),
        ({"llama__rope__scaling__factor": True}, "llama.rope.scaling.factor True is not supp"),
        ({"llama__attention__head_count": "4"}, "llama.attention.head_count '4' is not supported"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(tmp_path, changes, reason):
    file = written(tmp_path, **changes)
    with pytest.raises(ConfigurationError, match=f"model.gguf: .*{reason}"):
        file.read_json("config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_count": 0, "attention__causal": True},
        {"rope__scaling__factor": 1.0},
        {"rope__scaling__type": "none"},
        {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0},
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 1.0},
        {"rope__scaling__attn_factor": 1.0, "rope__scaling__yarn_attn_factor": 1.0},
        {"rope__scaling__yarn_ext_factor": -1.0, "rope__scale_linear": 1.0},
        {"rope__scaling__yarn_beta_fast": 32.0, "rope__scaling__yarn_beta_slow": 1.0},
        {"rope__scaling__original_context_length": 512, "rope__scaling__finetuned": False},
        {"attention__sliding_window": 512},
        {"attention__sliding_window": 2**32 - 1},
        {"attention__head_count": [4, 4], "attention__head_count_kv": [4, 4]},
        {"feed_forward_length": [96, 96], "attention__sliding_window": [512, 512]},
        {"tensor_data_layout": "reference"},
        {"tensor_data_layout": "Meta AI original pth"},
        {"logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0},
    ],
)
def test_keys_that_change_nothing_are_allowed(tmp_path, changes):
    plain = written(tmp_path).read_json("config.json")
    keys = {f"llama__{key}": value for key, value in changes.items()}
    assert written(tmp_path, **keys).read_json("config.json") == plain


def test_a_factor_without_a_type_scales_linearly(tmp_path):
    config = written(tmp_path, llama__rope__scaling__factor=4.0).read_json("config.json")
    expected = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    assert config["rope_parameters"] == expected


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rotary_embeddings_have_the_names_of_config_json(tmp_path, kind):
    keys = {
        "llama__rope__scaling__type": kind,
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 128,
        "llama__rope__scaling__finetuned": True,
        "llama__rope__scaling__yarn_beta_fast": 16.0,
        "llama__rope__scaling__yarn_beta_slow": 2.0,
    }
    expected = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        expected["original_max_position_embeddings"] = 128
        expected |= {"beta_fast": 16.0, "beta_slow": 2.0}
    assert written(tmp_path, **keys).read_json("config.json")["rope_parameters"] == expected


def test_the_type_of_quantized_weights_is_bfloat16(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    quantized = gguf.quantize(np.ones((64, 64), np.float32), kind)
    file = written(tmp_path, {"blk.0.attn_q.weight": (quantized, kind)})
    assert file.read_json("config.json")["dtype"] == "bfloat16"


def test_all_tokens_that_end_a_turn_are_end_tokens(tmp_path):
    tokens = [*BYTE_TOKENIZER["tokenizer.ggml.tokens"], "<|eot_id|>", "<|im_end|>", "<|end|>"]
    types = [*BYTE_TOKENIZER["tokenizer.ggml.token_type"], NORMAL, CONTROL, NORMAL]
    file = written(
        tmp_path,
        {"token_embd.weight": (np.zeros((262, 64), np.float16), None)},
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=types,
        tokenizer__ggml__eot_token_id=259,
    )
    assert file.read_json("generation_config.json") == {
        "bos_token_id": 256,
        "eos_token_id": [257, 259, 260],
    }


SPLIT = {f"blk.{layer}.ffn_norm.weight": (np.ones(64, np.float32), None) for layer in range(5)}


def test_the_first_of_several_files_stands_for_all(tmp_path):
    path = write_gguf(tmp_path / "a.b.gguf", KEYS, EMBEDDING | SPLIT, part_tensors=2)
    header = read_header(path)
    assert path.name == "a.b-00001-of-00003.gguf"
    assert default_model_name(str(path)) == "a.b"
    assert [part.name for part in header.parts] == [f"a.b-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    assert header.tensors.keys() == EMBEDDING.keys() | SPLIT.keys()
    for part in header.parts:
        expected = {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(part).tensors}
        tensors = header.tensors.items()
        assert {n: tensor.offset for n, tensor in tensors if tensor.file == part} == expected
    assert GgufFile(path).read_json("config.json")["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("m-00001-of-00003.gguf", 1, "it is a part of a model; name the first one, m-00001-of-0"),
        ("m-00002-of-00003.gguf", None, "m-00002-of-00003.gguf: No such file"),
        ("m-00002-of-00003.gguf", 2, r"split.no and split.count are \(2, 3\), not \(1, 3\)"),
    ],
)
def test_parts_of_a_model_that_do_not_fit_are_refused(tmp_path, name, source, reason):
    path = write_gguf(tmp_path / "m.gguf", KEYS, EMBEDDING | SPLIT, part_tensors=2)
    parts = read_header(path).parts
    if source is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(parts[source].read_bytes())
    with pytest.raises(ConfigurationError, match=reason):
        read_header(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"split.count": 3, "split.no": 0}, "split.count is 3; the name of such a file ends with"),
        ({"split.count": "2"}, "split.count '2' is not supported"),
    ],
)
def test_a_part_under_another_name_is_refused(tmp_path, changes, reason):
    path = write_gguf(tmp_path / "m.gguf", KEYS | changes, EMBEDDING)
    with pytest.raises(ConfigurationError, match=reason):
        read_header(path)


def test_tensors_that_parts_lack_or_have_twice_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", KEYS, EMBEDDING | SPLIT, part_tensors=3)
    last = read_header(path).parts[-1]
    numbers = {"split.no": 1, "split.count": 2, "split.tensors.count": 6}
    fewer = dict(list(SPLIT.items())[3:])
    write_gguf(last, {"general.architecture": "llama", **numbers}, fewer)
    with pytest.raises(ConfigurationError, match=r"split.tensors.count is 6; the parts have 5"):
        read_header(path)
    write_gguf(last, {"general.architecture": "llama", **numbers}, SPLIT)
    with pytest.raises(ConfigurationError, match=r"tensor blk.0.ffn_norm.weight is in an earlier"):
        read_header(path)


def test_the_end_of_a_message_of_gpt_oss_is_no_end_token(tmp_path):
    tokens = [*BYTE_TOKENIZER["tokenizer.ggml.tokens"], "<|return|>", "<|end|>", "<|call|>"]
    types = [*BYTE_TOKENIZER["tokenizer.ggml.token_type"], CONTROL, CONTROL, CONTROL]
    file = written(
        tmp_path,
        {"token_embd.weight": (np.zeros((262, 64), np.float16), None)},
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=types,
        tokenizer__ggml__eos_token_id=259,
    )
    assert file.read_json("generation_config.json")["eos_token_id"] == [259, 261]


@pytest.mark.parametrize("token_id", [259, 2**32 - 1, True, 1.0, "257", [257]])
def test_an_id_that_names_no_token_counts_as_none(tmp_path, token_id):
    file = written(tmp_path, tokenizer__ggml__eos_token_id=token_id)
    assert file.read_json("generation_config.json")["eos_token_id"] == []
    assert file.eos_token_id() is None


def test_the_router_takes_sampling_defaults_from_the_file(tmp_path):
    file = written(
        tmp_path,
        general__sampling__temp=0.5,
        general__sampling__top_k=20,
        general__sampling__penalty_repeat=1.25,
    )
    expected = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    assert load_default_params(str(file.path), "auto") == expected
    assert load_default_params(str(file.path), "none") == {}
    with pytest.raises(ConfigurationError, match=r"model\.gguf, top_k: "):
        load_default_params(str(written(tmp_path, general__sampling__top_k=0.5).path), "auto")


def test_chat_templates_have_the_form_of_tokenizer_config_json(tmp_path):
    one = written(tmp_path, tokenizer__chat_template="plain")
    assert one.read_settings() == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": "plain",
    }
    keys = KEYS | {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    two = GgufFile(write_gguf(tmp_path / "two.gguf", keys, EMBEDDING))
    assert two.read_settings()["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    assert written(tmp_path).read_json("added_tokens.json") == {}


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path):
    small = {"token_embd.weight": (np.zeros((200, 64), np.float16), None)}
    with pytest.raises(ConfigurationError, match=r"has 259 tokens; token_embd.weight has 200 rows"):
        written(tmp_path, small).read_json("config.json")


def header_of(num_tensors, num_keys, rest):
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def named(name, letters="", *values):
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<{letters}", *values)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (header_of(0, 1, named(b"a", "IIQ", 9, 0, 10**9)), "its header has more than 64 MiB"),
        (header_of(0, 1, named(b"a", "IQ", 8, 2**30)), "its header has more than 64 MiB"),
        (header_of(1, 0, named(b"a", "I", 10**7)), "tensor a has 10000000 dimensions, not 1 to 4"),
        (header_of(1, 0, named(b"a", "IIQ", 0, 0, 0)), "tensor a has 0 dimensions"),
        (header_of(0, 2, 2 * named(b"a", "IB", 0, 1)), "has the key a twice"),
        (header_of(2, 0, 2 * named(b"a", "IQIQ", 1, 1, 0, 0)), "has the tensor a twice"),
    ],
)
def test_a_malformed_header_is_refused_before_it_takes_memory(tmp_path, header, reason):
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(header)
        file.truncate(2**31)  # the rest is a hole
    with pytest.raises(ConfigurationError, match=reason):
        read_header(path)


def test_an_absurd_number_of_layers_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"llama.block_count 4294967295 is not supported"):
        written(tmp_path, llama__block_count=2**32 - 1).read_json("config.json")


def test_a_file_that_is_cut_off_anywhere_in_its_header_is_refused(tmp_path):
    file = written(tmp_path)
    data = file.path.read_bytes()
    end = min(tensor.offset for tensor in file.header.tensors.values())
    for length in range(0, end - 32, 97):
        file.path.write_bytes(data[:length])
        with pytest.raises(ConfigurationError, match=r"is not a (readable )?GGUF file"):
            read_header(file.path)


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"safetensors", "is not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3), "is a big-endian GGUF file; .*gguf-convert-endian"),
        (b"GGUF" + struct.pack(">IQQ", 2, 0, 0), "is a big-endian GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "has version 1 of GGUF; the versions 2, 3 are supported"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "not a readable GGUF file"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**40), "within its header"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "the unknown type 77"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, start, reason):
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    with pytest.raises(ConfigurationError, match=reason):
        read_header(path)


def test_the_reader_finds_what_the_gguf_package_finds(tmp_path):
    mixed = {"x.bools": [True, False], "x.floats": [0.5, -1.0], "x.texts": ["", "ä"]}
    path = write_gguf(tmp_path / "model.gguf", KEYS | mixed, EMBEDDING)
    reader, header = gguf.GGUFReader(path), read_header(path)
    found = {name: field.contents() for name, field in reader.fields.items()}
    assert {key: value for key, value in found.items() if not key.startswith("GGUF.")} == dict(
        header.metadata
    )
    (tensor,) = reader.tensors
    mine = header.tensors[tensor.name]
    assert (mine.offset, list(mine.shape)) == (tensor.data_offset, tensor.shape.tolist()[::-1])
