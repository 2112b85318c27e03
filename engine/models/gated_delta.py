"""Hybrids with gated delta nets (arXiv:2412.06464): Qwen3-Next, text models of Qwen3.5."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from typing_extensions import override

import kernels
from engine.models.config import StateShape
from engine.models.config_fields import ConfigFieldError, ConfigFields, unsupported
from engine.models.decoder_config import (
    DecoderConfig,
    QkNorm,
    decoder_config,
    every_nth_full,
    fields_of,
)
from engine.models.expert_config import experts_config, softmax_rule
from engine.models.hybrid import CausalConv, Hybrid, read_conv_width
from engine.models.layers import select_rows
from engine.models.linear import FusedLinear, Linear, cut_of
from engine.models.norms import RmsNorm
from engine.models.tensor_parts import StoredModule, TensorPart, grouped_order
from kernels import Cut, RankGroup, RoutingRule
from kernels.layer_kinds import Activation, NormKind
from kernels.paged_kv import DeltaGates, LayerState

__all__ = [
    "GatedDelta",
    "GatedDeltaConfig",
    "qwen3_5_config",
    "qwen3_5_moe_config",
    "qwen3_next_config",
]

_MAX_DIM = 4096
_NAMES = {
    "mixer": "linear_attn",
    "mixer.rates": "linear_attn",
    # One tensor has the convolutions of Q, K and V.
    "conv1d.query": "conv1d",
    "conv1d.key": "conv1d",
    "conv1d.value": "conv1d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig(DecoderConfig):
    """A hybrid with gated delta nets.

    Attributes:
        num_state_keys: heads of queries and keys of a gated delta net.
        num_states: heads of values, each of which has a state.
        key_dim: width of queries and keys.
        value_dim: width of values.
        conv_width: tokens that a convolution sees, the token itself included.
        joins_heads: whether the checkpoint joins the projections, key head by key head; otherwise
            it has queries, keys and values in one matrix, one after the other, and other
            projections apart.
    """

    num_state_keys: int
    num_states: int
    key_dim: int
    value_dim: int
    conv_width: int
    joins_heads: bool = False

    @property
    @override
    def mixer_size(self) -> int:
        keys, values = self.num_state_keys * self.key_dim, self.num_states * self.value_dim
        convolved = 2 * (2 * keys + values)  # before and after
        gated = 4 * values  # gates, and the mixed values as they are, normalized, and gated
        recurrent = convolved + gated + 2 * self.num_states
        return max(self.attention_size(has_gates=True), recurrent)

    @property
    @override
    def state_shapes(self) -> tuple[StateShape, ...]:
        past = self.conv_width - 1
        return (
            StateShape("query", self.num_state_keys, self.key_dim * past),
            StateShape("key", self.num_state_keys, self.key_dim * past),
            StateShape("value", self.num_states, self.value_dim * past),
            StateShape("memory", self.num_states, self.key_dim * self.value_dim, "float32"),
        )


def qwen3_5_config(fields: ConfigFields) -> GatedDeltaConfig:
    """Reads the config of the text part of a dense Qwen3.5 model.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    interval = fields.count("full_attention_interval")
    types = every_nth_full(fields, interval, "linear_attention")
    config = decoder_config(fields, layer_types=types, recurrent_type="linear_attention")
    if config.activation is not Activation.SILU:  # of the convolutions too
        raise unsupported("hidden_act", fields.text("hidden_act"))
    num_keys, num_states = (fields.count(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if num_states % num_keys:
        raise ConfigFieldError(
            f"linear_num_value_heads {num_states} is not a multiple of "
            f"linear_num_key_heads {num_keys}"
        )
    own = {
        "norm": NormKind.OFFSET,
        "qk_norm": QkNorm.HEAD,
        "gates_outputs": True,
        "names": _NAMES,
        "num_state_keys": num_keys,
        "num_states": num_states,
        "key_dim": fields.count("linear_key_head_dim", _MAX_DIM),
        "value_dim": fields.count("linear_value_head_dim", _MAX_DIM),
        "conv_width": read_conv_width(fields, "linear_conv_kernel_dim"),
    }
    return GatedDeltaConfig(**{**fields_of(config), **own})


def qwen3_next_config(fields: ConfigFields) -> GatedDeltaConfig:
    """Reads the config of a Qwen3-Next model, with experts and joined projections.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    experts = experts_config(fields, softmax_rule(fields))
    return replace(qwen3_5_config(fields), experts=experts, joins_heads=True)


def qwen3_5_moe_config(fields: ConfigFields) -> GatedDeltaConfig:
    """Reads the config of the text part of a Qwen3.5 or Qwen3.6 mixture: experts in all layers.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    experts = experts_config(fields, RoutingRule(1, normalizes=True))
    return replace(qwen3_5_config(fields), experts=experts)


class GatedDelta(Hybrid):
    """Qwen3-Next and Qwen3.5: gated delta nets, and some layers with gated attention."""

    @override
    def _new_mixer(self, config: GatedDeltaConfig) -> nn.Module:
        return GatedDeltaNet(config, self.part.ranks)


class GatedDeltaNet(nn.Module):
    """A gated delta net with the projections before and after it.

    Args:
        config: the model's shape.
        ranks: the ranks that share the layer, each of which has some heads.
    """

    def __init__(self, config: GatedDeltaConfig, ranks: RankGroup | None) -> None:
        super().__init__()
        heads = cut_of(config.num_states, ranks)
        keys = cut_of(config.num_state_keys, ranks).times(config.key_dim)
        values = heads.times(config.value_dim)
        qkv = {"query": keys, "key": keys, "value": values}
        gates = {"in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        self._key_dim, self._value_dim = config.key_dim, config.value_dim
        self._widths = [cut.size for cut in (*qkv.values(), *gates.values())]
        size, num_keys = config.hidden_size, keys.size // config.key_dim
        if config.joins_heads:
            *joined, update, decay = self._widths
            self.in_proj_qkvz = _projection_by_heads(size, ranks, num_keys, joined)
            self.in_proj_ba = _projection_by_heads(size, ranks, num_keys, [update, decay])
        else:
            self.in_proj_qkv = FusedLinear(size, qkv, bias=False, is_joined=True)
            self.in_proj_gates = FusedLinear(size, gates, bias=False)
        self._joins_heads = config.joins_heads
        self.conv1d = _joined_convs(qkv, config.conv_width)
        self.rates = _DeltaRates(heads)
        self.norm = RmsNorm(config.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, config.hidden_size, bias=False, ranks=ranks)

    def forward(
        self, hidden: torch.Tensor, state: LayerState, residual: torch.Tensor
    ) -> torch.Tensor:
        """Computes `[num_tokens, hidden_size]` and adds `residual`; returns the rows of the tokens
        in `state.rows`.
        """
        *qkv, gate, update, decay = self._project(hidden)
        query, key, value = (self._convolve(number, part, state) for number, part in enumerate(qkv))
        mixed = kernels.gated_delta(
            query.view(len(query), -1, self._key_dim),
            key.view(len(key), -1, self._key_dim),
            value.view(len(value), -1, self._value_dim),
            DeltaGates(update, decay, self.rates.A_log, self.rates.dt_bias),
            state,
        )
        normed = self.norm(select_rows(mixed, state)).flatten(1)
        gated = kernels.gate_rows(normed, select_rows(gate, state), Activation.SILU)
        output: torch.Tensor = self.out_proj(gated, select_rows(residual, state))
        return output

    def _project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Returns queries, keys, values, and the inputs of the gates: output, update and decay."""
        if self._joins_heads:
            first, num_first, second = self.in_proj_qkvz(hidden), 4, self.in_proj_ba(hidden)
        else:
            first, num_first, second = self.in_proj_qkv(hidden), 3, self.in_proj_gates(hidden)
        return [
            *torch.split(first, self._widths[:num_first], dim=1),
            *torch.split(second, self._widths[num_first:], dim=1),
        ]

    def _convolve(self, number: int, values: torch.Tensor, state: LayerState) -> torch.Tensor:
        """Convolves queries, keys or values, by their number, which is that of their state too."""
        conv = [*self.conv1d.values()][number]
        assert isinstance(conv, CausalConv)
        return kernels.conv_silu(values, conv.weight, None, state, number)


def _projection_by_heads(
    size: int, ranks: RankGroup | None, num_keys: int, widths: Sequence[int]
) -> FusedLinear:
    """Returns projections that the checkpoint has as one matrix, key head by key head.

    Args:
        size: width of the input.
        ranks: the ranks that share the matrix.
        num_keys: key heads of this rank.
        widths: width of each projection on this rank; in the result they lie one after the other.
    """
    rows = cut_of(sum(widths) * (1 if ranks is None else ranks.size), ranks)
    return FusedLinear(
        size,
        {"heads": rows},
        bias=False,
        is_joined=True,
        row_orders={"heads": grouped_order(num_keys, widths)},
    )


class _DeltaRates(StoredModule):
    """The parameters of the decay of each head on this rank."""

    def __init__(self, heads: Cut) -> None:
        super().__init__()
        self._heads = heads
        self.A_log = nn.Parameter(torch.empty(heads.size))
        self.dt_bias = nn.Parameter(torch.empty(heads.size))

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        yield TensorPart(f"{path}.A_log", self.A_log, (self._heads,))
        yield TensorPart(f"{path}.dt_bias", self.dt_bias, (self._heads,))


def _joined_convs(parts: Mapping[str, Cut], width: int) -> nn.ModuleDict:
    """Returns a convolution for each part, whose weights are one tensor in the checkpoint."""
    total, first, convs = sum(cut.total for cut in parts.values()), 0, nn.ModuleDict()
    for name, cut in parts.items():
        convs[name] = CausalConv(Cut(total, first + cut.start, first + cut.end), width, bias=False)
        first += cut.total
    return convs
