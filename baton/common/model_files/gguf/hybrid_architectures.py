"""GGUF files of hybrids: models with recurrent layers beside those with attention.

Files of gated delta nets (Qwen3-Next, Qwen3.5) have other tensors than checkpoints. The inputs of
a net's queries, keys and values are one tensor, its gate is another. The decay is stored as
-exp(A_log). Files of Qwen3.5 have the heads of values in another order: the first of each head of
keys, then the second of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from baton.common.model_files.gguf.architecture import GgufArchitecture, TensorOrder
from baton.common.model_files.gguf.expert_architectures import (
    SHARED_EXPERT_KEYS,
    SHARED_EXPERT_NAMES,
    qwen_moe_fields,
    shared_expert_fields,
)
from baton.common.model_files.gguf.values import HeaderValues

__all__ = ["HYBRID_ARCHITECTURES"]


def _lfm2(values: HeaderValues) -> Mapping[str, Any]:
    return {
        "norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "layer_types": [
            "full_attention" if num_kv_heads else "conv"
            for num_kv_heads in values.per_layer("attention.head_count_kv")
        ],
        "conv_L_cache": values.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in values.header.tensors),
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted width
    }


def _qwen3_5(values: HeaderValues) -> dict[str, Any]:
    interval = values.integer("full_attention_interval", 4)
    num_states = values.integer("ssm.time_step_rank")
    inner_size = values.integer("ssm.inner_size")
    num_keys = values.integer("ssm.group_count")
    if inner_size % num_states:
        raise values.unsupported("ssm.inner_size")
    if num_states % num_keys:
        raise values.unsupported("ssm.group_count")
    return {
        "layer_types": [
            "linear_attention" if number % interval else "full_attention"
            for number in range(1, values.num_layers + 1)
        ],
        "linear_conv_kernel_dim": values.integer("ssm.conv_kernel"),
        "linear_key_head_dim": values.integer("ssm.state_size"),
        "linear_value_head_dim": inner_size // num_states,
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_states,
    }


def _qwen3_next(values: HeaderValues) -> dict[str, Any]:
    return {
        **_qwen3_5(values),
        **qwen_moe_fields(values, normalizes=True),
        **shared_expert_fields(values),
    }


def _qwen3_5_moe(values: HeaderValues) -> dict[str, Any]:
    if not values.flag("expert_weights_norm", default=True):
        raise values.unsupported("expert_weights_norm")
    return _qwen3_next(values)


def _orders_of_qwen3_next(values: HeaderValues) -> Mapping[str, TensorOrder]:
    """Returns the order of the joined projections, which checkpoints have by heads of keys."""
    fields = _qwen3_5(values)
    num_keys, key_dim = fields["linear_num_key_heads"], fields["linear_key_head_dim"]
    values_dim = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
    widths = [key_dim, key_dim, values_dim // num_keys, values_dim // num_keys]
    return {"attn_qkv": TensorOrder(rows=[*_rows_by_heads(num_keys, widths)])}


def _rows_by_heads(num_heads: int, widths: Sequence[int]) -> Iterator[int]:
    """Yields, head by head, the rows of tensors that follow each other.

    Args:
        num_heads: number of heads in each tensor.
        widths: rows of a head in each of the tensors.
    """
    for head in range(num_heads):
        first = 0
        for width in widths:
            yield from range(first + head * width, first + (head + 1) * width)
            first += num_heads * width


def _orders_of_qwen3_5(values: HeaderValues) -> Mapping[str, TensorOrder]:
    """Returns the orders of tensors that have the heads of values."""
    fields = _qwen3_5(values)
    num_keys, num_states = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    dim, keys = fields["linear_value_head_dim"], 2 * num_keys * fields["linear_key_head_dim"]
    # The number in the file of each of the checkpoint's heads.
    heads = [j * num_keys + i for i in range(num_keys) for j in range(num_states // num_keys)]
    rows = [head * dim + row for head in heads for row in range(dim)]
    behind_keys = TensorOrder(rows=[*range(keys), *(keys + row for row in rows)])
    by_head = TensorOrder(rows=heads)
    return {
        "attn_qkv": behind_keys,
        "ssm_conv1d": behind_keys,
        "attn_gate": TensorOrder(rows=rows),
        "ssm_out": TensorOrder(columns=rows),
        **dict.fromkeys(("ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt"), by_head),
    }


def _log_of_negative(numbers: Any) -> Any:
    return numbers.neg().log()


_DELTA_KEYS = frozenset(
    {
        "full_attention_interval",
        "ssm.conv_kernel",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
    }
)
_DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN3_5_NAMES = {
    **_DELTA_NAMES,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
# The sections are of positions in images; those of a text are equal in all of them.
_QWEN3_5_KEYS = _DELTA_KEYS | {"nextn_predict_layers", "rope.dimension_sections"}
_DELTA: Mapping[str, Any] = MappingProxyType(
    {
        "rotates_part": True,
        "norm_offset": 1,
        "plain_norms": frozenset({"ssm_norm"}),
        "conversions": {"ssm_a": _log_of_negative},
    }
)
HYBRID_ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "lfm2": GgufArchitecture(
            model_class="Lfm2ForCausalLM",
            model_type="lfm2",
            keys=frozenset({"shortconv.l_cache"}),
            fields=_lfm2,
            names={
                "attn_norm": "operator_norm",
                "attn_output": "self_attn.out_proj",
                "attn_q_norm": "self_attn.q_layernorm",
                "attn_k_norm": "self_attn.k_layernorm",
                "shortconv.conv": "conv.conv",
                "shortconv.in_proj": "conv.in_proj",
                "shortconv.out_proj": "conv.out_proj",
                "ffn_norm": "ffn_norm",
                "ffn_gate": "feed_forward.w1",
                "ffn_up": "feed_forward.w3",
                "ffn_down": "feed_forward.w2",
            },
            final_norm="model.embedding_norm",
            mixes_layers=True,
            new_axes={"shortconv.conv": 1},
        ),
        "qwen3next": GgufArchitecture(
            model_class="Qwen3NextForCausalLM",
            model_type="qwen3_next",
            keys=_DELTA_KEYS | SHARED_EXPERT_KEYS,
            fields=_qwen3_next,
            names={
                **SHARED_EXPERT_NAMES,
                **_DELTA_NAMES,
                "attn_qkv": "linear_attn.in_proj_qkvz",
                "ssm_in": "linear_attn.in_proj_qkvz",  # of older converters, in one tensor
                "ssm_ba": "linear_attn.in_proj_ba",
            },
            orders=_orders_of_qwen3_next,
            joined={"attn_qkv": ("attn_gate",)},
            new_axes={"ffn_gate_inp_shexp": 0, "ssm_conv1d": 1},
            **_DELTA,
        ),
        "qwen35": GgufArchitecture(
            model_class="Qwen3_5ForCausalLM",
            model_type="qwen3_5_text",
            keys=_QWEN3_5_KEYS,
            fields=_qwen3_5,
            names=_QWEN3_5_NAMES,
            orders=_orders_of_qwen3_5,
            new_axes={"ssm_conv1d": 1},
            **_DELTA,
        ),
        "qwen35moe": GgufArchitecture(
            model_class="Qwen3_5MoeForCausalLM",
            model_type="qwen3_5_moe_text",
            keys=_QWEN3_5_KEYS | SHARED_EXPERT_KEYS,
            fields=_qwen3_5_moe,
            names={**SHARED_EXPERT_NAMES, **_QWEN3_5_NAMES},
            orders=_orders_of_qwen3_5,
            new_axes={"ffn_gate_inp_shexp": 0, "ssm_conv1d": 1},
            **_DELTA,
        ),
    }
)
