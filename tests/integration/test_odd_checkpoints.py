"""Checkpoints in odd forms: each gives the tokens of `transformers`, or is refused by name.

A form that is refused is one that `transformers` refuses too, or loads with weights that are drawn
at random or read as something else.
"""

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers

from baton.errors import ConfigurationError
from engine.models.part import ModelPart
from engine.runtime.loader import load_model
from kernels.native.commands import library
from tests.support.checkpoints import prompt_of, reference_greedy
from tests.support.odd_checkpoints import (
    ABSENT,
    EMBEDDINGS,
    INDEX,
    WEIGHTS,
    Change,
    Tensors,
    adding,
    both,
    config,
    config_text,
    leftover_index,
    odd_checkpoint,
    other_head,
    renamed,
    rope_scaling,
    shards,
    weights,
    without_embedding,
)
from tests.support.paged_session import PagedSession
from tests.support.rank_engines import check_handed_over, tiers
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request

NUM_TOKENS = 6
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


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("form", LOADED)
def test_an_odd_form_gives_the_tokens_of_transformers(form: str, tmp_path: Path) -> None:
    variant, change = LOADED[form]
    folder = odd_checkpoint(variant, change, tmp_path)
    prompt = prompt_of(43, seed=5)
    model = load_model(str(folder), "float32", "cpu", progress=False)
    session = PagedSession(model, (len(prompt) + NUM_TOKENS,))
    drawn: list[int] = []
    for _ in range(NUM_TOKENS):
        (logits,) = session.step([(0, drawn[-1:] or prompt)])
        drawn.append(int(logits[-1].argmax()))
    assert drawn == reference_greedy(folder, prompt, NUM_TOKENS)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    "form",
    [
        *LENGTHS,
        "another head, llama_tied_biased",
        "another head, gpt2",
        "another head, opt",
        "only the head, qwen2",
    ],
)
def test_an_odd_form_is_split_over_two_tiers(form: str, tmp_path: Path) -> None:
    folder = odd_checkpoint(*LOADED[form], tmp_path)
    with tiers(folder, {}, {}, kv_connector=f"memory://{tmp_path.name}", block_size=8) as split:
        check_handed_over(folder, split)


@pytest.mark.skipif(library() is None, reason="no native kernels")
@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("flag", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_have_the_head_that_differs_from_the_embedding(flag: str, tmp_path: Path) -> None:
    change = both(other_head(), config(num_hidden_layers=2))
    folder = odd_checkpoint("llama_tied_biased", change, tmp_path)
    prompt = tuple(prompt_of(20))
    with closing(build_core(folder, "both", block_size=8, **{flag: 2})) as core:
        outputs = run_all(core, [engine_request("one", prompt, max_tokens=NUM_TOKENS)])
    assert tokens_of(outputs["one"]) == reference_greedy(folder, prompt, NUM_TOKENS)


def test_every_stage_reads_the_embedding_from_the_head(tmp_path: Path) -> None:
    folder = odd_checkpoint("opt", without_embedding(EMBEDDINGS["opt"]), tmp_path)
    for stage in (0, 2):
        part = ModelPart(stage=stage, num_stages=3)
        loaded = load_model(str(folder), "auto", "cpu", progress=False, part=part)
        assert loaded.model.word_embedding is not None


@pytest.mark.parametrize("shared", [False, True])
def test_processes_share_a_head_that_differs_from_the_embedding(
    shared: bool, tmp_path: Path
) -> None:
    """A file of shared weights is not taken for that of the tied model."""
    folder = odd_checkpoint("llama_tied_biased", other_head(), tmp_path)
    prompt = tuple(prompt_of(20))
    flags = {"weights_folder": str(tmp_path)} if shared else {}
    for _ in range(2):
        with closing(build_core(folder, "both", **flags)) as core:
            outputs = run_all(core, [engine_request("one", prompt, max_tokens=NUM_TOKENS)])
        assert tokens_of(outputs["one"]) == reference_greedy(folder, prompt, NUM_TOKENS)


@pytest.mark.parametrize(
    "stored",
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float16"), ("int8", "float16")],
)
def test_without_a_stated_dtype_it_is_that_of_the_first_weights(
    stored: tuple[str, str], tmp_path: Path
) -> None:
    """The first tensor by name has another type than the others; integers do not count."""
    first, others = (getattr(torch, name) for name in stored)

    def narrowed(tensors: Tensors) -> Tensors:
        narrow = {name: tensor.to(others) for name, tensor in tensors.items()}
        if not first.is_floating_point:
            return narrow | {"a.position_ids": ONE.to(first)}
        return narrow | {min(tensors): tensors[min(tensors)].to(first)}

    change = both(weights(narrowed), config(dtype=ABSENT))
    folder = odd_checkpoint("llama", change, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    assert f"torch.{load_model(str(folder), 'auto', 'cpu', progress=False).dtype}" == str(theirs)


@pytest.mark.parametrize(("stated", "expected"), [("half", "float16"), ("float", "float32")])
def test_types_have_two_names(stated: str, expected: str, tmp_path: Path) -> None:
    folder = odd_checkpoint("llama", config(dtype=stated), tmp_path)
    assert load_model(str(folder), "auto", "cpu", progress=False).dtype == expected


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ("another head, qwen2", ["tie_word_embeddings", "lm_head.weight", WEIGHTS]),
        ("layers beyond the last, llama", ["num_hidden_layers 2", "9 tensors"]),
        ("a tensor in two files", ["b.safetensors", "a.safetensors"]),
    ],
)
def test_what_is_not_used_as_config_json_says_is_logged(
    form: str, parts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = odd_checkpoint(*LOADED[form], tmp_path)
    with caplog.at_level(logging.WARNING, "baton.engine"):
        load_model(str(folder), "auto", "cpu", progress=False)
    assert all(part in caplog.text for part in parts)


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
    ("llama", {"hidden_size": HUGE}, "the model is too large"),
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
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("gpt2", {"activation_function": ["gelu"]}, "activation_function is ['gelu']"),
    ("llama", {"quantization_config": {}}, "quantization_config {} is not supported"),
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
