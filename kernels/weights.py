"""Weights of linear layers and embeddings, in the memory order of the kernels that read them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum

import torch
from typing_extensions import override

__all__ = ["DenseWeight", "RowsOfWeight", "Weight", "WeightStack", "WeightUse"]


class WeightUse(Enum):
    """The kernel that reads a weight, which decides the weight's memory order."""

    LINEAR = "linear"
    """`linear`, and `embed` if an embedding is the output head too."""
    GATED_LINEAR = "gated"
    """`linear_gated`: the rows are two halves, gate and up."""
    LOOKUP = "lookup"
    """`embed` alone."""


class RowsOfWeight(ABC):
    """Some rows of a weight, or elements of a bias, to be filled from a checkpoint."""

    shape: tuple[int, ...]
    """Rows, and columns of a weight."""
    nbytes: int

    @abstractmethod
    def copy_(self, source: torch.Tensor) -> object:
        """Copies `source`, of this shape and any floating dtype and strides, into the rows."""


@dataclass(frozen=True, slots=True)
class Weight(ABC):
    """A matrix `[num_rows, num_columns]`: a row per output of a layer, or per token.

    Attributes:
        num_rows: outputs.
        num_columns: inputs.
        use: the kernel that reads it.
        data: its elements, in the memory order of that kernel.
    """

    num_rows: int
    num_columns: int
    use: WeightUse
    data: torch.Tensor

    @abstractmethod
    def rows(self, first: int, count: int) -> "torch.Tensor | RowsOfWeight":
        """Returns rows `first` to `first + count`, to be filled.

        Rows of a gated layer must lie within one of its halves.
        """


@dataclass(frozen=True, slots=True)
class DenseWeight(Weight):
    """A weight whose `data` is `[num_rows, num_columns]`, row after row."""

    @override
    def rows(self, first: int, count: int) -> torch.Tensor:
        return self.data[first : first + count]


@dataclass(frozen=True, slots=True)
class WeightStack(Weight):
    """Several matrices of one shape, such as those of experts or heads, one above another.

    `data` is `[num_matrices, ...]`, with each matrix in the memory order of its kernel.

    Attributes:
        num_matrices: number of matrices.
        template: one matrix; only its shape and type are used, not its `data`.
    """

    num_matrices: int
    template: Weight

    @property
    def rows_per_matrix(self) -> int:
        """Number of outputs of each matrix."""
        return self.template.num_rows

    def matrix(self, number: int) -> Weight:
        """Returns a view of one matrix."""
        return replace(self.template, data=self.data[number])

    @override
    def rows(self, first: int, count: int) -> torch.Tensor | RowsOfWeight:
        """Returns rows, which must lie within one matrix, to be filled."""
        number, first_of_matrix = divmod(first, self.rows_per_matrix)
        return self.matrix(number).rows(first_of_matrix, count)
