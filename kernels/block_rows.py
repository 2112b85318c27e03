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

    def columns(self, start: int, stop: int) -> "BlockRows":
        """Returns a range of the columns, whose bounds must be those of blocks."""
        if start == 0 and stop == self.num_columns:
            return self
        kept, block = self.format.block_bytes, self.format.block
        if block:
            data = self.data[:, start // block * kept : stop // block * kept]
        else:
            width = self.format.bytes_per_column
            codes = self.data[:, kept + start * width : kept + stop * width]
            data = torch.cat((self.data[:, :kept], codes), dim=1)
        return BlockRows(self.format, data, stop - start)
