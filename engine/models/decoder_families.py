"""Families that differ from Llama in fields of `DecoderConfig`: each reads its config.json."""

from dataclasses import replace

from engine.models.config import DecoderConfig, QkNorm, decoder_config
from engine.models.config_fields import ConfigFieldError, ConfigFields, unsupported

__all__ = ["phi3_config", "qwen2_config", "qwen3_config", "smollm3_config"]


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


def phi3_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Phi-3 or Phi-4 model: fused projections, and LongRoPE."""
    config = decoder_config(fields)
    if config.ropes[0].rope_type not in ("default", "longrope"):
        raise unsupported("rope_type", config.ropes[0].rope_type)
    return replace(config, joined=frozenset({"qkv_proj", "gate_up_proj"}))
