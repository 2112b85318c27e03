"""Families with mixtures of experts: each reads its config.json."""

from dataclasses import replace

from engine.models.config import MAX_LAYERS
from engine.models.config_fields import ConfigFieldError, ConfigFields, unsupported
from engine.models.decoder_config import DecoderConfig, QkNorm, decoder_config
from engine.models.expert_config import (
    ExpertsConfig,
    experts_config,
    grouped_experts_config,
    softmax_rule,
)
from engine.models.expert_storage import ExpertStorage
from engine.models.latent_config import latent_config
from kernels import CLAMP_LIMIT, CLAMP_SLOPE, Activation, ExpertScores, NormKind, RoutingRule

__all__ = [
    "deepseek_v2_config",
    "deepseek_v3_config",
    "glm4_moe_config",
    "glm4_moe_lite_config",
    "gpt_oss_config",
    "mixtral_config",
    "olmoe_config",
    "qwen2_moe_config",
    "qwen3_moe_config",
]

# DeepSeek's names of the experts that all tokens have, as one, and of the ranking's bias.
_SHARED_EXPERT_NAMES = {
    "shared_expert": "shared_experts",
    "ranking_bias": "gate.e_score_correction_bias",
}
_GREEDY, _BY_GROUP = "greedy", "group_limited_greedy"
_MLP_TYPES = ("dense", "sparse")


def qwen2_moe_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Qwen1.5 or Qwen2 mixture, with an expert that all tokens share."""
    if fields.flag("use_sliding_window") and fields.raw("layer_types") is None:
        raise ConfigFieldError("use_sliding_window needs layer_types")
    return replace(
        decoder_config(fields),
        qkv_bias=fields.flag("qkv_bias"),
        experts=experts_config(fields, softmax_rule(fields)),
    )


def qwen3_moe_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Qwen3 mixture: Qwen3's attention, experts in some or all layers."""
    return replace(
        decoder_config(fields),
        qk_norm=QkNorm.HEAD,
        experts=experts_config(fields, softmax_rule(fields)),
    )


def mixtral_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a Mixtral model, which weighs experts in float32."""
    experts = experts_config(
        fields,
        RoutingRule(1, normalizes=True, rounds=False),
        count_field="num_local_experts",
        width_field="intermediate_size",
    )
    names = {
        "mlp": "block_sparse_moe",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
    }
    return replace(decoder_config(fields), experts=experts, names=names)


def olmoe_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of an OLMoE model: norms over whole projections of Q and K."""
    if fields.raw("clip_qkv") is not None:
        raise unsupported("clip_qkv", fields.raw("clip_qkv"))
    return replace(
        decoder_config(fields),
        qk_norm=QkNorm.PROJECTION,
        experts=experts_config(fields, softmax_rule(fields), width_field="intermediate_size"),
    )


def gpt_oss_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a gpt-oss model (arXiv:2508.10925).

    Every other layer has a window, each head's softmax a sink, and gates are clamped.
    """
    for name, constant in (("swiglu_limit", CLAMP_LIMIT), ("swiglu_alpha", CLAMP_SLOPE)):
        if fields.number(name) != constant:
            raise unsupported(name, fields.value(name))
    experts = experts_config(
        fields,
        RoutingRule(1, ExpertScores.SOFTMAX_OF_CHOSEN),
        count_field="num_local_experts",
        width_field="intermediate_size",
    )
    num_layers = fields.count("num_hidden_layers", MAX_LAYERS)
    types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    return replace(
        decoder_config(fields, layer_types=types),
        norm=NormKind.WIDE,
        has_sinks=True,
        names={"mlp.gate": "mlp.router"},
        experts=replace(
            experts,
            activation=Activation.CLAMPED_SILU,
            has_biases=True,
            storage=ExpertStorage.INTERLEAVED,
        ),
    )


def glm4_moe_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a GLM-4.5 mixture: Llama's attention, DeepSeek-V3's experts."""
    return replace(
        decoder_config(fields),
        output_bias=False,
        qk_norm=QkNorm.HEAD if fields.flag("use_qk_norm") else QkNorm.NONE,
        experts=_sigmoid_experts(fields),
        names=_SHARED_EXPERT_NAMES,
    )


def deepseek_v2_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a DeepSeek-V2 model (arXiv:2405.04434)."""
    method = fields.text("topk_method")
    if method not in (_GREEDY, _BY_GROUP):
        raise unsupported("topk_method", method)
    if fields.flag("norm_topk_prob"):  # implementations disagree about the factor on weights
        raise unsupported("norm_topk_prob", value=True)
    _check_constant(fields, "scoring_func")
    experts = grouped_experts_config(fields, RoutingRule(1), has_groups=method == _BY_GROUP)
    return _deepseek(fields, experts, is_interleaved=True)


def deepseek_v3_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a DeepSeek-V3 or R1 model (arXiv:2412.19437)."""
    is_interleaved = fields.flag("rope_interleave")
    return _deepseek(fields, _sigmoid_experts(fields), is_interleaved=is_interleaved)


def glm4_moe_lite_config(fields: ConfigFields) -> DecoderConfig:
    """Reads the config of a GLM-4.7-Flash model: DeepSeek-V3 with types of MLPs by layer."""
    config = deepseek_v3_config(fields)
    types = fields.raw("mlp_layer_types")
    if types is None:
        return config
    is_list = isinstance(types, list) and all(kind in _MLP_TYPES for kind in types)
    if not is_list or len(types) != config.num_layers:
        raise ConfigFieldError(
            f"mlp_layer_types must be a list of {config.num_layers}, each one of "
            f"{', '.join(_MLP_TYPES)}"
        )
    assert config.experts is not None
    is_sparse = tuple(kind == "sparse" for kind in types)
    return replace(config, experts=replace(config.experts, is_sparse=is_sparse))


def _deepseek(
    fields: ConfigFields, experts: ExpertsConfig, *, is_interleaved: bool
) -> DecoderConfig:
    """Reads a model with latent attention, and experts after the first layers."""
    latent = latent_config(fields)
    config = decoder_config(fields, is_interleaved=is_interleaved, head_dim=latent.rotary_dim)
    (rope,) = config.ropes
    if rope.rope_type not in ("default", "yarn"):
        raise unsupported("rope_type", rope.rope_type)
    temperature = rope.temperature(rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    return replace(
        config,
        num_kv_heads=1,
        num_kv_parts=1,
        head_dim=latent.head_dim,
        attention_scale=latent.query_dim**-0.5 * temperature**2,
        latent=latent,
        experts=experts,
        names=_SHARED_EXPERT_NAMES,
    )


def _sigmoid_experts(fields: ConfigFields) -> ExpertsConfig:
    """Reads the mixtures of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2)."""
    rule = RoutingRule(
        1, ExpertScores.SIGMOID, normalizes=fields.flag("norm_topk_prob"), group_terms=2
    )
    for name in ("scoring_func", "topk_method"):
        _check_constant(fields, name)
    return replace(grouped_experts_config(fields, rule), has_ranking_bias=True)


def _check_constant(fields: ConfigFields, name: str) -> None:
    if fields.value(name) != fields.default(name):
        raise unsupported(name, fields.value(name))
