"""`ScaledWeight`: a quantized weight on a GPU, as codes of 4 or 8 bits and their scales.

All storage formats become the same few kinds of rows when they are loaded: codes first, then
float32 numbers for runs of columns. A number is `scale * (code - zero) + offset`, with the bits of
`kernels.dequantize`. Formats of five and six bits take eight.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from typing_extensions import override

from kernels.block_rows import BlockRows
from kernels.formats import FORMATS, WeightFormat
from kernels.reference.quantized import BlockParts, as_blocks, take_apart
from kernels.weights import QuantizedForm, RowsOfWeight, ServedFormats, TensorWeight

__all__ = [
    "CHUNK",
    "CodeKind",
    "RowLayout",
    "ScaledWeight",
    "layout_of",
    "served_on",
]

CHUNK = 64
"""Columns that kernels read at once; rows are filled up to a multiple of it with zeros."""
_HALF = CHUNK // 2
_ALIGNMENT = 16  # of rows, in bytes
_PIECE_ELEMENTS = 2**22  # that are taken apart at once on the device


class CodeKind(IntEnum):
    """The codes of a row."""

    BITS_4 = 0
    """Unsigned; of 64 columns, the low halves of 32 bytes are the first 32."""
    FLOATS_4 = 1
    """The same, of MXFP4's 16 numbers, twice as large."""
    INT8 = 2
    FLOATS_8 = 3
    """e4m3."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The bytes of a row.

    Attributes:
        kind: of the codes.
        run: columns that share a scale; 0 for a whole row.
        num_runs: number of scales.
        code_bytes: bytes of the codes, with which the row begins; the scales follow.
        has_zeros: whether zero points follow.
        has_offsets: whether offsets follow.
    """

    kind: CodeKind
    run: int
    num_runs: int
    code_bytes: int
    has_zeros: bool
    has_offsets: bool

    @property
    def zeros_at(self) -> int:
        """The first byte of the zero points."""
        return self.code_bytes + 4 * self.num_runs

    @property
    def offsets_at(self) -> int:
        """The first byte of the offsets."""
        return self.zeros_at + 4 * self.num_runs * self.has_zeros

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        used = self.offsets_at + 4 * self.num_runs * self.has_offsets
        return -(-used // _ALIGNMENT) * _ALIGNMENT


_KINDS = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "INT4_32", "INT4_128"), CodeKind.BITS_4),
    "MXFP4": CodeKind.FLOATS_4,
    **dict.fromkeys(("FP8", "FP8_128"), CodeKind.FLOATS_8),
}
"""By format; the others are INT8."""
_RUNS = {"Q4_K": 32, "Q5_K": 32, "Q6_K": 16}
"""Columns that share a scale, of the formats whose blocks have several."""
_WITH_ZEROS = ("Q4_0", "INT4_32", "INT4_128")
_WITH_OFFSETS = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def layout_of(weight_format: WeightFormat, num_columns: int) -> RowLayout:
    """Returns the layout of rows that a storage format becomes."""
    name, block = weight_format.name, weight_format.block
    run = _RUNS.get(name, block)
    kind = _KINDS.get(name, CodeKind.INT8)
    num_filled = -(-num_columns // CHUNK) * CHUNK
    return RowLayout(
        kind=kind,
        run=run,
        num_runs=num_columns // run if run else 1,
        code_bytes=num_filled if kind >= CodeKind.INT8 else num_filled // 2,
        has_zeros=name in _WITH_ZEROS,
        has_offsets=name in _WITH_OFFSETS,
    )


def served_on(device: torch.device) -> ServedFormats:
    """Returns the formats that a GPU serves: FP8 with rounded inputs where it multiplies e4m3."""
    has_float8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    fast = frozenset([FORMATS["FP8"]]) if has_float8 else frozenset()
    return ServedFormats(exact=frozenset(FORMATS.values()), fast=fast)


@dataclass(frozen=True, slots=True)
class ScaledWeight(TensorWeight):
    """A weight whose `data` is `[num_rows, bytes]`, rows as `layout_of` its format has them.

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
    def layout(self) -> RowLayout:
        """The layout of its rows."""
        return layout_of(self.quantized.format, self.num_columns)

    @override
    def describe(self) -> str:
        return f"{type(self).__name__} {self.use.value} {self.quantized.format.name}"

    @override
    def rows(self, first: int, count: int) -> "_ScaledRows":
        return _ScaledRows(self, self.data[first : first + count])


class _ScaledRows(RowsOfWeight):
    group = 1

    def __init__(self, weight: ScaledWeight, rows: torch.Tensor) -> None:
        self.shape, self.nbytes = (len(rows), weight.num_columns), rows.nbytes
        self._weight, self._rows = weight, rows

    @override
    def copy_(self, source: torch.Tensor | BlockRows) -> None:
        """Takes the blocks of a file apart, on the weight's device.

        Raises:
            ValueError: `source` has another shape or format.
        """
        if tuple(source.shape) != self.shape:
            raise ValueError(f"source has shape {tuple(source.shape)}, not {self.shape}")
        weight_format, layout = self._weight.quantized.format, self._weight.layout
        step = max(1, _PIECE_ELEMENTS // self._weight.num_columns)
        for start in range(0, len(self._rows), step):
            part = slice(start, start + step)
            rows, piece = self._rows[part], _moved(source, part, self._rows.device)
            _write_rows(rows, layout, take_apart(as_blocks(piece, weight_format)))

    @override
    def part(self, first: int, count: int) -> "_ScaledRows":
        return _ScaledRows(self._weight, self._rows[first : first + count])


def _moved(
    source: torch.Tensor | BlockRows, part: slice, device: torch.device
) -> torch.Tensor | BlockRows:
    """Returns some rows on a device."""
    if isinstance(source, torch.Tensor):
        return source[part].to(device)
    rows = source.take(part)
    return replace(rows, data=rows.data.to(device))


def _write_rows(rows: torch.Tensor, layout: RowLayout, parts: BlockParts) -> None:
    """Writes parts of blocks into rows, `[rows, bytes]`."""
    codes = parts.codes.reshape(len(rows), -1).view(torch.uint8)
    stored = rows[:, : layout.code_bytes]
    if layout.kind >= CodeKind.INT8:
        stored[:, : codes.shape[1]] = codes
        stored[:, codes.shape[1] :] = 0
    else:
        filled = torch.nn.functional.pad(codes, (0, 2 * layout.code_bytes - codes.shape[1]))
        halves = filled.view(len(rows), -1, 2, _HALF)
        stored.copy_((halves[..., 0, :] | halves[..., 1, :] << 4).flatten(1))
    places: list[tuple[int, torch.Tensor | None]] = [
        (layout.code_bytes, parts.scales),
        (layout.zeros_at, parts.zeros),
        (layout.offsets_at, parts.offsets),
    ]
    for place, numbers in places:
        if numbers is not None:
            data = numbers.reshape(len(rows), -1).contiguous().view(torch.uint8)
            rows[:, place : place + data.shape[1]] = data
