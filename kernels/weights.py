"""Weights of linear layers and embeddings, in the memory order of the kernels that read them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from typing_extensions import override

from kernels.block_rows import BlockRows
from kernels.formats import WeightFormat
from kernels.layer_kinds import NormKind

__all__ = [
    "DenseWeight",
    "InputNorm",
    "QuantizedForm",
    "RowsOfWeight",
    "SegmentedWeight",
    "ServedFormats",
    "TensorWeight",
    "Weight",
    "WeightStack",
    "WeightUse",
]


class WeightUse(Enum):
    """The kernel that reads a weight, which decides the weight's memory order."""

    LINEAR = "linear"
    """`linear`, and `embed` if an embedding is the output head too."""
    GATED_LINEAR = "gated"
    """`linear_gated`: the rows are two halves, gate and up."""
    LOOKUP = "lookup"
    """`embed` alone."""


@dataclass(frozen=True, slots=True)
class InputNorm:
    """A root-mean-square norm of a linear layer's inputs; see `kernels.rms_norm`.

    Attributes:
        weight: `[num_columns]`.
        eps: added to the mean of squares.
        kind: where the result is rounded, and whether 1 is added to the weight.
    """

    weight: torch.Tensor
    eps: float
    kind: NormKind


@dataclass(frozen=True, slots=True)
class QuantizedForm:
    """The form in which kernels keep a quantized weight and multiply by it.

    Attributes:
        format: the format of its blocks.
        is_exact: whether numbers are dequantized and multiplied as those of a dense weight of the
            same type. Otherwise rows of inputs are rounded to eight bits too, and products are of
            integers.
    """

    format: WeightFormat
    is_exact: bool


@dataclass(frozen=True, slots=True)
class ServedFormats:
    """The storage formats that kernels of a device and a type serve.

    Attributes:
        exact: formats of exact forms.
        fast: formats of the others.
    """

    exact: frozenset[WeightFormat]
    fast: frozenset[WeightFormat]


class RowsOfWeight(ABC):
    """Some rows of a weight, or elements of a bias, to be filled from a checkpoint."""

    shape: tuple[int, ...]
    """Rows, and columns of a weight."""
    nbytes: int
    group: int = 0
    """Number of rows that must be copied together, which divides that of all; 0 for all."""

    @abstractmethod
    def copy_(self, source: torch.Tensor | BlockRows) -> object:
        """Copies `source`, of this shape and any floating dtype and strides, into the rows."""

    def part(self, first: int, count: int) -> "torch.Tensor | RowsOfWeight":
        """Returns rows `first` to `first + count`, which are whole groups."""
        assert (first, count) == (0, self.shape[0])
        return self


@dataclass(frozen=True, slots=True)
class Weight(ABC):
    """A matrix `[num_rows, num_columns]`: a row per output of a layer, or per token.

    Attributes:
        num_rows: outputs.
        num_columns: inputs.
        use: the kernel that reads it.
    """

    num_rows: int
    num_columns: int
    use: WeightUse

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Type of the inputs and results of its kernels."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that holds it."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes, also on the meta device."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Returns all memory that it has, in an order that depends on nothing but its kind."""

    @abstractmethod
    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "Weight":
        """Returns the same weight in other memory, of the types and shapes of `tensors()`."""

    @abstractmethod
    def describe(self) -> str:
        """Returns a text that differs for weights with different orders of their memory."""

    @abstractmethod
    def rows(self, first: int, count: int) -> "torch.Tensor | RowsOfWeight":
        """Returns rows `first` to `first + count`, to be filled.

        Rows of a gated layer must lie within one of its halves.
        """


@dataclass(frozen=True, slots=True)
class TensorWeight(Weight):
    """A weight in one tensor.

    Attributes:
        data: its elements, in the memory order of its kernels.
    """

    data: torch.Tensor

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    @override
    def device(self) -> torch.device:
        return self.data.device

    @override
    def tensors(self) -> list[torch.Tensor]:
        return [self.data]

    @override
    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "TensorWeight":
        (data,) = tensors
        return replace(self, data=data)

    @override
    def describe(self) -> str:
        return f"{type(self).__name__} {self.use.value} {self.data.dtype}"


@dataclass(frozen=True, slots=True)
class DenseWeight(TensorWeight):
    """A weight whose `data` is `[num_rows, num_columns]`, row after row."""

    @override
    def rows(self, first: int, count: int) -> torch.Tensor:
        return self.data[first : first + count]


@dataclass(frozen=True, slots=True)
class WeightStack(TensorWeight):
    """Several matrices of one shape, such as those of experts or heads, one above another.

    `data` is `[num_matrices, ...]`, with each matrix in the memory order of its kernel.

    Attributes:
        num_matrices: number of matrices.
        template: one matrix; only its shape and kind are used, not its `data`.
    """

    num_matrices: int
    template: TensorWeight

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.template.dtype

    @property
    def rows_per_matrix(self) -> int:
        """Number of outputs of each matrix."""
        return self.template.num_rows

    def matrix(self, number: int) -> TensorWeight:
        """Returns a view of one matrix."""
        return replace(self.template, data=self.data[number])

    @override
    def describe(self) -> str:
        return f"{self.num_matrices} of {self.template.describe()}"

    @override
    def rows(self, first: int, count: int) -> torch.Tensor | RowsOfWeight:
        """Returns rows, which must lie within one matrix, to be filled."""
        number, first_of_matrix = divmod(first, self.rows_per_matrix)
        return self.matrix(number).rows(first_of_matrix, count)


@dataclass(frozen=True, slots=True)
class SegmentedWeight(Weight):
    """A weight whose rows are those of several weights of one width, one below another.

    Layers that share their inputs are one weight, even if a file has their rows in different
    formats. The segments of a gated layer are its halves.

    Attributes:
        segments: at least two weights for `WeightUse.LINEAR`.
    """

    segments: tuple[Weight, ...]

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.segments[0].dtype

    @property
    @override
    def device(self) -> torch.device:
        return self.segments[0].device

    @override
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for segment in self.segments for tensor in segment.tensors()]

    @override
    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "SegmentedWeight":
        left, segments = list(tensors), []
        for segment in self.segments:
            count = len(segment.tensors())
            segments.append(segment.with_tensors(left[:count]))
            del left[:count]
        return replace(self, segments=tuple(segments))

    @override
    def describe(self) -> str:
        segments = ", ".join(f"{part.num_rows} {part.describe()}" for part in self.segments)
        return f"{self.use.value} [{segments}]"

    @override
    def rows(self, first: int, count: int) -> torch.Tensor | RowsOfWeight:
        """Returns rows, which must lie within one segment, to be filled.

        Raises:
            ValueError: they do not.
        """
        start = 0
        for segment in self.segments:
            if start <= first and first + count <= start + segment.num_rows:
                return segment.rows(first - start, count)
            start += segment.num_rows
        raise ValueError(f"rows {first} to {first + count} do not lie within one segment")
