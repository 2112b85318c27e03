"""Families that differ from Llama in fields of `DecoderConfig`: each reads its config.json."""

from dataclasses import replace

from engine.models.config_fields import ConfigFieldError, ConfigFields, unsupported
from engine.models.decoder_config import DecoderConfig, QkNorm, decoder_config, every_nth_full
from kernels.layer_kinds import NormKind

__all__ = [
    "cohere2_config",
    "cohere_config",
    "ernie4_5_config",
    "falcon_config",
    "gemma2_config",
    "gemma3_config",
    "glm4_config",
    "gpt_neox_config",
    "granite_config",
    "olmo2_config",
    "olmo3_config",
    "phi3_config",
    "qwen2_config",
    "qwen3_config",
    "seed_oss_config",
    "smollm3_config",
]

_OLMO3_SLIDING_THETA = 500_000.0
# The names of decoders with layer norms and MLPs without gates.
_DENSE_NAMES = {
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}
_OUTPUT_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def qwen2_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Qwen2 model: Q, K and V always have biases."""
    return replace(decoder_config(fields), qkv_bias=True)


def qwen3_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Qwen3 model: the heads of Q and K are normalized."""
    return replace(decoder_config(fields), qk_norm=QkNorm.HEAD)


def smollm3_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a SmolLM3 model: some layers have no rotary embedding.

    Only these have a window, unless `layer_types` says otherwise.
    """
    num_layers = fields.count("num_hidden_layers")
    has_rope = fields.raw("no_rope_layers")
    if has_rope is None:
        interval = fields.count("no_rope_layer_interval")
        has_rope = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(has_rope, list) or len(has_rope) < num_layers:
        raise ConfigFieldError(f"no_rope_layers must be a list of {num_layers}, one for each layer")
    has_rope = has_rope[:num_layers]
    types = ["full_attention" if rotates else "sliding_attention" for rotates in has_rope]
    config = decoder_config(fields, layer_types=types)
    return replace(config, rope_of=tuple(0 if rotates else None for rotates in has_rope))


def cohere_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Cohere model: attention and MLP side by side, after a layer norm."""
    if fields.raw("use_qk_norm"):
        raise unsupported("use_qk_norm", fields.raw("use_qk_norm"))
    return _cohere(fields, decoder_config(fields, is_interleaved=True))


def cohere2_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Cohere 2 model: layers without a window have no rotary embedding."""
    types = every_nth_full(fields, fields.count("sliding_window_pattern"))
    config = _cohere(fields, decoder_config(fields, layer_types=types, is_interleaved=True))
    rope_of = tuple(None if window is None else 0 for window in config.sliding_windows)
    return replace(config, rope_of=rope_of)


def _cohere(fields: ConfigFields, config: DecoderConfig) -> DecoderConfig:
    return replace(config, norm=None, is_parallel=True, logit_scale=fields.number("logit_scale"))


def gemma2_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Gemma 2 model: soft caps, and a window in every other layer."""
    config = decoder_config(fields, layer_types=every_nth_full(fields, 2))
    return replace(
        _gemma(fields, config), score_cap=fields.optional_number("attn_logit_softcapping")
    )


def gemma3_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Gemma 3 text model: rotary embeddings by layer type, norms of heads."""
    thetas = {
        "full_attention": fields.number("rope_theta"),
        "sliding_attention": fields.number("rope_local_base_freq"),
    }
    types = every_nth_full(fields, fields.count("sliding_window_pattern"))
    config = decoder_config(fields, layer_types=types, thetas=thetas)
    return replace(_gemma(fields, config), qk_norm=QkNorm.HEAD)


def _gemma(fields: ConfigFields, config: DecoderConfig) -> DecoderConfig:
    """Returns the config with what Gemma 2 and 3 have in common."""
    if fields.raw("use_bidirectional_attention"):
        raise unsupported("use_bidirectional_attention", fields.raw("use_bidirectional_attention"))
    return replace(
        config,
        norm=NormKind.OFFSET,
        norms_outputs=True,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        embedding_scale=config.hidden_size**0.5,
        rounds_embedding_scale=True,
        logit_cap=fields.optional_number("final_logit_softcapping"),
        names=_OUTPUT_NORMS | {"post_attention_layernorm": "pre_feedforward_layernorm"},
    )


def glm4_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a GLM-4 model: norms before and after attention and MLP."""
    return replace(
        decoder_config(fields, is_interleaved=True),
        output_bias=False,
        norms_outputs=True,
        names={
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        joined=frozenset({"gate_up_proj"}),
    )


def granite_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Granite model: factors on embeddings, residuals, scores, logits."""
    return replace(
        decoder_config(fields),
        embedding_scale=fields.number("embedding_multiplier"),
        residual_scale=fields.number("residual_multiplier"),
        attention_scale=fields.number("attention_multiplier"),
        logit_scale=1 / fields.number("logits_scaling"),
    )


def ernie4_5_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a dense ERNIE 4.5 model: one field says whether there are biases."""
    bias = fields.flag("use_bias")
    config = decoder_config(fields, is_interleaved=True)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def gpt_neox_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a GPT-NeoX model (arXiv:2204.06745): a fused Q, K and V of each head."""
    return replace(
        decoder_config(fields, gates_mlp=False),
        mlp_bias=True,
        norm=None,
        norm_bias=True,
        is_parallel=fields.flag("use_parallel_residual"),
        shares_norm=False,
        names={
            **_DENSE_NAMES,
            "model": "gpt_neox",
            "embed_tokens": "embed_in",
            "norm": "final_layer_norm",
            "lm_head": "embed_out",
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
        },
        joined=frozenset({"qkv_proj"}),
        joins_by_head=True,
    )


def falcon_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Falcon model (arXiv:2311.16867) with rotary embeddings."""
    is_new, is_parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn")
    num_norms = fields.optional_count("num_ln_in_parallel_attn")
    if fields.flag("alibi"):
        raise unsupported("alibi", value=True)
    if is_new and not is_parallel:
        raise unsupported("parallel_attn", value=False)
    if num_norms not in ((None, 1, 2) if is_new else (None, 1)):
        raise unsupported("num_ln_in_parallel_attn", num_norms)
    has_one_kv_head = fields.flag("multi_query") and not is_new
    num_kv_heads = 1 if has_one_kv_head else fields.optional_count("num_kv_heads")
    config = decoder_config(fields, num_kv_heads=num_kv_heads, gates_mlp=False)
    bias, shares_norm = fields.flag("bias"), not is_new or num_norms == 1
    norms = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
    return replace(
        config,
        intermediate_size=fields.optional_count("ffn_hidden_size") or 4 * config.hidden_size,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm=None,
        norm_bias=True,
        is_parallel=is_parallel,
        shares_norm=shares_norm,
        names={
            **_DENSE_NAMES,
            "model": "transformer",
            "embed_tokens": "word_embeddings",
            "layers": "h",
            "norm": "ln_f",
            "self_attn.qkv_proj": "self_attention.query_key_value",
            "self_attn.o_proj": "self_attention.dense",
            **({} if shares_norm else norms),
        },
        joined=frozenset({"qkv_proj"}),
        joins_by_head=not has_one_kv_head,
    )


def seed_oss_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Seed-OSS model: the projection after attention has its own field."""
    return replace(decoder_config(fields), output_bias=fields.flag("attention_out_bias"))


def phi3_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Phi-3 or Phi-4 model: fused projections, and LongRoPE."""
    config = decoder_config(fields)
    if config.ropes[0].rope_type not in ("default", "longrope"):
        raise unsupported("rope_type", config.ropes[0].rope_type)
    return replace(config, joined=frozenset({"qkv_proj", "gate_up_proj"}))


def olmo2_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of an OLMo 2 model: the outputs of attention and MLP are normalized."""
    return _olmo(decoder_config(fields))


def olmo3_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of an OLMo 3 model: as OLMo 2, and three of four layers have a window."""
    thetas = {
        "full_attention": fields.number("rope_theta"),
        # transformers reads config.json's `rope_theta` for the other layers alone.
        "sliding_attention": _OLMO3_SLIDING_THETA,
    }
    return _olmo(decoder_config(fields, layer_types=every_nth_full(fields, 4), thetas=thetas))


def _olmo(config: DecoderConfig) -> DecoderConfig:
    return replace(
        config,
        norm=NormKind.WIDE,
        norms_inputs=False,
        norms_outputs=True,
        qk_norm=QkNorm.PROJECTION,
        names=_OUTPUT_NORMS,
    )
