"""Linear layers and embeddings, with weights in the memory order of their kernels.

Q, K and V are one matrix, gate and up projections another. `checkpoint_tensors`
returns the parts of a checkpoint's tensors and their targets; the loader copies.

A rank has a range of each layer's outputs or inputs (arXiv:1909.08053, section 3): the layers
before attention and activations have a range of outputs, those after them a range of inputs, whose
results are added up over the ranks. Sums are in float32 and rounded once, as on one rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

import kernels
from engine.models.norms import split_norm
from engine.models.tensor_parts import OrderedRows, StoredModule, TensorPart, transposed_parts
from kernels import (
    Activation,
    Cut,
    QuantizedForm,
    RankGroup,
    SegmentedWeight,
    Weight,
    WeightUse,
)

__all__ = [
    "Embedding",
    "Forms",
    "FusedLinear",
    "GatedLinear",
    "Linear",
    "PackedModule",
    "PositionTable",
    "TransposedFusedLinear",
    "TransposedLinear",
    "cut_of",
]

Forms = Sequence[tuple[int, QuantizedForm | None]]
"""The forms of a weight's rows: (number of rows, their form, which is None for dense rows)."""
_NO_ORDERS: Mapping[str, torch.Tensor] = MappingProxyType({})


def cut_of(total: int, ranks: RankGroup | None) -> Cut:
    """Returns a rank's range of an axis; the whole axis if `ranks` is None."""
    return Cut.whole(total) if ranks is None else ranks.cut(total)


class PackedModule(StoredModule):
    """A module with a weight in the memory order of the kernels that read it.

    Args:
        num_rows: number of outputs, or of tokens, on this rank.
        num_columns: number of inputs, or the width of an embedding, on this rank.
        use: the kernels that read the weight.

    Attributes:
        weight: the weight; on the meta device until `allocate`.
    """

    def __init__(self, num_rows: int, num_columns: int, use: WeightUse) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.weight: Weight = kernels.make_weight(num_rows, num_columns, torch.float32, meta, use)
        self._forms: Forms = [(num_rows, None)]

    def take_forms(self, forms: Forms) -> bool:
        """Sets the forms in which `allocate` makes the weight.

        Args:
            forms: of all rows in their order, those of one tensor of the checkpoint after another.

        Returns:
            Whether the weight can have them; otherwise nothing was changed.
        """
        merged = _merged(forms)
        is_gated = self.weight.use is WeightUse.GATED_LINEAR
        if len(merged) > 1 and is_gated and not _are_halves(merged):
            return False
        self._forms = merged
        return True

    def planned_bytes(self, dtype: torch.dtype) -> int:
        """Returns the size of the weight that `allocate` makes, without what fills its panels."""
        num_columns = self.weight.num_columns
        return sum(
            num_rows
            * (form.format.row_bytes(num_columns) if form else num_columns * dtype.itemsize)
            for num_rows, form in self._forms
        )

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates the weight, uninitialized."""
        num_rows, num_columns, use = self.weight.num_rows, self.weight.num_columns, self.weight.use
        if len(self._forms) == 1:
            form = self._forms[0][1]
            self.weight = kernels.make_weight(num_rows, num_columns, dtype, device, use, form)
            return
        segments = [
            kernels.make_weight(rows, num_columns, dtype, device, WeightUse.LINEAR, form)
            for rows, form in self._forms
        ]
        self.weight = SegmentedWeight(num_rows, num_columns, use, tuple(segments))


def _merged(forms: Forms) -> Forms:
    """Joins neighbours of one form."""
    groups = groupby(forms, key=lambda rows_and_form: rows_and_form[1])
    return [(sum(rows for rows, _ in group), form) for form, group in groups]


def _are_halves(forms: Forms) -> bool:
    return len(forms) == 2 and forms[0][0] == forms[1][0]


class Embedding(PackedModule):
    """A vector per token.

    Args:
        num_tokens: size of the vocabulary.
        width: width of a vector.
        is_head: whether its weight is also that of the output head.
        ranks: the group that shares the vocabulary; None for one rank.
        scale: factor on the vectors, which the output head does not have.
        rounds_scale: whether that factor is rounded to the type of the weights.
    """

    def __init__(
        self,
        num_tokens: int,
        width: int,
        *,
        is_head: bool,
        ranks: RankGroup | None = None,
        scale: float = 1.0,
        rounds_scale: bool = False,
    ) -> None:
        tokens = cut_of(num_tokens, ranks)
        super().__init__(tokens.size, width, WeightUse.LINEAR if is_head else WeightUse.LOOKUP)
        self._tokens, self._ranks = tokens, ranks
        self._scale, self._rounds_scale = scale, rounds_scale

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(dtype, device)
        if self._rounds_scale:
            self._scale = torch.tensor(self._scale, dtype=dtype, device="cpu").item()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Looks up `[num_tokens]` int64 ids; returns `[num_tokens, width]`."""
        if self._ranks is None:
            return kernels.embed(token_ids, self.weight, scale=self._scale)
        partial = kernels.embed_part(token_ids, self.weight, self._tokens.start)
        dtype = self.weight.dtype
        return kernels.reduce_ranks(partial, self._ranks, dtype=dtype, scale=self._scale)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        rows = self.weight.rows(0, self.weight.num_rows)
        cuts = self._tokens, Cut.whole(self.weight.num_columns)
        yield TensorPart(f"{path}.weight", rows, cuts, takes_blocks=True)


class PositionTable(PackedModule):
    """A learned vector per position, which ranks have whole.

    Args:
        num_positions: number of positions.
        width: width of a vector.
        num_unused: rows of the checkpoint's table before that of the first position.
    """

    def __init__(self, num_positions: int, width: int, num_unused: int = 0) -> None:
        super().__init__(num_positions, width, WeightUse.LOOKUP)
        self._num_unused = num_unused

    def forward(self, positions: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Looks up `[num_tokens]` int64 positions, and adds `[num_tokens, width]`."""
        return kernels.embed(positions, self.weight, addend=embedded)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        num_positions, width = self.weight.num_rows, self.weight.num_columns
        total = self._num_unused + num_positions
        rows = self.weight.rows(0, num_positions)
        cuts = Cut(total, self._num_unused, total), Cut.whole(width)
        yield TensorPart(f"{path}.weight", rows, cuts, takes_blocks=True)


class Linear(PackedModule):
    """A linear layer.

    Args:
        in_features: width of the input, or this rank's range of it.
        out_features: width of the output, or this rank's range of it.
        bias: whether it has a bias.
        ranks: the group that adds up the outputs if this rank has a range of the inputs.
        scale: factor on the outputs.
        activation: of the outputs, before the factor; None for none. Ranks cannot add up such
            outputs.
    """

    def __init__(
        self,
        in_features: int | Cut,
        out_features: int | Cut,
        *,
        bias: bool,
        ranks: RankGroup | None = None,
        scale: float = 1.0,
        activation: Activation | None = None,
    ) -> None:
        assert ranks is None or activation is None
        inputs, outputs = _as_cut(in_features), _as_cut(out_features)
        super().__init__(outputs.size, inputs.size, WeightUse.LINEAR)
        self.inputs, self.outputs = inputs, outputs
        self.bias = nn.Parameter(torch.empty(outputs.size)) if bias else None
        self._ranks, self._scale, self._activation = ranks, scale, activation

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Maps `[rows, in_features]` to `[rows, out_features]` and adds `residual`, if any.

        The content of `residual` is undefined afterwards, as the result may use its memory.
        """
        if self._ranks is None:
            return kernels.linear(
                hidden,
                self.weight,
                self.bias,
                residual,
                activation=self._activation,
                scale=self._scale,
            )
        partial = kernels.linear(hidden, self.weight, out_dtype=torch.float32)
        return kernels.reduce_ranks(
            partial, self._ranks, self.bias, residual, dtype=hidden.dtype, scale=self._scale
        )

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        rows = self.weight.rows(0, self.outputs.size)
        cuts = self.outputs, self.inputs
        yield TensorPart(f"{path}.weight", rows, cuts, takes_blocks=True)
        if self.bias is not None:
            yield TensorPart(f"{path}.bias", self.bias, (self.outputs,))


class TransposedLinear(Linear):
    """A linear layer whose matrix the checkpoint stores as `[in, out]` (GPT-2's Conv1D)."""

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        return transposed_parts(super().checkpoint_tensors(path))


class _JoinedLayers(PackedModule):
    """Several linear layers with the same input, computed as one matrix.

    Args:
        in_features: width of the input, or the range of it that this matrix reads.
        parts: per layer, by checkpoint name, its outputs on this rank; in their order.
        use: the kernels that read the matrix.
        bias: whether the layers have biases.
        is_joined: whether the checkpoint too has one tensor for all of them, under this module's
            name. Otherwise each has one, and the layers' names replace this module's.
        row_orders: by name of a layer, the order of its rows as `OrderedRows` takes it; the others
            have the checkpoint's.
    """

    def __init__(
        self,
        in_features: int | Cut,
        parts: Mapping[str, Cut],
        use: WeightUse,
        *,
        bias: bool,
        is_joined: bool = False,
        row_orders: Mapping[str, torch.Tensor] = _NO_ORDERS,
    ) -> None:
        num_outputs, inputs = sum(part.size for part in parts.values()), _as_cut(in_features)
        super().__init__(num_outputs, inputs.size, use)
        self.bias = nn.Parameter(torch.empty(num_outputs)) if bias else None
        self.inputs, self.parts = inputs, dict(parts)
        self._is_joined, self._row_orders = is_joined, row_orders

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        if self._is_one_part:
            yield from self._tensors(f"{path}.", 0, Cut.whole(self.weight.num_rows))
            return
        parent, first, stored_first = path.rpartition(".")[0], 0, 0
        total = sum(cut.total for cut in self.parts.values())
        for name, cut in self.parts.items():
            if self._is_joined:
                stored = Cut(total, stored_first + cut.start, stored_first + cut.end)
                parts = self._tensors(f"{path}.", first, stored)
            else:
                parts = self._tensors(f"{parent}.{name}.", first, cut)
            order = self._row_orders.get(name)
            for part in parts:
                target = part.target if order is None else OrderedRows(part.target, order)
                yield replace(part, target=target)
            first, stored_first = first + cut.size, stored_first + cut.total

    @property
    def _is_one_part(self) -> bool:
        """Whether a tensor of the checkpoint is this module's; such a tensor is read fastest."""
        is_whole = self._is_joined and all(part.is_whole for part in self.parts.values())
        return is_whole and self.weight.use is WeightUse.LINEAR and not self._row_orders

    def _tensors(self, prefix: str, first: int, stored: Cut) -> Iterator[TensorPart]:
        """Yields the rows from `first` on of weight and bias, which are the rows `stored` there."""
        rows = self.weight.rows(first, stored.size)
        yield TensorPart(f"{prefix}weight", rows, (stored, self.inputs), takes_blocks=True)
        if self.bias is not None:
            yield TensorPart(f"{prefix}bias", self.bias[first : first + stored.size], (stored,))


class FusedLinear(_JoinedLayers):
    """Several linear layers with the same input, whose outputs lie side by side.

    Args:
        in_features: as those of `_JoinedLayers`, whose further arguments it takes too.
        parts: per layer, by checkpoint name, its outputs on this rank; in their order.
        bias: whether the layers have biases.
        **storage: how the checkpoint stores them.
    """

    def __init__(
        self, in_features: int | Cut, parts: Mapping[str, Cut], *, bias: bool, **storage: Any
    ) -> None:
        super().__init__(in_features, parts, WeightUse.LINEAR, bias=bias, **storage)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> torch.Tensor:
        """Maps `[rows, in_features]` to the layers' outputs side by side, plus `residual`; `norm`
        is applied to the inputs.
        """
        hidden, of_inputs = split_norm(hidden, norm)
        return kernels.linear(hidden, self.weight, self.bias, residual, norm=of_inputs)


class TransposedFusedLinear(FusedLinear):
    """Fused layers that are one tensor in the checkpoint too, stored as `[in, out]`."""

    def __init__(self, in_features: int | Cut, parts: Mapping[str, Cut], *, bias: bool) -> None:
        super().__init__(in_features, parts, bias=bias, is_joined=True)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        return transposed_parts(super().checkpoint_tensors(path))


class GatedLinear(_JoinedLayers):
    """The gated product `activation(gate(hidden)) * up(hidden)`.

    Args:
        in_features: width of the input.
        out_features: width of the output and of each of the two layers, on this rank.
        activation: the function of the gate.
        bias: whether the layers have biases.
        is_joined: whether the checkpoint has one tensor for both, the gate's rows first.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Cut,
        activation: Activation,
        *,
        bias: bool,
        is_joined: bool = False,
    ) -> None:
        parts = {"gate_proj": out_features, "up_proj": out_features}
        use = WeightUse.GATED_LINEAR
        super().__init__(in_features, parts, use, bias=bias, is_joined=is_joined)
        self._activation = activation

    def forward(self, hidden: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        """Maps `[rows, in_features]` to `[rows, out_features]`; `norm` is applied to the inputs."""
        hidden, of_inputs = split_norm(hidden, norm)
        return kernels.linear_gated(
            hidden, self.weight, self.bias, self._activation, norm=of_inputs
        )


def _as_cut(features: int | Cut) -> Cut:
    return Cut.whole(features) if isinstance(features, int) else features
