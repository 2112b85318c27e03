"""Odd forms of checkpoints that are loaded, by name: the variant, and its change."""

from pathlib import Path

import torch

from tests.support.odd_checkpoints import (
    ABSENT,
    EMBEDDINGS,
    INDEX,
    Change,
    adding,
    both,
    config,
    leftover_index,
    other_head,
    renamed,
    rope_scaling,
    shards,
    weights,
    without_embedding,
)

__all__ = ["LENGTHS", "LOADED", "ONE", "YARN"]

ONE = torch.ones(1)
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "original_max_position_embeddings": 64}


def _move(folder: Path, name: str, new_name: str) -> None:
    (folder / new_name).parent.mkdir()
    (folder / name).rename(folder / new_name)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(name, new_name))


# Fields of config.json that change what a Llama-shaped model computes.
LENGTHS: dict[str, tuple[str, Change]] = {
    "its own original length, yarn": (
        "llama",
        config(
            max_position_embeddings=1024,
            original_max_position_embeddings=64,
            **rope_scaling(type="yarn", factor=16.0),
        ),
    ),
    "its own original length before that of the scaling, llama3": (
        "llama",
        config(
            original_max_position_embeddings=64,
            **rope_scaling(**LLAMA3, factor=8.0, original_max_position_embeddings=512),
        ),
    ),
}
OTHER_HEADS = {f"another head, {variant}": (variant, other_head()) for variant in EMBEDDINGS}
ONLY_HEADS = {
    f"only the head, {variant}": (variant, without_embedding(embedding))
    for variant, embedding in EMBEDDINGS.items()
}
CONFIGS: dict[str, tuple[str, Change]] = {
    "an original length without a use": ("llama", config(original_max_position_embeddings=64)),
    "theta beside the scaling": ("llama", config(rope_parameters=ABSENT, rope_theta=1000)),
    "theta inside of rope_parameters first": (
        "llama",
        config(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rope_theta=1000.0),
    ),
    "rope_scaling before rope_parameters": (
        "llama",
        config(rope_scaling={"type": "linear", "factor": 4}, rope_theta=1000.0),
    ),
    "rope_type before type": (
        "llama",
        config(**rope_scaling(type="linear", rope_type="default", factor=4)),
    ),
    "null in place of parameters": ("llama", config(rope_parameters=None, rope_scaling=None)),
    "yarn with mscale_all_dim 0": (
        "llama",
        config(**rope_scaling(**YARN, factor=4.0, mscale=1.0, mscale_all_dim=0)),
    ),
    "yarn with mscale 0": (
        "llama",
        config(**rope_scaling(**YARN, factor=4.0, mscale=0, mscale_all_dim=1.0)),
    ),
    "yarn with factor null": ("llama", config(**rope_scaling(**YARN, factor=None))),
    "yarn with beta 0 and null": (
        "llama",
        config(**rope_scaling(**YARN, factor=4.0, beta_fast=0, beta_slow=None)),
    ),
    "yarn with truncate null": (
        "llama",
        config(**rope_scaling(**YARN, factor=4.0, truncate=None)),
    ),
    "a part of the head, null": (
        "llama",
        config(
            partial_rotary_factor=None,
            rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": None},
        ),
    ),
    "attention_bias of qwen2": ("qwen2", config(attention_bias=True, mlp_bias=True)),
    "attention_bias of mistral": ("mistral", config(attention_bias=True, mlp_bias=True)),
    "mlp_bias of qwen3": ("qwen3", config(mlp_bias=True)),
    "num_key_value_heads of gpt2": ("gpt2", config(num_key_value_heads=2, head_dim=32)),
    "num_key_value_heads of opt": ("opt", config(num_key_value_heads=2, head_dim=32)),
    "two names of a field": ("gpt2", config(num_hidden_layers=2)),
    "no architectures": ("llama", config(architectures=ABSENT)),
    "architectures null": ("qwen2", config(architectures=None)),
    "architectures empty": ("gpt2", config(architectures=[])),
    "architectures a text": ("llama", config(architectures="LlamaForCausalLM")),
    "LlamaModel": ("llama", config(architectures=["LlamaModel"])),
    "LLaMAForCausalLM": ("llama", config(architectures=["LLaMAForCausalLM"])),
    "GPT2Model": ("gpt2", config(architectures=["GPT2Model"])),
    "OPTModel": ("opt", config(architectures=["OPTModel"])),
    "Qwen3Model": ("qwen3", config(architectures=["Qwen3Model"])),
    "hidden_act swish": ("llama", config(hidden_act="swish")),
    "activation gelu_fast": ("opt", config(activation_function="gelu_fast")),
    "activation gelu_python": ("gpt2", config(activation_function="gelu_python")),
    "head_dim null": ("mistral", config(head_dim=None)),
    "layer_types null": ("qwen2", config(layer_types=None)),
    "an older layer type": ("qwen2_sliding", config(layer_types=["attention"] * 3)),
    "no full layer before the windows": (
        "qwen2_sliding",
        config(max_window_layers=-1, layer_types=ABSENT),
    ),
    "windows of qwen2 not in use": (
        "qwen2_sliding",
        config(use_sliding_window=False, layer_types=ABSENT),
    ),
    "use_sliding_window of mistral": ("mistral_sliding", config(use_sliding_window=False)),
    "a norm without epsilon": ("llama", config(rms_norm_eps=0.0)),
    "torch_dtype": ("llama", config(dtype=ABSENT, torch_dtype="float32")),
    "quantization_config null": ("llama", config(quantization_config=None)),
    "fields without a meaning": ("llama", config(pretraining_tp=2, final_logit_softcapping=3.0)),
}
TENSORS: dict[str, tuple[str, Change]] = {
    "a head like the embedding": (
        "qwen2",
        weights(lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    ),
    "angles": (
        "llama",
        adding(
            {
                f"model.layers.{layer}.self_attn.rotary_emb.{name}": torch.ones(1, 1, 9, 16)
                for layer in range(3)
                for name in ("cos_cached", "sin_cached", "inv_freq")
            }
            | {"model.rotary_emb.original_inv_freq": ONE}
        ),
    ),
    "position_ids": ("llama", adding({"model.position_ids": torch.arange(9)[None]})),
    "masks": (
        "gpt2",
        adding(
            {
                "transformer.h.0.attn.bias": torch.ones(1, 1, 9, 9, dtype=torch.bool),
                "transformer.h.1.attn.masked_bias": ONE,
            }
        ),
    ),
    "a value head": ("llama", adding({"v_head.summary.weight": torch.ones(1, 64)})),
    "scales of KV": (
        "llama",
        adding(
            {
                f"model.layers.0.self_attn.{name}": torch.tensor(2.0)
                for name in ("k_proj.k_scale", "v_proj.v_scale", "k_scale", "attn.v_scale")
            }
        ),
    ),
    "layers beyond the last, llama": ("llama", config(num_hidden_layers=2)),
    "layers beyond the last, opt": ("opt", config(num_hidden_layers=2)),
    "layers beyond the last, gpt2": ("gpt2", config(n_layer=2)),
    "a layer of another kind beyond the last": (
        "llama",
        adding({"model.layers.3.eh_proj.weight": torch.ones(64, 128)}),
    ),
    "bare names": ("llama", renamed(lambda name: name.removeprefix("model."))),
    "bare names, tied": ("llama_tied_biased", renamed(lambda name: name.removeprefix("model."))),
    "bare names and layers beyond the last": (
        "llama",
        both(renamed(lambda name: name.removeprefix("model.")), config(num_hidden_layers=2)),
    ),
    "bare names and another head": (
        "opt",
        both(renamed(lambda name: name.removeprefix("model.")), other_head()),
    ),
    "some bare names": (
        "llama",
        renamed(lambda name: name.removeprefix("model.") if "layers.1" in name else name),
    ),
    "float64": ("llama", weights(lambda t: {name: t[name].double() for name in t})),
    "float16 and bfloat16": (
        "llama",
        weights(lambda t: {k: t[k].half() if "mlp" in k else t[k].bfloat16() for k in t}),
    ),
}
FILES: dict[str, tuple[str, Change]] = {
    "an index that is left over": ("llama", leftover_index(has_shard=True)),
    "an index that is left over without its file": ("llama", leftover_index(has_shard=False)),
    "a tensor that the index lacks": (
        "llama",
        shards(lambda _first, _second, index: index.__delitem__("model.norm.weight")),
    ),
    "a tensor that only the index has": (
        "llama",
        shards(lambda _first, _second, index: index.update(ghost="a.safetensors")),
    ),
    "a file in a folder": (
        "llama",
        both(
            shards(lambda first, second, index: None),
            lambda folder: _move(folder, "b.safetensors", "parts/b.safetensors"),
        ),
    ),
    "an index that swaps the files": (
        "llama",
        shards(
            lambda first, second, index: index.update(
                dict.fromkeys(first, "b.safetensors") | dict.fromkeys(second, "a.safetensors")
            )
        ),
    ),
    "a tensor in two files": (
        "llama",
        shards(lambda first, second, _: first.update({k: 2 * second[k] for k in second})),
    ),
}
LOADED = LENGTHS | OTHER_HEADS | ONLY_HEADS | CONFIGS | TENSORS | FILES
