"""`PackedWeight`: panels of 32 rows in the order that products of dense matrices read them.

A weight is packed once, straight from the checkpoint's tensors, so there is no second copy.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from typing_extensions import override

from kernels.block_rows import BlockRows
from kernels.host import fresh_zeros
from kernels.library.commands import NativeKernels
from kernels.reference.quantized import dequantize
from kernels.weights import RowsOfWeight, TensorWeight, WeightUse

__all__ = [
    "ELEMENT_TYPES",
    "PANEL_ROWS",
    "PackedWeight",
    "PanelWeight",
    "make_packed_weight",
    "num_panels",
]

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The element types of the native kernels, with their codes in the library."""

PANEL_ROWS = 32
_HALF_PANEL = PANEL_ROWS // 2
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class PanelWeight(TensorWeight):
    """A weight in panels of 32 rows; those of a gated layer are 16 rows of each half.

    Rows that were not filled are zero.

    Attributes:
        library: the library that packs and reads it.
    """

    library: NativeKernels

    @property
    @abstractmethod
    def form(self) -> tuple[int, bool]:
        """The code of its format in commands, 0 for dense panels, and whether it is exact."""

    @property
    @abstractmethod
    def bytes_per_row(self) -> int:
        """Bytes of a row, without padding."""

    @abstractmethod
    def pack(self, source: torch.Tensor | BlockRows, first: int, part: int) -> None:
        """Packs rows.

        Args:
            source: the rows.
            first: number of the first one in the weight, or in its half.
            part: the half of a gated layer's weight; -1 for all others.
        """

    @override
    def rows(self, first: int, count: int) -> "_PanelRows":
        """Returns a view of some rows.

        Raises:
            ValueError: the rows do not exist, or lie in both halves of a gated layer.
        """
        part, first_of_part, limit = -1, first, self.num_rows
        if self.use is WeightUse.GATED_LINEAR:
            limit = self.num_rows // 2
            part, first_of_part = divmod(first, limit)
        if not (0 <= first < self.num_rows and first_of_part + count <= limit):
            raise ValueError(
                f"rows {first} to {first + count} do not lie within one part of {limit} rows"
            )
        return _PanelRows(self, first_of_part, part, (count, self.num_columns))


class _PanelRows(RowsOfWeight):
    group = 1

    def __init__(self, weight: PanelWeight, first: int, part: int, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.nbytes = shape[0] * weight.bytes_per_row
        self._weight, self._first, self._part = weight, first, part

    @override
    def copy_(self, source: torch.Tensor | BlockRows) -> None:
        if tuple(source.shape) != self.shape:
            raise ValueError(f"source has shape {tuple(source.shape)}, not {self.shape}")
        self._weight.pack(source, self._first, self._part)

    @override
    def part(self, first: int, count: int) -> "_PanelRows":
        shape = count, self.shape[1]
        return _PanelRows(self._weight, self._first + first, self._part, shape)


@dataclass(frozen=True, slots=True)
class PackedWeight(PanelWeight):
    """A weight as src/pack.h lays it out.

    `data` is `[panels * groups * 32 * elements of a group]`.
    """

    @property
    @override
    def form(self) -> tuple[int, bool]:
        return 0, True

    @property
    @override
    def bytes_per_row(self) -> int:
        return self.num_columns * self.data.itemsize

    @override
    def pack(self, source: torch.Tensor | BlockRows, first: int, part: int) -> None:
        if isinstance(source, BlockRows):
            source = dequantize(source, self.dtype)
        source = source.to(device=self.device, dtype=self.dtype)
        self.library.pack(
            ELEMENT_TYPES[self.dtype],
            source.data_ptr(),
            *source.stride(),
            *source.shape,
            self.data.data_ptr(),
            first,
            part,
        )


def num_panels(num_rows: int, use: WeightUse) -> int:
    """Returns the number of panels of a weight."""
    if use is WeightUse.GATED_LINEAR:
        return -(-(num_rows // 2) // _HALF_PANEL)
    return -(-num_rows // PANEL_ROWS)


def make_packed_weight(
    library: NativeKernels, num_rows: int, num_columns: int, dtype: torch.dtype, use: WeightUse
) -> PackedWeight:
    """Returns a weight of zeros; arguments are as in `kernels.make_weight`."""
    group = _WORD_BYTES // dtype.itemsize
    columns = -(-num_columns // group) * group
    data = fresh_zeros((num_panels(num_rows, use) * PANEL_ROWS * columns,), dtype)
    return PackedWeight(num_rows, num_columns, use, data, library)
