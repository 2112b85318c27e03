"""Model configurations from config.json: supported fields, refused fields, rotary scaling."""

import copy
import dataclasses

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.common.errors import ConfigurationError
from engine.models.config_fields import FAMILY_DEFAULTS, ConfigFields
from engine.models.layers import CausalModel
from engine.models.registry import FAMILIES, family_of_config, text_config_of
from engine.models.rotary import RotaryEmbedding

ARCHITECTURE = {family.model_type: name for name, family in FAMILIES.items()}


# Fields without a default.
REQUIRED = {"deepseek_v2": {"num_experts_per_tok": 6}}


def source_config(model_type, **fields):
    config = transformers.AutoConfig.for_model(model_type, **fields)
    config.allow_global_per_layer_attribute_access = True
    return config


def read_config_of(model_type, **fields):
    fields = REQUIRED.get(model_type, {}) | fields
    return FAMILIES[ARCHITECTURE[model_type]].read_config(ConfigFields(fields, model_type))


def build_model(model_type, **fields) -> CausalModel:
    with torch.device("meta"):
        return FAMILIES[ARCHITECTURE[model_type]].build(read_config_of(model_type, **fields))


def rope_fields(rope_type, **parameters):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 5e5, **parameters}}


def longrope(num_pairs, rope_type="longrope", **parameters):
    short, long = [1.0 + 0.1 * i for i in range(num_pairs)], [2.0 + i for i in range(num_pairs)]
    return rope_fields(rope_type, short_factor=short, long_factor=long, **parameters)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("model_type", ARCHITECTURE)
def test_the_default_config_of_each_family_builds(model_type):
    model = build_model(model_type, num_hidden_layers=4)
    assert model.config.num_layers == 4
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("model_type", ARCHITECTURE)
def test_a_config_does_not_change(model_type):
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_config_of(model_type).vocab_size = 1


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm True is not supported"),
        ("gemma2", {"hidden_activation": "mish"}, "hidden_activation 'mish'"),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention True is not supported",
        ),
        ("gemma3_text", {"rope_local_base_freq": 0}, "rope_local_base_freq is 0"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 1e4}},
            "it must be an object per layer type",
        ),
        ("gemma2", {"final_logit_softcapping": -1}, "final_logit_softcapping is -1"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "bidirectional_attention 'all'"),
        ("gemma4_text", {"enable_moe_block": "yes"}, "enable_moe_block is 'yes'"),
        ("gemma4_text", {"enable_moe_block": True}, "num_experts is None; it must be a positive"),
        (
            "gemma4_text",
            {
                "enable_moe_block": True,
                "num_experts": 8,
                "top_k_experts": 9,
                "moe_intermediate_size": 8,
            },
            "top_k_experts is 9; there are 8 experts",
        ),
        ("gemma4_text", {"num_kv_shared_layers": 26}, "num_kv_shared_layers 26 is not supported"),
        ("gemma4_text", {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input is 9"),
        ("gemma4_text", {"per_layer_config": {"5": {"hidden_size": 1}}}, "per_layer_config"),
        (
            "gemma4_text",
            {"per_layer_config": {"5": {"head_dim": 512}}},
            "per_layer_config has different shapes for layers of full_attention",
        ),
        (
            "gemma4_text",
            {"layer_types": ["full_attention"] * 29 + ["sliding_attention"]},
            "layer_types ends with 'sliding_attention'",
        ),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0; it must be a positive number"),
        ("ernie4_5", {"use_bias": None}, "use_bias is None; it must be true or false"),
        ("ernie4_5", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("seed_oss", {"attention_out_bias": 1}, "attention_out_bias is 1"),
        ("llama", rope_fields("axial"), "rope_type 'axial'"),
        ("llama", rope_fields("dynamic"), "rope_type 'dynamic' needs factor"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 32}, "layer_types 'chunked_attention'"),
        ("llama", rope_fields("default", partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 5}, "num_key_value_heads 5"),
        (
            "qwen2",
            {"hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 4},
            "head_dim 5",
        ),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("opt", {"activation_function": "tanhshrink"}, "activation_function 'tanhshrink'"),
        ("gpt2", {"activation_function": "mish"}, "activation_function 'mish'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config {'quant"),
        ("llama", {"hidden_size": "64"}, "hidden_size is '64'; it must be a positive integer"),
        ("llama", {"vocab_size": True}, "vocab_size is True; it must be a positive integer"),
        ("opt", {"ffn_dim": 0}, "ffn_dim is 0; it must be a positive integer"),
        ("gpt2", {"n_layer": -1}, "num_hidden_layers is -1"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is None; it must be a positive number"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ("llama", {"hidden_act": None}, "hidden_act is None; it must be a text"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ("llama", {"rope_theta": 0}, "rope_theta is 0; it must be a positive number"),
        ("llama", rope_fields("linear"), "rope_type 'linear' needs factor"),
        ("llama", rope_fields("linear", factor="2"), "factor is '2'; it must be a positive number"),
        ("llama", rope_fields("llama3", factor=2.0), "rope_type 'llama3' needs low_freq_factor"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_type 'per layer type'",
        ),
        ("phi3", rope_fields("longrope", short_factor=[1.0]), "'longrope' needs long_factor"),
        ("phi3", longrope(47), "short_factor has 47 numbers; it must have 48"),
        ("phi3", rope_fields("linear", factor=2.0), "rope_type 'linear' is not supported"),
        ("phi3", {"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01 is not supported"),
        ("phi3", {"partial_rotary_factor": 2}, "partial_rotary_factor 2 is not supported"),
        ("lfm2", {"layer_types": ["conv"] * 32}, "layer_types names no layer with attention"),
        ("lfm2", {"full_attn_idxs": []}, "layer_types names no layer with attention"),
        ("lfm2", {"full_attn_idxs": 3}, "full_attn_idxs is 3; it must be a list of layers"),
        ("lfm2", {"layer_types": ["linear_attention"] * 32}, "layer_types 'linear_attention'"),
        (
            "qwen3_5_text",
            {"linear_num_key_heads": 3, "linear_num_value_heads": 8},
            "linear_num_value_heads 8 is not a multiple of linear_num_key_heads 3",
        ),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ("qwen3_5_text", {"full_attention_interval": 33}, "layer_types names no layer with"),
        ("falcon", {"alibi": True}, "alibi True is not supported"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2 is not supported"),
        (
            "falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn False is not supported",
        ),
        ("falcon", {"activation": "mish"}, "hidden_act 'mish' is not supported"),
        ("gpt_neox", {"rotary_pct": 0}, "partial_rotary_factor is 0"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1; it must be at least 2"),
        ("lfm2", {"block_ffn_dim_multiplier": None}, "block_ffn_dim_multiplier is None"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is None"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group is None"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True is not supported"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias True is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads is 8; with latent"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is not supported"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be a positive integer"),
        ("deepseek_v3", {"q_lora_rank": 2**17}, "q_lora_rank is 131072; it must be an integer"),
        ("deepseek_v3", rope_fields("linear", factor=2.0), "rope_type 'linear' is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "quantization_config.weight_block_size [64, 64] is not supported",
        ),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 47"),
        ("smollm3", {"no_rope_layers": [1] * 35}, "no_rope_layers must be a list of 36"),
        ("llama", {"hidden_size": 20, "num_attention_heads": 3}, "hidden_size 20"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must be a list of 32"),
        ("qwen2", {"layer_types": 5}, "layer_types must be a list of 32"),
    ],
)
def test_the_error_of_an_unsupported_field_names_it(model_type, fields, named):
    with pytest.raises(ConfigurationError) as failure:
        build_model(model_type, **fields)
    assert named in failure.value.message


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mistral", {"sliding_window": 9}, (9, 9, 9)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("llama", {"sliding_window": 9}, (None, None, None)),
        ("qwen2", {"sliding_window": 9}, (None, None, None)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
            (None, None, 9),
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
    ],
)
def test_sliding_windows_per_layer(model_type, fields, expected):
    assert read_config_of(model_type, num_hidden_layers=3, **fields).sliding_windows == expected


@pytest.mark.parametrize(
    "rope",
    [
        rope_fields("linear", factor=3.0),
        rope_fields("llama3", **LLAMA3, original_max_position_embeddings=256),
        rope_fields("llama3", **{**LLAMA3, "high_freq_factor": 9.0}),
        rope_fields("yarn", factor=4.0, original_max_position_embeddings=512),
        rope_fields("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
        rope_fields("yarn", factor=2.0, beta_fast=16.0, beta_slow=2.0, attention_factor=0.7),
        rope_fields("yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.8),
    ],
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rotary_scaling_is_that_of_transformers(rope, head_dim):
    fields = {"head_dim": head_dim, "max_position_embeddings": 1024, **rope}
    config = source_config("llama", **fields)
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[rope["rope_parameters"]["rope_type"]](config)
    rotary = RotaryEmbedding(read_config_of("llama", **fields).ropes[0])
    torch.testing.assert_close(rotary.inverse_frequencies, frequencies, atol=0, rtol=1e-6)
    assert rotary.amplitude == pytest.approx(amplitude, rel=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("parameters", [{}, {"factor": 3.0}, {"attention_factor": 1.5}])
@pytest.mark.parametrize("max_model_len", [512, 513])
def test_longrope_has_factors_for_the_longest_sequence(share, parameters, max_model_len):
    rope = longrope(int(64 * share) // 2, **parameters)
    rope["rope_parameters"]["partial_rotary_factor"] = share
    fields = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "original_max_position_embeddings": 512,
        **copy.deepcopy(rope),
    }
    source = source_config("phi3", **copy.deepcopy(fields))
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["longrope"](source, seq_len=max_model_len)
    config = read_config_of("phi3", **fields).limited_to(max_model_len)
    assert (config.kv_variant, config.max_model_len) == ("long" * (max_model_len == 513), 2048)
    rotary = RotaryEmbedding(config.ropes[0])
    torch.testing.assert_close(rotary.inverse_frequencies, frequencies, atol=0, rtol=1e-6)
    assert rotary.amplitude == pytest.approx(amplitude, rel=1e-6)


def test_older_names_of_scalings_mean_the_same():
    older = longrope(48)["rope_parameters"]
    older["type"] = "su"
    del older["rope_type"]
    configs = [read_config_of("phi3", rope_scaling=older), read_config_of("phi3", **longrope(48))]
    assert configs[0].ropes[0].rope_type == "longrope"
    assert configs[0].ropes[0].long_factors == configs[1].ropes[0].long_factors


def test_dynamic_scaling_changes_nothing_up_to_the_models_length():
    config = read_config_of("llama", **rope_fields("dynamic", factor=2.0))
    assert config.ropes[0].rope_type == "default"
    assert config.max_model_len == 2048


@pytest.mark.parametrize(
    ("fields", "ropes", "windows"),
    [
        ({}, (0, 0, 0, None, 0), (None,) * 5),
        ({"no_rope_layer_interval": 2}, (0, None, 0, None, 0), (None,) * 5),
        (
            {"no_rope_layers": [1, 0, 0, 1, 1], "use_sliding_window": True, "sliding_window": 9},
            (0, None, None, 0, 0),
            (None, 9, 9, None, None),
        ),
    ],
)
def test_layers_of_smollm3_without_rotary_embedding(fields, ropes, windows):
    config = read_config_of("smollm3", num_hidden_layers=5, **fields)
    assert (config.rope_of, config.sliding_windows) == (ropes, windows)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("lfm2", {}),
        ("lfm2", {"layer_types": ["conv", "conv", "full_attention"], "conv_L_cache": 4}),
        ("lfm2", {"full_attn_idxs": [1], "conv_bias": True, "block_ff_dim": 300}),
        ("lfm2", {"block_auto_adjust_ff_dim": False, "tie_embedding": False}),
        ("lfm2", {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 7}),
        ("qwen3_5_text", {"full_attention_interval": 2, "linear_num_key_heads": 4}),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 3, "attention_bias": True}),
    ],
)
def test_a_hybrid_has_the_tensors_of_transformers(model_type, fields):
    fields = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, **fields}
    fields |= {"num_key_value_heads": 2, "vocab_size": 300, "intermediate_size": 200} | fields
    with torch.device("meta"):
        source = transformers.AutoModelForCausalLM.from_config(source_config(model_type, **fields))
    expected = {name: tuple(tensor.shape) for name, tensor in source.state_dict().items()}
    if source.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    parts = build_model(model_type, **fields).checkpoint_tensors()
    assert {name: tensor[0].tensor_shape for name, tensor in parts.items()} == expected


DECODERS = sorted(ARCHITECTURE.keys() - {"opt", "gpt2"})


@pytest.mark.parametrize("model_type", DECODERS)
def test_defaults_are_those_of_transformers(model_type):
    source = source_config(model_type)
    for name, default in FAMILY_DEFAULTS[model_type].items():
        # Classes complete fields that are None, and have no attributes for some older fields.
        is_kept = name not in ("num_key_value_heads", "sliding_window")
        if default is not None and is_kept and hasattr(source, name):
            value = getattr(source, name)
            if isinstance(default, dict):  # classes add fields to it
                value = {key: value[key] for key in default}
            assert (name, value) == (name, default)
    config = read_config_of(model_type)
    windows = [source.sliding_window if windowed else None for windowed in is_windowed(source)]
    assert list(config.sliding_windows) == windows
    if getattr(config, "latent", None) is None:
        num_kv_heads = 1 if model_type == "falcon" else source.num_attention_heads
        assert config.num_kv_heads == getattr(source, "num_key_value_heads", num_kv_heads)
        assert config.head_dim == (getattr(source, "head_dim", None) or config.head_dim)
    parameters = source.rope_parameters
    by_type = parameters if "full_attention" in parameters else {"": parameters}
    thetas = {stated["rope_theta"] for stated in by_type.values()}
    assert {rope.theta for rope in config.ropes} == thetas


def is_windowed(source):
    """Whether each layer has a window in transformers, which not all families list by layer."""
    if source.model_type in ("mistral", "phi3"):
        return [source.sliding_window is not None] * source.num_hidden_layers
    types = getattr(source, "layer_types", None) or ["full_attention"] * source.num_hidden_layers
    return [layer_type == "sliding_attention" for layer_type in types]


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma3_text", {}),
        ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 2e4}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        (
            "gemma3_text",
            {
                "rope_parameters": {"sliding_attention": {"rope_theta": 3e4}},
                "layer_types": ["full_attention", "sliding_attention"] * 4,
            },
        ),
        ("gemma4_text", {}),
        (
            "gemma4_text",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
                    "full_attention": {
                        "rope_type": "proportional",
                        "rope_theta": 5e5,
                        "partial_rotary_factor": 0.4,
                        "factor": 2.0,
                    },
                }
            },
        ),
        ("olmo3", {"rope_theta": 1e5, "rope_scaling": YARN}),
        ("olmo3", {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 1e5}}}),
    ],
)
def test_rotary_embeddings_by_layer_type_are_those_of_transformers(model_type, fields):
    fields = {"num_hidden_layers": 8, "head_dim": 16, "max_position_embeddings": 4096, **fields}
    source = source_config(model_type, **copy.deepcopy(fields))
    config = read_config_of(model_type, **copy.deepcopy(fields))
    for layer, layer_type in enumerate(source.layer_types):
        index = config.rope_of[layer]
        parameters = source.rope_parameters[layer_type]
        if parameters["rope_type"] == "default":
            exponents = torch.arange(0, 16, 2, dtype=torch.float32) / 16
            frequencies, amplitude = 1 / parameters["rope_theta"] ** exponents, 1.0
        else:
            initialize = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            frequencies, amplitude = initialize(source, layer_type=layer_type)
        rotary = RotaryEmbedding(config.ropes[index])
        torch.testing.assert_close(rotary.inverse_frequencies, frequencies, atol=0, rtol=1e-6)
        assert rotary.amplitude == pytest.approx(amplitude, rel=1e-6)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_bare_model_of_a_family_belongs_to_it(architecture):
    family = FAMILIES[architecture]
    bare = transformers.AutoModel._model_mapping[type(source_config(family.model_type))]
    fields = {"architectures": [bare.__name__], "model_type": family.model_type}
    assert family_of_config(fields) is family


TEXT = {"model_type": "gemma3_text", "num_hidden_layers": 2, "dtype": "float32"}
GEMMA3 = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}


def test_the_config_of_a_text_part_has_some_fields_of_the_whole():
    outer = {"eos_token_id": [1, 106], "torch_dtype": "bfloat16", "tie_word_embeddings": None}
    config = text_config_of({**GEMMA3, **outer, "vision_config": {}, "text_config": TEXT})
    shared = {"eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    assert config == {**TEXT, **shared, "architectures": ["Gemma3ForCausalLM"]}
    assert family_of_config(config) is FAMILIES["Gemma3ForCausalLM"]
    assert text_config_of(config) is config


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "text_config is None; it must be an object"),
        ({"text_config": []}, r"text_config is \[\]; it must be an object"),
        ({"text_config": TEXT, "model_type": "qwen3_5"}, "model_type is 'qwen3_5'; Gemma3For"),
        ({"text_config": {"model_type": "llama"}}, "model_type is 'llama'; Gemma3ForCausalLM is"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "'LlavaForCond.* is unknown"),
    ],
)
def test_a_text_part_that_cannot_be_served_is_refused(fields, named):
    with pytest.raises(ConfigurationError, match=named):
        family_of_config(text_config_of({**GEMMA3, **fields}))


def test_yarn_extends_max_model_len():
    rope = rope_fields("yarn", factor=4.0, original_max_position_embeddings=512)
    assert read_config_of("llama", max_position_embeddings=512, **rope).max_model_len == 2048
    assert read_config_of("llama", max_position_embeddings=4096, **rope).max_model_len == 4096


def test_a_tied_model_has_no_separate_head():
    tied, untied = (build_model("llama", tie_word_embeddings=tied) for tied in (True, False))
    assert "lm_head.weight" not in tied.checkpoint_tensors()
    assert untied.checkpoint_tensors()["lm_head.weight"][0].tensor_shape == (32000, 4096)
