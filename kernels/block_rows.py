"""Rows of a weight in a storage format, as a file holds them."""

from dataclasses import dataclass

import torch

from kernels.formats import WeightFormat

__all__ = ["BlockRows"]


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of a quantized weight, block after block.

    Attributes:
        format: storage format.
        data: uint8 `[rows, format.row_bytes(num_columns)]`.
        num_columns: columns of the weight.
    """

    format: WeightFormat
    data: torch.Tensor
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return len(self.data), self.num_columns

    def take(self, rows: torch.Tensor | slice) -> "BlockRows":
        """Returns the named rows, in their order."""
        return BlockRows(self.format, self.data[rows], self.num_columns)
