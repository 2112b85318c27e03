"""Weights of linear layers and embeddings, in the memory order of the kernels that read them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["DenseWeight", "RowsOfWeight", "Weight", "WeightUse"]


class WeightUse(Enum):
    """What a weight is read for, which decides how it lies in memory."""

    LINEAR = "linear"
    """`linear`, and `embed` where an embedding is the output head too."""
    GATED_LINEAR = "gated"
    """`linear_silu_and_mul`: the rows are two halves, gate and up."""
    LOOKUP = "lookup"
    """`embed` alone."""


class RowsOfWeight(ABC):
    """Some rows of a weight, to be filled from a checkpoint."""

    shape: tuple[int, int]
    """Rows and columns."""
    nbytes: int

    @abstractmethod
    def copy_(self, source: torch.Tensor) -> object:
        """Takes over `source`, `[rows, columns]` of any floating dtype and strides."""


@dataclass(frozen=True, slots=True)
class Weight(ABC):
    """A matrix `[num_rows, num_columns]`: a row per output of a layer, or per token.

    Attributes:
        num_rows: outputs.
        num_columns: inputs.
        use: what it is for.
        data: its elements, in an order of its own.
    """

    num_rows: int
    num_columns: int
    use: WeightUse
    data: torch.Tensor

    @abstractmethod
    def rows(self, first: int, count: int) -> "torch.Tensor | RowsOfWeight":
        """Rows `first` to `first + count`, to be filled; of a gated layer within one half."""


@dataclass(frozen=True, slots=True)
class DenseWeight(Weight):
    """A weight whose `data` is `[num_rows, num_columns]`, row after row."""

    def rows(self, first: int, count: int) -> torch.Tensor:
        """See `Weight.rows`."""
        return self.data[first : first + count]
