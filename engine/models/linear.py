"""Linear layers and embeddings, with weights in the memory order of their kernels.

Q, K and V are one matrix, gate and up projections another. `checkpoint_tensors`
returns the parts of a checkpoint's tensors and their targets; the loader copies.

A rank has a range of each layer's outputs or inputs (arXiv:1909.08053, section 3): the layers
before attention and activations have a range of outputs, those after them a range of inputs, whose
results are added up over the ranks. Sums are in float32 and rounded once, as on one rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from typing_extensions import override

import kernels
from kernels import Cut, RankGroup, RowsOfWeight, Weight, WeightUse

__all__ = [
    "Embedding",
    "FusedLinear",
    "GatedLinear",
    "Linear",
    "PackedModule",
    "TensorPart",
    "TransposedFusedLinear",
    "TransposedLinear",
    "WeightTarget",
    "cut_of",
]

WeightTarget = torch.Tensor | RowsOfWeight
"""The target of a part of a tensor of the checkpoint: it has the part's shape, and `copy_`."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a tensor of the checkpoint, and its target.

    Attributes:
        name: the tensor's.
        target: the place for the part.
        cuts: per axis of the tensor, the range that the part is.
    """

    name: str
    target: WeightTarget
    cuts: tuple[Cut, ...]

    @classmethod
    def whole(cls, name: str, target: WeightTarget) -> "TensorPart":
        """The part that is the whole tensor."""
        return cls(name, target, tuple(Cut.whole(size) for size in target.shape))

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(cut.total for cut in self.cuts)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return all(cut.is_whole for cut in self.cuts)

    @property
    def index(self) -> tuple[slice, ...]:
        """The part as an index of the whole tensor."""
        return tuple(cut.slice for cut in self.cuts)


def cut_of(total: int, ranks: RankGroup | None) -> Cut:
    """Returns a rank's range of an axis; the whole axis if `ranks` is None."""
    return Cut.whole(total) if ranks is None else ranks.cut(total)


class PackedModule(nn.Module, ABC):
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

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates the weight, uninitialized."""
        shape = self.weight.num_rows, self.weight.num_columns
        self.weight = kernels.make_weight(*shape, dtype, device, self.weight.use)

    @abstractmethod
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        """Yields the parts of the checkpoint's tensors; `path` is the module's name there."""


class Embedding(PackedModule):
    """A vector per token.

    Args:
        num_tokens: size of the vocabulary.
        width: width of a vector.
        is_head: whether its weight is also that of the output head.
        ranks: the group that shares the vocabulary; None for one rank.
    """

    def __init__(
        self, num_tokens: int, width: int, *, is_head: bool, ranks: RankGroup | None = None
    ) -> None:
        tokens = cut_of(num_tokens, ranks)
        super().__init__(tokens.size, width, WeightUse.LINEAR if is_head else WeightUse.LOOKUP)
        self._tokens, self._ranks = tokens, ranks

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Looks up `[num_tokens]` int64 ids; returns `[num_tokens, width]`."""
        if self._ranks is None:
            return kernels.embed(token_ids, self.weight)
        partial = kernels.embed_part(token_ids, self.weight, self._tokens.start)
        return kernels.reduce_ranks(partial, self._ranks, dtype=self.weight.data.dtype)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        rows = self.weight.rows(0, self.weight.num_rows)
        yield TensorPart(f"{path}.weight", rows, (self._tokens, Cut.whole(self.weight.num_columns)))


class Linear(PackedModule):
    """A linear layer.

    Args:
        in_features: width of the input, or this rank's range of it.
        out_features: width of the output, or this rank's range of it.
        bias: whether it has a bias.
        ranks: the group that adds up the outputs if this rank has a range of the inputs.
    """

    def __init__(
        self,
        in_features: int | Cut,
        out_features: int | Cut,
        *,
        bias: bool,
        ranks: RankGroup | None = None,
    ) -> None:
        inputs, outputs = _as_cut(in_features), _as_cut(out_features)
        super().__init__(outputs.size, inputs.size, WeightUse.LINEAR)
        self.inputs, self.outputs = inputs, outputs
        self.bias = nn.Parameter(torch.empty(outputs.size)) if bias else None
        self._ranks = ranks

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Maps `[rows, in_features]` to `[rows, out_features]` and adds `residual`, if any.

        The content of `residual` is undefined afterwards, as the result may use its memory.
        """
        if self._ranks is None:
            return kernels.linear(hidden, self.weight, self.bias, residual)
        partial = kernels.linear(hidden, self.weight, out_dtype=torch.float32)
        return kernels.reduce_ranks(partial, self._ranks, self.bias, residual, dtype=hidden.dtype)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        rows = self.weight.rows(0, self.outputs.size)
        yield TensorPart(f"{path}.weight", rows, (self.outputs, self.inputs))
        if self.bias is not None:
            yield TensorPart(f"{path}.bias", self.bias, (self.outputs,))


class TransposedLinear(Linear):
    """A linear layer whose matrix the checkpoint stores as `[in, out]` (GPT-2's Conv1D)."""

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        return map(_transposed, super().checkpoint_tensors(path))


class FusedLinear(PackedModule):
    """Several linear layers with the same input, computed as one matrix.

    Args:
        in_features: width of the input, or the range of it that this matrix reads.
        parts: per layer, by checkpoint name, its outputs on this rank; in their order.
        bias: whether the layers have biases.
    """

    def __init__(self, in_features: int | Cut, parts: Mapping[str, Cut], *, bias: bool) -> None:
        num_outputs, inputs = sum(part.size for part in parts.values()), _as_cut(in_features)
        super().__init__(num_outputs, inputs.size, WeightUse.LINEAR)
        self.bias = nn.Parameter(torch.empty(num_outputs)) if bias else None
        self.inputs, self.parts = inputs, dict(parts)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Maps `[rows, in_features]` to the layers' outputs side by side, plus `residual`."""
        return kernels.linear(hidden, self.weight, self.bias, residual)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        """Yields the layers' weights and biases, whose names replace the last part of `path`."""
        return _tensors_of_parts(self.inputs, self.parts, self.weight, self.bias, path)


class TransposedFusedLinear(FusedLinear):
    """Fused layers that are one tensor in the checkpoint too, stored as `[in, out]`."""

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        if all(part.is_whole for part in self.parts.values()):
            yield _transposed(
                TensorPart.whole(f"{path}.weight", self.weight.rows(0, self.weight.num_rows))
            )
            if self.bias is not None:
                yield TensorPart.whole(f"{path}.bias", self.bias)
            return
        total = sum(part.total for part in self.parts.values())
        ends = accumulate(part.total for part in self.parts.values())
        firsts = {
            name: end - self.parts[name].total for name, end in zip(self.parts, ends, strict=True)
        }
        for part in super().checkpoint_tensors(path):
            _, layer, kind = part.name.rsplit(".", 2)
            cut_of_part, first = part.cuts[0], firsts[layer]
            cut = Cut(total, first + cut_of_part.start, first + cut_of_part.end)
            moved = TensorPart(f"{path}.{kind}", part.target, (cut, *part.cuts[1:]))
            yield _transposed(moved)


class GatedLinear(PackedModule):
    """The gated product `silu(gate(hidden)) * up(hidden)`.

    Args:
        in_features: width of the input.
        out_features: width of the output and of each of the two layers, on this rank.
        bias: whether the layers have biases.
    """

    def __init__(self, in_features: int, out_features: Cut, *, bias: bool) -> None:
        super().__init__(2 * out_features.size, in_features, WeightUse.GATED_LINEAR)
        self.parts = {"gate_proj": out_features, "up_proj": out_features}
        self.bias = nn.Parameter(torch.empty(2 * out_features.size)) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps `[rows, in_features]` to `[rows, out_features]`."""
        return kernels.linear_silu_and_mul(hidden, self.weight, self.bias)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        inputs = Cut.whole(self.weight.num_columns)
        return _tensors_of_parts(inputs, self.parts, self.weight, self.bias, path)


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


def _as_cut(features: int | Cut) -> Cut:
    return Cut.whole(features) if isinstance(features, int) else features


def _transposed(part: TensorPart) -> TensorPart:
    """Returns a part of the transposed tensor; that of a bias is unchanged."""
    if len(part.cuts) == 1:
        return part
    return TensorPart(part.name, _TransposedRows(part.target), part.cuts[::-1])


def _tensors_of_parts(
    inputs: Cut, parts: Mapping[str, Cut], weight: Weight, bias: torch.Tensor | None, path: str
) -> Iterator[TensorPart]:
    """Yields the tensors of layers in one matrix, whose names replace the last part of `path`."""
    parent, first = path.rpartition(".")[0], 0
    for name, cut in parts.items():
        yield TensorPart(f"{parent}.{name}.weight", weight.rows(first, cut.size), (cut, inputs))
        if bias is not None:
            yield TensorPart(f"{parent}.{name}.bias", bias[first : first + cut.size], (cut,))
        first += cut.size
