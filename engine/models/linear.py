"""Linear layers and embeddings, with weights in the memory order of their kernels.

Q, K and V are one matrix, gate and up projections another. `checkpoint_tensors`
returns the target of each tensor of a checkpoint; the loader copies.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from typing_extensions import override

import kernels
from kernels import RowsOfWeight, Weight, WeightUse

__all__ = [
    "Embedding",
    "FusedLinear",
    "GatedLinear",
    "Linear",
    "PackedModule",
    "TransposedLinear",
    "WeightTarget",
]

WeightTarget = torch.Tensor | RowsOfWeight
"""The target of a tensor of the checkpoint: it has the tensor's shape, and `copy_`."""


class PackedModule(nn.Module):
    """A module with a weight in the memory order of the kernels that read it.

    Args:
        num_rows: number of outputs, or of tokens.
        num_columns: number of inputs, or the width of an embedding.
        use: the kernels that read the weight.

    Attributes:
        weight: the weight; on the meta device until `allocate`.
    """

    def __init__(self, num_rows: int, num_columns: int, use: WeightUse) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.weight: Weight = kernels.make_weight(num_rows, num_columns, torch.float32, meta, use)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates the weight, uninitialized."""
        shape = self.weight.num_rows, self.weight.num_columns
        self.weight = kernels.make_weight(*shape, dtype, device, self.weight.use)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, WeightTarget]]:
        """Yields (checkpoint name, target) of each tensor; `path` is the module's name there."""
        yield f"{path}.weight", self.weight.rows(0, self.weight.num_rows)


class Embedding(PackedModule):
    """A vector per token.

    Args:
        num_tokens: size of the vocabulary.
        width: width of a vector.
        is_head: whether its weight is also that of the output head.
    """

    def __init__(self, num_tokens: int, width: int, *, is_head: bool) -> None:
        super().__init__(num_tokens, width, WeightUse.LINEAR if is_head else WeightUse.LOOKUP)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Looks up `[num_tokens]` int64 ids; returns `[num_tokens, width]`."""
        return kernels.embed(token_ids, self.weight)


class Linear(PackedModule):
    """A linear layer.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether it has a bias.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(out_features, in_features, WeightUse.LINEAR)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Maps `[rows, in_features]` to `[rows, out_features]` and adds `residual`, if any.

        The content of `residual` is undefined afterwards, as the result may use its memory.
        """
        return kernels.linear(hidden, self.weight, self.bias, residual)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, WeightTarget]]:
        yield from super().checkpoint_tensors(path)
        if self.bias is not None:
            yield f"{path}.bias", self.bias


class FusedLinear(Linear):
    """Several linear layers with the same input, computed as one matrix.

    Args:
        in_features: width of the input.
        parts: output width of each layer by checkpoint name, in the order of the outputs.
        bias: whether the layers have biases.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, WeightTarget]]:
        """Yields the layers' weights and biases, whose names replace the last part of `path`."""
        return _tensors_of_parts(self.parts, self.weight, self.bias, path)


class GatedLinear(PackedModule):
    """The gated product `silu(gate(hidden)) * up(hidden)`.

    Args:
        in_features: width of the input.
        out_features: width of the output and of each of the two layers.
        bias: whether the layers have biases.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(2 * out_features, in_features, WeightUse.GATED_LINEAR)
        self.parts = {"gate_proj": out_features, "up_proj": out_features}
        self.bias = nn.Parameter(torch.empty(2 * out_features)) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps `[rows, in_features]` to `[rows, out_features]`."""
        return kernels.linear_silu_and_mul(hidden, self.weight, self.bias)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, WeightTarget]]:
        return _tensors_of_parts(self.parts, self.weight, self.bias, path)


class TransposedLinear(Linear):
    """A linear layer whose matrix the checkpoint stores as `[in, out]` (GPT-2's Conv1D)."""

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, WeightTarget]]:
        for name, target in super().checkpoint_tensors(path):
            yield name, target if name.endswith(".bias") else _TransposedRows(target)


class _TransposedRows(RowsOfWeight):
    """A target that stores the transpose of a checkpoint tensor.

    Args:
        target: the matrix in the model's orientation.
    """

    def __init__(self, target: WeightTarget) -> None:
        self.shape = (target.shape[1], target.shape[0])
        self.nbytes = target.nbytes
        self._target = target

    @override
    def copy_(self, source: torch.Tensor) -> None:
        self._target.copy_(source.t())


def _tensors_of_parts(
    parts: Mapping[str, int], weight: Weight, bias: torch.Tensor | None, path: str
) -> Iterator[tuple[str, WeightTarget]]:
    """Yields (checkpoint name, target) of layers in one matrix.

    The layers' names replace the last part of `path`.
    """
    parent, first = path.rpartition(".")[0], 0
    for part, count in parts.items():
        yield f"{parent}.{part}.weight", weight.rows(first, count)
        if bias is not None:
            yield f"{parent}.{part}.bias", bias[first : first + count]
        first += count
