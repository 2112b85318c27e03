"""Checkpoints that are refused, in one line that names the file and the field or the tensor.

`transformers` refuses them too, or loads them with weights that are drawn at random or read as
something else.
"""

from pathlib import Path

import pytest
import torch

from baton.common.errors import ConfigurationError
from engine.runtime.weights.loader import load_model
from tests.support.odd_checkpoints import (
    ABSENT,
    INDEX,
    WEIGHTS,
    Change,
    adding,
    both,
    config,
    config_text,
    odd_checkpoint,
    other_head,
    renamed,
    rope_scaling,
    shards,
    weights,
)
from tests.support.odd_forms import ONE, YARN

HUGE = 2**62
REFUSED: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "a larger head": ("qwen2", other_head(300), (WEIGHTS, "lm_head.weight", "[300, 64]")),
    "no head": (
        "llama",
        weights(lambda t: {k: t[k] for k in t if k != "lm_head.weight"}),
        ("lacks tensor lm_head.weight",),
    ),
    "neither of the two": (
        "qwen2",
        weights(lambda t: {k: t[k] for k in t if "embed" not in k}),
        ("lacks tensor model.embed_tokens.weight",),
    ),
    "more layers than stored": (
        "llama",
        config(num_hidden_layers=4),
        ("lacks tensor model.layers.3.",),
    ),
    "weights of an adapter": (
        "llama",
        adding({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 64)}),
        (WEIGHTS, "lora_A", "does not have"),
    ),
    "scales of weights": (
        "llama",
        adding({"model.layers.0.mlp.up_proj.weight_scale": ONE}),
        (WEIGHTS, "weight_scale", "does not have"),
    ),
    "a bias of the head": (
        "llama",
        adding({"lm_head.bias": ONE}),
        (WEIGHTS, "lm_head.bias", "does not have"),
    ),
    "one prefix too many": (
        "llama",
        renamed(lambda name: f"base_model.{name}"),
        (WEIGHTS, "base_model.", "does not have"),
    ),
    "weights in eight bits": (
        "llama",
        weights(lambda t: t | {"model.norm.weight": t["model.norm.weight"].to(torch.int8)}),
        (WEIGHTS, "model.norm.weight", "I8"),
    ),
    "float8 without a stated dtype": (
        "llama",
        both(
            weights(lambda t: {name: t[name].to(torch.float8_e4m3fn) for name in t}),
            config(dtype=ABSENT),
        ),
        (WEIGHTS, "F8_E4M3", "quantized"),
    ),
    "a header that is cut": (
        "llama",
        both(
            config(dtype=ABSENT),
            lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:99]),
        ),
        (WEIGHTS, "not a readable safetensors file"),
    ),
    "an index of numbers": (
        "llama",
        shards(lambda _first, _second, index: index.update(ghost=5)),
        (INDEX, "weight_map"),
    ),
    "an index of another folder": (
        "llama",
        shards(lambda _first, _second, index: index.update(ghost="../a.safetensors")),
        (INDEX, "../a.safetensors"),
    ),
    "an index of nothing": (
        "llama",
        shards(lambda _first, _second, index: index.clear()),
        (INDEX, "weight_map"),
    ),
    "an index of a file that is missing": (
        "llama",
        shards(lambda _first, _second, index: index.update(ghost="c.safetensors")),
        (INDEX, "c.safetensors"),
    ),
    "an index of a file whose name is too long": (
        "llama",
        shards(lambda _first, _second, index: index.update(ghost="x" * 5000)),
        (INDEX, "'xxx"),
    ),
    "config.json with a byte order mark": (
        "llama",
        config_text(lambda text: b"\xef\xbb\xbf" + text),
        ("config.json", "BOM"),
    ),
    "config.json in UTF-16": (
        "llama",
        config_text(lambda text: text.decode().encode("utf-16")),
        ("config.json", "utf-8"),
    ),
    "config.json, cut": ("llama", config_text(lambda text: text[:50]), ("config.json", "JSON")),
    "config.json, empty": ("llama", config_text(lambda _: b""), ("config.json", "JSON")),
    "config.json, too deep": (
        "llama",
        config_text(lambda _: b"[" * 100_000),
        ("config.json", "JSON"),
    ),
    "config.json, a list": ("llama", config_text(lambda _: b"[]"), ("config.json", "JSON object")),
    "config.json, no fields": (
        "llama",
        config_text(lambda _: b"{}"),
        ("config.json", "architecture None is unknown"),
    ),
}
FIELDS: list[tuple[str, dict[str, object], str]] = [
    ("llama", {"architectures": [["LlamaForCausalLM"]]}, "architectures is [['LlamaForCausalLM']]"),
    ("llama", {"architectures": [1]}, "architectures is [1]; it must be a list of texts"),
    ("llama", {"architectures": ["BertModel"]}, "architecture 'BertModel' is unknown"),
    ("llama", {"architectures": ["MistralModel"]}, "architecture 'MistralModel' is unknown"),
    ("llama", {"architectures": ABSENT, "model_type": "bert"}, "architecture None is unknown"),
    ("llama", {"architectures": ABSENT, "model_type": ["llama"]}, "architecture None is unknown"),
    ("llama", {"model_type": ["llama"]}, "model_type is ['llama']"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ("llama", {"num_key_value_heads": 2.0}, "num_key_value_heads is 2.0"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of"),
    ("llama", {"num_attention_heads": True}, "num_attention_heads is True"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ("llama", {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ("llama", {"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; it must be an integer"),
    ("gpt2", {"n_layer": "3"}, "num_hidden_layers is '3'"),
    ("llama", {"hidden_size": None}, "hidden_size is None"),
    ("llama", {"hidden_size": HUGE}, "the model cannot be made"),
    (
        "llama",
        rope_scaling(type="yarn", factor=4, original_max_position_embeddings=5e-324),
        "the model cannot be made",
    ),
    ("llama", {"hidden_size": 10**30}, "hidden_size is 1000000000000000000000000000000"),
    ("llama", {"head_dim": 0}, "head_dim is 0"),
    ("llama", {"head_dim": 2**40}, "the width of a head is 1099511627776"),
    ("opt", {"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
    ("llama", {"vocab_size": 300}, "lm_head.weight has shape [259, 64]; config.json asks for [300"),
    ("llama", {"vocab_size": 258}, "lm_head.weight has shape [259, 64]; config.json asks for [258"),
    ("llama", {"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ("llama", {"max_position_embeddings": 2**32}, "max_position_embeddings is 4294967296"),
    ("llama", {"max_position_embeddings": 2048.0}, "max_position_embeddings is 2048.0"),
    ("mistral", {"sliding_window": -1}, "sliding_window is -1"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("qwen2", {"use_sliding_window": None}, "use_sliding_window is None"),
    ("qwen2", {"layer_types": ABSENT, "max_window_layers": None}, "max_window_layers is None"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps is None"),
    ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
    ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
    ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings is None"),
    ("llama", {"rope_parameters": ABSENT, "rope_theta": "1000"}, "rope_theta is '1000'"),
    ("llama", {"rope_parameters": ABSENT, "rope_theta": None}, "rope_theta is None"),
    ("llama", {"rope_parameters": ABSENT, "rope_theta": 10**400}, "rope_theta is 1000000"),
    ("llama", {"rope_parameters": []}, "rope_parameters is []; it must be an object"),
    ("llama", rope_scaling(rope_type=["yarn"], factor=4), "rope_type ['yarn'] is not supported"),
    ("llama", rope_scaling(rope_type=None, factor=4), "rope_type None is not supported"),
    ("llama", rope_scaling(rope_type="linear", factor=None), "'linear' needs factor"),
    ("llama", rope_scaling(type="yarn"), "'yarn' needs factor"),
    (
        "llama",
        rope_scaling(type="yarn", factor=4, original_max_position_embeddings=None),
        "'yarn' needs original_max_position_embeddings",
    ),
    (
        "llama",
        rope_scaling(**YARN, factor=4) | {"original_max_position_embeddings": None},
        "'yarn' needs original_max_position_embeddings",
    ),
    (
        "llama",
        rope_scaling(**YARN, factor=4) | {"original_max_position_embeddings": "64"},
        "original_max_position_embeddings is '64'",
    ),
    ("llama", rope_scaling(**YARN, factor=1e30), "factor 1e+30 times"),
    ("llama", rope_scaling(**YARN, factor=1e308), "factor 1e+308 times"),
    ("llama", rope_scaling(**YARN, factor=4) | {"rope_theta": 1.0}, "rope_theta 1.0 is not"),
    ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("gpt2", {"activation_function": ["gelu"]}, "activation_function is ['gelu']"),
    (
        "llama",
        {"quantization_config": {"load_in_4bit": True}},
        "quantization_config.quant_method None is not supported; it must be one of awq, ",
    ),
]
REFUSED |= {
    f"{variant}, {named}": (variant, config(**fields), ("config.json", named))
    for variant, fields, named in FIELDS
}


@pytest.mark.parametrize("form", REFUSED)
def test_an_odd_form_is_refused_by_name(form: str, tmp_path: Path) -> None:
    variant, change, parts = REFUSED[form]
    folder = odd_checkpoint(variant, change, tmp_path)
    with pytest.raises(ConfigurationError) as failure:
        load_model(str(folder), "auto", "cpu", progress=False)
    message = failure.value.message
    assert str(folder) in message
    assert "\n" not in message
    assert len(message) < 700
    assert all(part in message for part in parts), message
