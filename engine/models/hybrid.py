"""Hybrids: models whose layers have attention, or a recurrent mixer with a state (LFM2).

A recurrent layer keeps, in place of the K and V of each token, one state that sums up all tokens
before; see `kernels.LayerState`.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

import kernels
from baton.common.errors import ConfigurationError
from engine.models.config import StateShape
from engine.models.config_fields import ConfigFieldError, ConfigFields, positive
from engine.models.decoder import Decoder, new_mlp, new_norm
from engine.models.decoder_config import DecoderConfig, QkNorm, decoder_config, fields_of
from engine.models.layers import select_rows
from engine.models.linear import FusedLinear, Linear, cut_of
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.models.tensor_parts import StoredModule, TensorPart, as_numbers
from kernels import Cut, RankGroup, Rotation, RowsOfWeight
from kernels.block_rows import BlockRows
from kernels.paged_kv import LayerState

__all__ = [
    "CausalConv",
    "Hybrid",
    "Lfm2",
    "Lfm2Config",
    "lfm2_config",
    "read_conv_width",
]

_MAX_CONV_WIDTH = 16
_LFM2_NAMES = {
    "norm": "embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "mixer": "conv",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """LFM2.

    Attributes:
        conv_width: tokens that a convolution sees, the token itself included.
        conv_bias: whether the convolution and the projections around it have biases.
    """

    conv_width: int
    conv_bias: bool

    @property
    @override
    def mixer_size(self) -> int:
        return max(self.attention_size(), 4 * self.hidden_size)

    @property
    @override
    def state_shapes(self) -> tuple[StateShape, ...]:
        return (StateShape("conv", self.hidden_size, self.conv_width - 1),)


def lfm2_config(fields: ConfigFields) -> Lfm2Config:
    """Reads the config of an LFM2 model.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    num_layers = fields.count("num_hidden_layers")
    attending = fields.value("full_attn_idxs")
    if attending is not None and not isinstance(attending, list):
        raise ConfigFieldError(f"full_attn_idxs is {attending!r}; it must be a list of layers")
    types = [
        "full_attention" if attending is None or layer in attending else "conv"
        for layer in range(num_layers)
    ]
    config = decoder_config(fields, layer_types=types, recurrent_type="conv")
    own = {
        "intermediate_size": _lfm2_mlp_size(fields),
        "rms_norm_eps": fields.epsilon("norm_eps"),
        "qk_norm": QkNorm.HEAD,
        "names": _LFM2_NAMES,
        "conv_width": read_conv_width(fields, "conv_L_cache"),
        "conv_bias": fields.flag("conv_bias"),
    }
    if fields.states("tie_embedding"):
        own["tie_word_embeddings"] = fields.flag("tie_embedding")
    return Lfm2Config(**{**fields_of(config), **own})


def read_conv_width(fields: ConfigFields, name: str) -> int:
    """Reads the number of tokens that a convolution sees.

    Raises:
        ConfigFieldError: it is less than 2, or too large.
    """
    width = fields.count(name, _MAX_CONV_WIDTH)
    if width < 2:
        raise ConfigFieldError(f"{name} is {width}; it must be at least 2")
    return width


def _lfm2_mlp_size(fields: ConfigFields) -> int:
    size = fields.optional_count("block_ff_dim") or fields.count("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return size
    name = "block_ffn_dim_multiplier"
    size = int(positive(name, fields.value(name)) * (2 * size // 3))
    multiple = fields.count("block_multiple_of")
    return -(-size // multiple) * multiple


class Hybrid(Decoder):
    """A decoder some of whose layers are recurrent.

    Raises:
        ConfigurationError: its states cannot be divided among that many ranks.
    """

    def __init__(self, config: DecoderConfig, part: ModelPart = WHOLE_MODEL) -> None:
        if part.ranks is not None:
            _check_equal_parts(config, part.ranks.size)
        super().__init__(config, part)

    @override
    def _new_layer(self, config: DecoderConfig, number: int) -> nn.Module:
        if number not in config.recurrent_layers:
            return super()._new_layer(config, number)
        return RecurrentLayer(config, number, self._new_mixer(config), self.part.ranks)

    @abstractmethod
    def _new_mixer(self, config: Any) -> nn.Module:
        """Makes the part of a recurrent layer that mixes tokens, in place of attention."""


def _check_equal_parts(config: DecoderConfig, num_ranks: int) -> None:
    """Checks that each rank has as large a part of a state as of a block.

    Raises:
        ConfigurationError: it has not; names what cannot be divided.
    """
    heads = {f"'{shape.name}' heads of states": shape.num_heads for shape in config.state_shapes}
    for name, num_heads in {"KV heads": config.num_kv_heads, **heads}.items():
        if num_heads % num_ranks:
            raise ConfigurationError(
                f"--tensor-parallel-size is {num_ranks}; it must divide the {num_heads} {name} of "
                "a model with recurrent layers"
            )


class RecurrentLayer(nn.Module):
    """A layer with a recurrent mixer.

    Args:
        config: the model's shape.
        number: number of the layer in the model.
        mixer: mixes tokens; called as `mixer(hidden, state, residual)`.
        ranks: the ranks that share the layer; None for one.
    """

    def __init__(
        self, config: DecoderConfig, number: int, mixer: nn.Module, ranks: RankGroup | None
    ) -> None:
        super().__init__()
        self.input_layernorm = new_norm(config)
        self.mixer = mixer
        self.post_attention_layernorm = new_norm(config)
        self.mlp = new_mlp(config, number, ranks)

    def forward(
        self, hidden: torch.Tensor, rotations: Sequence[Rotation], state: LayerState
    ) -> torch.Tensor:
        """Computes `[num_tokens, hidden_size]`; returns the rows of the tokens in `state.rows`.

        Args:
            hidden: the layer's input.
            rotations: rotary angles, which only layers with attention use.
            state: the layer's states.
        """
        hidden = self.mixer(self.input_layernorm(hidden), state, hidden)
        norm = self.post_attention_layernorm
        output: torch.Tensor = self.mlp(hidden, residual=hidden, norm=norm)
        return output


class Lfm2(Hybrid):
    """LFM2 (arXiv:2511.23404): gated short convolutions, and some layers with attention."""

    @override
    def _new_mixer(self, config: Lfm2Config) -> nn.Module:
        return ShortConv(config, self.part.ranks)


class ShortConv(nn.Module):
    """A gated short convolution with the projections before and after it.

    Args:
        config: the model's shape.
        ranks: the ranks that share the layer, each of which has a range of channels.
    """

    def __init__(self, config: Lfm2Config, ranks: RankGroup | None) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.conv_bias
        channels = cut_of(size, ranks)
        parts = {"before": channels, "after": channels, "values": channels}
        self.in_proj = FusedLinear(size, parts, bias=bias, is_joined=True)
        self.conv = CausalConv(channels, config.conv_width, bias=bias)
        self.out_proj = Linear(channels, size, bias=bias, ranks=ranks)

    def forward(
        self, hidden: torch.Tensor, state: LayerState, residual: torch.Tensor
    ) -> torch.Tensor:
        """Computes `[num_tokens, hidden_size]` and adds `residual`; returns the rows of the tokens
        in `state.rows`.
        """
        conv = self.conv
        mixed = kernels.short_conv(self.in_proj(hidden), conv.weight, conv.bias, state)
        output: torch.Tensor = self.out_proj(
            select_rows(mixed, state), select_rows(residual, state)
        )
        return output


class CausalConv(StoredModule):
    """The weights of a causal convolution by channel.

    Args:
        channels: this rank's channels.
        width: tokens that it sees.
        bias: whether it has a bias.

    Attributes:
        weight: `[width, channels]`; the checkpoint has `[channels, 1, width]`.
        bias: `[channels]`, or None.
    """

    def __init__(self, channels: Cut, width: int, *, bias: bool) -> None:
        super().__init__()
        self._channels = channels
        self.weight = nn.Parameter(torch.empty(width, channels.size))
        self.bias = nn.Parameter(torch.empty(channels.size)) if bias else None

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        cuts = (self._channels, Cut.whole(1), Cut.whole(len(self.weight)))
        yield TensorPart(f"{path}.weight", _ConvWeight(self.weight), cuts)
        if self.bias is not None:
            yield TensorPart(f"{path}.bias", self.bias, (self._channels,))


class _ConvWeight(RowsOfWeight):
    """A target of `[channels, 1, width]` that stores `[width, channels]`."""

    def __init__(self, target: torch.Tensor) -> None:
        self.shape = (target.shape[1], 1, target.shape[0])
        self.nbytes = target.nbytes
        self._target = target

    @override
    def copy_(self, source: torch.Tensor | BlockRows) -> None:
        self._target.copy_(as_numbers(source).reshape(self.shape).squeeze(1).t())
