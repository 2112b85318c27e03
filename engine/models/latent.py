"""Latent attention: the keys and values of all heads come from one cached vector per token.

    hidden -> latent vector, and a rotated part of the key -> cache
    query -> space of the latent vectors -> attention over them -> value of each head -> output

This is the absorbed form (DeepSeek-V2, arXiv:2405.04434, appendix C): keys and values are never
computed. The matrix that a key is the product of a latent vector with multiplies the query
instead, and that of the value multiplies the sum of the vectors that a query attends to. Ranks
divide the heads; each of them computes and keeps the whole vectors.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from typing_extensions import override

import kernels
from engine.models.decoder_config import DecoderConfig
from engine.models.latent_config import LatentConfig
from engine.models.layers import HeadCuts, select_rows
from engine.models.linear import FusedLinear, Linear, PackedModule
from engine.models.norms import RmsNorm
from engine.models.tensor_parts import OneOfStack, TensorPart, TransposedRows, half_split_order
from kernels import Cut, RankGroup, Rotation, WeightStack, WeightUse
from kernels.paged_kv import LayerKv

__all__ = ["HeadLinear", "LatentAttention"]

_EPS = 1e-6  # of the norms of latent vectors, in all families


class HeadLinear(PackedModule):
    """A linear layer without a bias for each head.

    The checkpoint has a tensor of `[heads * parts.total, columns]` for it and other layers; `parts`
    are its rows of each head there. Without such a tensor it has `[heads, outputs, inputs]`.

    Args:
        heads: the heads of this rank.
        parts: the rows of a head.
        num_columns: number of columns of the tensor.
        stored_as: name of the checkpoint's tensor of several layers; None if each has its own.
        is_transposed: whether that tensor's rows are the inputs of this layer, not the outputs.
    """

    def __init__(
        self,
        heads: Cut,
        parts: Cut,
        num_columns: int,
        *,
        stored_as: str | None,
        is_transposed: bool,
    ) -> None:
        self._shape = (num_columns, parts.size) if is_transposed else (parts.size, num_columns)
        super().__init__(heads.size * self._shape[0], self._shape[1], WeightUse.LINEAR)
        self._heads, self._parts, self._num_columns = heads, parts, num_columns
        self._stored_as, self._is_transposed = stored_as, is_transposed

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        use = self.weight.use
        self.weight = kernels.make_weight_stack(self._heads.size, *self._shape, dtype, device, use)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, heads, inputs]` to `[num_tokens, heads, outputs]`; elements past the
        inputs are copied behind the outputs.
        """
        assert isinstance(self.weight, WeightStack)
        return kernels.head_linear(states, self.weight)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        heads = self._heads
        matrices = [
            self.weight.rows(number * self._shape[0], self._shape[0])
            for number in range(heads.size)
        ]
        if self._stored_as is None:
            for head, matrix in enumerate(matrices, heads.start):
                of_head = Cut(heads.total, head, head + 1)
                cuts = of_head, *map(Cut.whole, self._shape)
                yield TensorPart(f"{path}.weight", OneOfStack(matrix), cuts)
            return
        name = f"{path.rpartition('.')[0]}.{self._stored_as}.weight"
        total, columns = heads.total * self._parts.total, Cut.whole(self._num_columns)
        for head, matrix in enumerate(matrices, heads.start):
            first = head * self._parts.total + self._parts.start
            rows = Cut(total, first, first + self._parts.size)
            target = TransposedRows(matrix) if self._is_transposed else matrix
            yield TensorPart(name, target, (rows, columns))


class LatentAttention(nn.Module):
    """Latent attention with the projections before and after it.

    Args:
        config: the model's shape, whose `latent` is not None.
        number: number of the layer in the model.
        ranks: the ranks that share the layer; None for one.
    """

    def __init__(self, config: DecoderConfig, number: int, ranks: RankGroup | None) -> None:
        super().__init__()
        latent, rope = config.latent, config.rope_of[number]
        assert latent is not None
        assert rope is not None
        heads = HeadCuts.of(config, ranks).query
        self._rope, self._is_interleaved = rope, config.ropes[rope].is_interleaved
        self._num_heads, self._latent = heads.size, latent
        assert config.attention_scale is not None
        self._scale = config.attention_scale
        query, rank = heads.times(latent.query_dim), latent.query_rank
        query_name = "q_proj" if rank is None else "q_a_proj"
        inner = query if rank is None else Cut.whole(rank)
        self._widths = [inner.size, latent.head_dim]
        parts = {query_name: inner, "kv_a_proj_with_mqa": Cut.whole(latent.head_dim)}
        self.qkv_a_proj = self._new_projection(config.hidden_size, parts)
        if rank is not None:
            self.q_a_layernorm = RmsNorm(rank, _EPS)
            self.q_b_proj = self._new_projection(rank, {"q_b_proj": query})
        self.kv_a_layernorm = RmsNorm(latent.latent_dim, _EPS)
        self.k_b_proj, self.v_b_proj = _absorbed_layers(latent, heads)
        values = heads.times(latent.value_dim)
        self.o_proj = Linear(values, config.hidden_size, bias=False, ranks=ranks)

    def forward(
        self,
        hidden: torch.Tensor,
        rotations: Sequence[Rotation],
        kv: LayerKv,
        residual: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> torch.Tensor:
        """Computes `[num_tokens, hidden_size]`; returns the rows of the tokens in `kv.rows`."""
        query, latent = torch.split(self.qkv_a_proj(hidden, norm=norm), self._widths, dim=1)
        if self._latent.query_rank is not None:
            query = self.q_b_proj(query, norm=self.q_a_layernorm)
        query = kernels.rotate_and_write_latent(
            query.view(len(query), self._num_heads, self._latent.query_dim),
            latent,
            kv.cache,
            kv.written,
            norm_weight=self.kv_a_layernorm.weight,
            eps=_EPS,
            rotation=rotations[self._rope],
            kv_scales=kv.scales,
        )
        values = self._attend(select_rows(query, kv), kv).flatten(1)
        residual = None if residual is None else select_rows(residual, kv)
        output: torch.Tensor = self.o_proj(values, residual)
        return output

    def _attend(self, query: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        """Maps rotated queries, `[rows, heads, query_dim]`, to `[rows, heads, value_dim]`."""
        if not len(query):
            shape = 0, self._num_heads, self._latent.value_dim
            return torch.empty(shape, dtype=query.dtype, device=query.device)
        attended = kernels.paged_attention(
            self.k_b_proj(query),
            kv.cache,
            kv.attended,
            scale=self._scale,
            kv_scales=kv.scales,
            value_dim=self._latent.latent_dim,
        )
        values: torch.Tensor = self.v_b_proj(attended)
        return values

    def _new_projection(self, in_features: int, parts: dict[str, Cut]) -> FusedLinear:
        """Makes a projection whose rotated outputs are in the order of the kernels."""
        orders = {}
        if self._is_interleaved:
            latent = self._latent
            query = _rotary_last(latent.key_dim, latent.rotary_dim)
            latent_order = _rotary_last(latent.latent_dim, latent.rotary_dim)
            by_name = {"q_proj": query, "q_b_proj": query, "kv_a_proj_with_mqa": latent_order}
            orders = {name: order for name, order in by_name.items() if name in parts}
        return FusedLinear(in_features, parts, bias=False, row_orders=orders)


def _absorbed_layers(latent: LatentConfig, heads: Cut) -> tuple[HeadLinear, HeadLinear]:
    """Makes the layers that map queries to latent vectors, and latent vectors to values."""
    key, total = latent.key_dim, latent.key_dim + latent.value_dim
    width, name = latent.latent_dim, None if latent.has_head_matrices else "kv_b_proj"
    keys = HeadLinear(heads, Cut(total, 0, key), width, stored_as=name, is_transposed=True)
    values = HeadLinear(heads, Cut(total, key, total), width, stored_as=name, is_transposed=False)
    return keys, values


def _rotary_last(others: int, rotary_dim: int) -> torch.Tensor:
    """Returns the `OrderedRows` of heads whose last elements are rotated, in pairs of neighbours
    in the checkpoint.
    """
    rotated = others + half_split_order(rotary_dim, rotary_dim)
    return torch.cat((torch.arange(others, device="cpu"), rotated))
