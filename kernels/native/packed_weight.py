"""`PackedWeight`: panels of 32 rows in the order that matrix products read them.

A weight is packed once, straight from the checkpoint's tensors, so there is no second copy.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from kernels.host import fresh_zeros
from kernels.library.commands import NativeKernels
from kernels.weights import RowsOfWeight, Weight, WeightUse

__all__ = ["ELEMENT_TYPES", "PackedWeight", "make_packed_weight"]

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The element types of the native kernels, with their codes in the library."""

_PANEL_ROWS = 32
_HALF_PANEL = _PANEL_ROWS // 2
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class PackedWeight(Weight):
    """A weight as src/pack.h lays it out.

    `data` is `[panels * groups * 32 * elements of a group]`; rows that were not filled are zero.

    Attributes:
        library: the library that packs and reads it.
    """

    library: NativeKernels

    @override
    def rows(self, first: int, count: int) -> "_PackedRows":
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
        return _PackedRows(self, first_of_part, part, (count, self.num_columns))


class _PackedRows(RowsOfWeight):
    def __init__(self, weight: PackedWeight, first: int, part: int, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.nbytes = shape[0] * shape[1] * weight.data.element_size()
        self._weight, self._first, self._part = weight, first, part

    @override
    def copy_(self, source: torch.Tensor) -> None:
        weight = self._weight
        if tuple(source.shape) != self.shape:
            raise ValueError(f"source has shape {tuple(source.shape)}, not {self.shape}")
        source = source.to(device=weight.data.device, dtype=weight.data.dtype)
        weight.library.pack(
            ELEMENT_TYPES[weight.data.dtype],
            source.data_ptr(),
            *source.stride(),
            *self.shape,
            weight.data.data_ptr(),
            self._first,
            self._part,
        )


def make_packed_weight(
    library: NativeKernels, num_rows: int, num_columns: int, dtype: torch.dtype, use: WeightUse
) -> PackedWeight:
    """Returns a weight of zeros; arguments are as in `kernels.make_weight`."""
    if use is WeightUse.GATED_LINEAR:
        panels = -(-(num_rows // 2) // _HALF_PANEL)
    else:
        panels = -(-num_rows // _PANEL_ROWS)
    group = _WORD_BYTES // dtype.itemsize
    columns = -(-num_columns // group) * group
    data = fresh_zeros((panels * _PANEL_ROWS * columns,), dtype)
    return PackedWeight(num_rows, num_columns, use, data, library)
