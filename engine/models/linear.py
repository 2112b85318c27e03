"""Linear layers and embeddings, whose weights lie in the memory order of their kernels.

Q, K and V are one matrix, gate and up another. `checkpoint_tensors` says what
takes over each tensor of a checkpoint; the loader copies.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

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
"""What takes over a tensor of the checkpoint: it has its shape, and `copy_`."""


class PackedModule(nn.Module):
    """A module whose weight lies in the order of the kernels that read it.

    Args:
        num_rows: outputs, or tokens.
        num_columns: inputs.
        use: what the weight is for.

    Attributes:
        weight: unset on the meta device until `allocate`.
    """

    def __init__(self, num_rows: int, num_columns: int, use: WeightUse) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.weight: Weight = kernels.make_weight(num_rows, num_columns, torch.float32, meta, use)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Gives the weight its memory, unset."""
        shape = self.weight.num_rows, self.weight.num_columns
        self.weight = kernels.make_weight(*shape, dtype, device, self.weight.use)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint name -> what takes over that tensor; `path` is the module's name there."""
        yield f"{path}.weight", self.weight.rows(0, self.weight.num_rows)


class Embedding(PackedModule):
    """A vector per token.

    Args:
        num_tokens: of the vocabulary.
        width: of a vector.
        is_head: whether it is the output head too.
    """

    def __init__(self, num_tokens: int, width: int, *, is_head: bool) -> None:
        super().__init__(num_tokens, width, WeightUse.LINEAR if is_head else WeightUse.LOOKUP)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[num_tokens]` int64 to `[num_tokens, width]`."""
        return kernels.embed(token_ids, self.weight)


class Linear(PackedModule):
    """A linear layer.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether it has one.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(out_features, in_features, WeightUse.LINEAR)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`[rows, in_features]` to `[rows, out_features]`, plus `residual` of that shape.

        The residual is undefined afterwards: its memory may be the result's.
        """
        return kernels.linear(hidden, self.weight, self.bias, residual)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, WeightTarget]]:
        """See `PackedModule.checkpoint_tensors`."""
        yield from super().checkpoint_tensors(path)
        if self.bias is not None:
            yield f"{path}.bias", self.bias


class FusedLinear(Linear):
    """Linear layers of one input as one matrix.

    Args:
        in_features: width of the input.
        parts: checkpoint name -> width of that layer's output, in output order.
        bias: whether the layers have biases.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, WeightTarget]]:
        """The parts' weights and biases under their own names, beside `path`."""
        return _tensors_of_parts(self.parts, self.weight, self.bias, path)


class GatedLinear(PackedModule):
    """`silu(gate(hidden)) * up(hidden)`.

    Args:
        in_features: width of the input.
        out_features: width of the output, and of each of the two layers.
        bias: whether the layers have biases.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(2 * out_features, in_features, WeightUse.GATED_LINEAR)
        self.parts = {"gate_proj": out_features, "up_proj": out_features}
        self.bias = nn.Parameter(torch.empty(2 * out_features)) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, in_features]` to `[rows, out_features]`."""
        return kernels.linear_silu_and_mul(hidden, self.weight, self.bias)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, WeightTarget]]:
        """As `FusedLinear.checkpoint_tensors`."""
        return _tensors_of_parts(self.parts, self.weight, self.bias, path)


class TransposedLinear(Linear):
    """A linear layer whose checkpoint holds the matrix as `[in, out]` (GPT-2's Conv1D)."""

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, WeightTarget]]:
        """See `PackedModule.checkpoint_tensors`."""
        for name, target in super().checkpoint_tensors(path):
            yield name, target if name.endswith(".bias") else _TransposedRows(target)


class _TransposedRows(RowsOfWeight):
    """Takes over the transpose of a checkpoint tensor.

    Args:
        target: what holds the matrix as the model has it.
    """

    def __init__(self, target: WeightTarget) -> None:
        self.shape = (target.shape[1], target.shape[0])
        self.nbytes = target.nbytes
        self._target = target

    def copy_(self, source: torch.Tensor) -> None:
        """See `RowsOfWeight.copy_`."""
        self._target.copy_(source.t())


def _tensors_of_parts(
    parts: Mapping[str, int], weight: Weight, bias: torch.Tensor | None, path: str
) -> Iterator[tuple[str, WeightTarget]]:
    """Checkpoint name -> target of layers that lie in one matrix, named beside `path`."""
    parent, first = path.rpartition(".")[0], 0
    for part, count in parts.items():
        yield f"{parent}.{part}.weight", weight.rows(first, count)
        if bias is not None:
            yield f"{parent}.{part}.bias", bias[first : first + count]
        first += count
