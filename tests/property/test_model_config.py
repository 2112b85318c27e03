"""Configs are read as `transformers` reads them, whichever fields config.json has."""

import copy
from typing import Any

import transformers
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from engine.models.config_fields import ConfigFields
from engine.models.registry import FAMILIES
from kernels import Activation

ARCHITECTURES = {family.model_type: name for name, family in FAMILIES.items()}
NUM_LAYERS = 4
layer_types = st.lists(
    st.sampled_from(["sliding_attention", "full_attention"]),
    min_size=NUM_LAYERS,
    max_size=NUM_LAYERS,
)


def maybe(values):
    """A field that may be absent."""
    return st.one_of(st.just(...), values)


def counts(*values):
    return st.sampled_from(values)


def without_absent(fields):
    return {name: value for name, value in fields.items() if value is not ...}


scalings = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"factor": counts(2, 4.0, 8.0)}, optional={"type": st.just("linear")}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": counts(2.0, 8.0),
            "low_freq_factor": st.just(1.0),
            "high_freq_factor": counts(2.0, 4),
        },
        optional={"original_max_position_embeddings": counts(64, 512)},
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": counts(4.0, None)},
        optional={
            "original_max_position_embeddings": counts(64, 512),
            "beta_fast": counts(16.0, None),
            "beta_slow": counts(2.0, 0),
            "truncate": st.sampled_from([True, False, None]),
            "attention_factor": counts(0.7, None),
            "mscale": counts(1.0, 0),
            "mscale_all_dim": counts(0.8, 0),
        },
    ),
)
ropes = st.one_of(
    st.just({}),
    st.builds(
        lambda name, scaling, theta, inner: {name: scaling | inner} | theta,
        st.sampled_from(["rope_scaling", "rope_parameters"]),
        scalings,
        st.sampled_from([{}, {"rope_theta": 5e5}]),
        st.sampled_from([{}, {"rope_theta": 1e6}]),
    ),
    st.sampled_from([{"rope_scaling": None}, {"rope_parameters": None}, {"rope_theta": 1e4}]),
)
decoders = st.builds(
    lambda fields, rope: without_absent(fields) | rope,
    st.fixed_dictionaries(
        {
            "vocab_size": maybe(counts(100)),
            "hidden_size": maybe(counts(64, 128)),
            "intermediate_size": maybe(counts(96)),
            "num_hidden_layers": st.just(NUM_LAYERS),
            "num_attention_heads": maybe(counts(4, 8)),
            "num_key_value_heads": maybe(counts(1, 2, None)),
            "head_dim": maybe(counts(16, None)),
            "max_position_embeddings": maybe(counts(512, 1024)),
            "rms_norm_eps": maybe(counts(1e-5)),
            "tie_word_embeddings": maybe(st.booleans()),
            "attention_bias": maybe(st.booleans()),
            "mlp_bias": maybe(st.booleans()),
            "sliding_window": maybe(counts(9, None)),
            "use_sliding_window": maybe(st.booleans()),
            "max_window_layers": maybe(counts(0, 2, 9)),
            "layer_types": maybe(st.one_of(st.none(), layer_types)),
            "original_max_position_embeddings": maybe(counts(64, 256)),
        }
    ),
    ropes,
)
opts = st.builds(
    without_absent,
    st.fixed_dictionaries(
        {
            "hidden_size": maybe(counts(64)),
            "num_hidden_layers": maybe(st.just(NUM_LAYERS)),
            "num_attention_heads": maybe(counts(4)),
            "ffn_dim": maybe(counts(96)),
            "do_layer_norm_before": maybe(st.booleans()),
            "_remove_final_layer_norm": maybe(st.booleans()),
            "word_embed_proj_dim": maybe(counts(32, None)),
            "activation_function": maybe(counts("gelu")),
            "enable_bias": maybe(st.booleans()),
            "layer_norm_elementwise_affine": maybe(st.booleans()),
            "tie_word_embeddings": maybe(st.booleans()),
        }
    ),
)
gpt2s = st.builds(
    without_absent,
    st.fixed_dictionaries(
        {
            "n_embd": maybe(counts(64)),
            "hidden_size": maybe(counts(128)),
            "n_layer": maybe(st.just(NUM_LAYERS)),
            "n_head": maybe(counts(4)),
            "num_attention_heads": maybe(counts(2)),
            "n_positions": maybe(counts(256)),
            "n_inner": maybe(counts(80, None)),
            "layer_norm_epsilon": maybe(counts(1e-6)),
            "scale_attn_weights": maybe(st.booleans()),
            "scale_attn_by_inverse_layer_idx": maybe(st.booleans()),
            "tie_word_embeddings": maybe(st.booleans()),
        }
    ),
)
configs = st.one_of(
    st.tuples(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]), decoders),
    st.tuples(st.just("opt"), opts),
    st.tuples(st.just("gpt2"), gpt2s),
)


def reference_of(source: Any, windowed: bool) -> dict[str, Any]:
    """The fields of all families, from a config of `transformers`."""
    num_heads = source.num_attention_heads
    window = source.sliding_window if windowed else None
    kinds = getattr(source, "layer_types", None) or ["sliding_attention"] * NUM_LAYERS
    rope = getattr(source, "rope_parameters", None) or {}
    max_len = source.max_position_embeddings
    if rope.get("rope_type") == "yarn":
        original_len = rope["original_max_position_embeddings"]
        max_len = max(max_len, int(original_len * (rope["factor"] or max_len / original_len)))
    return {
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "num_layers": source.num_hidden_layers,
        "num_heads": num_heads,
        "num_kv_heads": getattr(source, "num_key_value_heads", None) or num_heads,
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // num_heads,
        "tie_word_embeddings": source.tie_word_embeddings,
        "max_model_len": max_len,
        "sliding_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds)
        if windowed
        else (None,) * source.num_hidden_layers,
    }


ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
}


def reference_of_family(source: Any, model_type: str) -> dict[str, Any]:
    """The fields of one family, from a config of `transformers`."""
    if model_type == "opt":
        return {
            "ffn_dim": source.ffn_dim,
            "embedding_size": source.word_embed_proj_dim,
            "activation": ACTIVATIONS[source.activation_function],
            "norm_before": source.do_layer_norm_before,
            "final_norm": source.do_layer_norm_before and not source._remove_final_layer_norm,
            "norm_affine": source.layer_norm_elementwise_affine,
            "bias": source.enable_bias,
        }
    if model_type == "gpt2":
        return {
            "inner_size": source.n_inner or 4 * source.hidden_size,
            "activation": ACTIVATIONS[source.activation_function],
            "layer_norm_eps": source.layer_norm_epsilon,
        }
    return {
        "intermediate_size": source.intermediate_size,
        "rms_norm_eps": source.rms_norm_eps,
        # Families without the field keep config.json's as an attribute that nothing reads.
        "output_bias": model_type in ("llama", "qwen3") and source.attention_bias,
        "mlp_bias": model_type == "llama" and source.mlp_bias,
    }


@given(case=configs)
@settings(max_examples=200, deadline=None)
def test_configs_are_read_as_transformers_reads_them(case):
    model_type, fields = case
    family = FAMILIES[ARCHITECTURES[model_type]]
    try:
        # It changes the objects that it gets.
        source = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(fields))
        source.standardize_rope_params()  # as a model that is made of it does
    except Exception as error:  # its validators raise any type
        event(f"refused by transformers: {type(error).__name__}")
        assume(False)
    num_heads = source.num_attention_heads
    num_kv_heads = getattr(source, "num_key_value_heads", num_heads)
    assume(num_heads % num_kv_heads == 0 and source.hidden_size % num_heads == 0)
    config = family.read_config(ConfigFields(fields, model_type))
    windowed = model_type in ("mistral", "qwen2", "qwen3")
    expected = reference_of(source, windowed) | reference_of_family(source, model_type)
    assert {name: getattr(config, name) for name in expected} == expected
    if model_type in ("llama", "mistral", "qwen2", "qwen3"):
        check_rope(config.ropes[0], source.rope_parameters)


def _copied(fields):
    """`transformers` changes the objects that it gets."""
    return {
        name: dict(value) if isinstance(value, dict) else value for name, value in fields.items()
    }


def check_rope(rope, parameters):
    assert (rope.rope_type, rope.theta) == (parameters["rope_type"], parameters["rope_theta"])
    names = {"original_max_position_embeddings": "original_len"}
    for key in (
        "factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        *names,
    ):
        if parameters.get(key):
            assert getattr(rope, names.get(key, key)) == parameters[key], key
    assert rope.truncate is bool(parameters.get("truncate", True))
