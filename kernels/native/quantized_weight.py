"""`QuantizedWeight` and `BlockTable`: weights in storage formats, for products and for look-ups.

A weight of linear layers is repacked once, straight from the file's blocks, into panels of squares
of 32 outputs and 32 columns (src/blocks.h). A table of vectors keeps the file's blocks.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from kernels.block_rows import BlockRows
from kernels.formats import FORMATS, WeightFormat
from kernels.host import fresh_zeros
from kernels.library.commands import NativeKernels
from kernels.native.packed_weight import PANEL_ROWS, PanelWeight, num_panels
from kernels.reference.quantized import as_blocks
from kernels.weights import QuantizedForm, RowsOfWeight, ServedFormats, TensorWeight, WeightUse

__all__ = ["SERVED_FORMATS", "BlockTable", "QuantizedWeight", "make_quantized_weight"]

SERVED_FORMATS = ServedFormats(
    exact=frozenset(FORMATS.values()),
    fast=frozenset(kind for name, kind in FORMATS.items() if not name.startswith("FP8")),
)
"""The formats that the library packs and multiplies; codes of FP8 are not integers."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight(PanelWeight):
    """A weight in panels of quantized squares; `data` is their bytes.

    Attributes:
        quantized: the form.
        computed_in: type of inputs and results.
    """

    quantized: QuantizedForm
    computed_in: torch.dtype

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.computed_in

    @property
    @override
    def form(self) -> tuple[int, bool]:
        return self.quantized.format.code, self.quantized.is_exact

    @property
    @override
    def bytes_per_row(self) -> int:
        return self.quantized.format.row_bytes(self.num_columns)

    @override
    def describe(self) -> str:
        return f"{type(self).__name__} {self.use.value} {self.quantized.format.name}"

    @override
    def pack(self, source: torch.Tensor | BlockRows, first: int, part: int) -> None:
        blocks = as_blocks(source, self.quantized.format)
        assert blocks.num_columns % (blocks.format.block or 1) == 0
        self.library.pack_blocks(
            self.quantized.format.code,
            blocks.data.data_ptr(),
            blocks.data.stride(0),
            *blocks.shape,
            self.data.data_ptr(),
            first,
            part,
        )


@dataclass(frozen=True, slots=True)
class BlockTable(TensorWeight):
    """A table whose `data` is `[num_rows, bytes]`: rows of blocks as a file holds them.

    Attributes:
        format: the format of the blocks.
        computed_in: type of the rows that are looked up.
    """

    format: WeightFormat
    computed_in: torch.dtype

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.computed_in

    @override
    def describe(self) -> str:
        return f"{type(self).__name__} {self.format.name}"

    @override
    def rows(self, first: int, count: int) -> "_TableRows":
        return _TableRows(self, self.data[first : first + count])


class _TableRows(RowsOfWeight):
    group = 1

    def __init__(self, table: BlockTable, rows: torch.Tensor) -> None:
        self.shape, self.nbytes = (len(rows), table.num_columns), rows.nbytes
        self._table, self._rows = table, rows

    @override
    def copy_(self, source: torch.Tensor | BlockRows) -> None:
        if tuple(source.shape) != self.shape:
            raise ValueError(f"source has shape {tuple(source.shape)}, not {self.shape}")
        self._rows.copy_(as_blocks(source, self._table.format).data)

    @override
    def part(self, first: int, count: int) -> "_TableRows":
        return _TableRows(self._table, self._rows[first : first + count])


def make_quantized_weight(
    library: NativeKernels,
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    use: WeightUse,
    form: QuantizedForm,
) -> QuantizedWeight | BlockTable:
    """Returns a weight of zeros; arguments are as in `kernels.make_weight`."""
    shape, code = (num_rows, num_columns), form.format.code
    if use is WeightUse.LOOKUP:
        rows = fresh_zeros((num_rows, form.format.row_bytes(num_columns)), torch.uint8)
        return BlockTable(*shape, use, rows, form.format, dtype)
    num_bytes = library.quantized_bytes(code, num_panels(num_rows, use) * PANEL_ROWS, num_columns)
    data = fresh_zeros((num_bytes,), torch.uint8)
    return QuantizedWeight(*shape, use, data, library, form, dtype)
