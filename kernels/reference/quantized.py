"""Rows in storage formats: dequantizing them, and quantizing floating-point rows, in plain torch.

The formulas of formats with a GGML name are those of its `dequantize_row_*` (ggml-quants.c): in
float32, with the same operations in the same order, so that results have the same bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kernels.block_rows import BlockRows
from kernels.formats import WeightFormat

__all__ = [
    "BlockParts",
    "as_blocks",
    "dequantize",
    "pack_rows",
    "quantize_rows",
    "take_apart",
    "take_columns",
    "unpack_nibbles",
]

_PIECE_ELEMENTS = 2**18  # their float32 forms stay in a CPU's cache
_RUN = 16  # bytes of 4-bit codes, of which the low halves come first: those of 32 columns
# Twice the numbers of 4-bit floats (Open Compute Project, Microscaling Formats 1.0).
_MXFP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_INT4_ZERO = 8.0

_Decoder = Callable[[torch.Tensor], "BlockParts"]
_Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scales, zero points


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Blocks of a storage format, taken apart: a number is `scale * (code - zero) + offset`.

    Runs of columns of a block share a scale, a zero point and an offset, which are float32.

    Attributes:
        codes: `[blocks, columns]`: uint8 below 16 of formats with 4 bits, int8, or e4m3.
        scales: `[blocks, runs]`.
        zeros: `[blocks, runs]`; None for zeros.
        offsets: `[blocks, runs]`; None for zeros.
        are_floats: whether codes are those of floating-point numbers: of 4 bits, half of
            `_MXFP4_NUMBERS` times two, if they are uint8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    are_floats: bool = False

    def numbers(self) -> torch.Tensor:
        """Returns the float32 numbers, `[blocks, columns]`."""
        codes = self.codes
        if self.are_floats and codes.dtype == torch.uint8:
            numbers = torch.tensor(_MXFP4_NUMBERS, dtype=torch.float32, device=codes.device)
            codes = numbers[codes.int()]
        num_blocks, num_runs = self.scales.shape
        runs = codes.float().view(num_blocks, num_runs, -1)
        if self.zeros is not None:
            runs = runs - self.zeros.unsqueeze(2)
        runs = self.scales.unsqueeze(2) * runs
        if self.offsets is not None:
            runs = runs + self.offsets.unsqueeze(2)
        return runs.flatten(1)


def take_apart(rows: BlockRows) -> BlockParts:
    """Returns the parts of the blocks of rows, in their order, on their device."""
    block_bytes = _block_bytes(rows.format, rows.num_columns)
    return _DECODERS[rows.format.name](rows.data.reshape(-1, block_bytes))


def dequantize(rows: BlockRows, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers of quantized rows, `[rows, columns]`, on their device.

    Args:
        rows: the rows, on any device.
        dtype: type of the result, to which the float32 numbers are rounded once.
    """
    num_rows, num_columns = len(rows.data), rows.num_columns
    numbers = torch.empty((num_rows, num_columns), dtype=dtype, device=rows.data.device)
    for piece in _pieces(num_rows, num_columns):
        numbers[piece] = take_apart(rows.take(piece)).numbers().view(-1, num_columns)
    return numbers


def quantize_rows(tensor: torch.Tensor, weight_format: WeightFormat) -> BlockRows:
    """Returns rows rounded to INT8, INT8_32, INT8_128, INT4_32 or INT4_128, on their device.

    Codes are the nearest ones, ties to even. The scale of int8 codes is that of the largest
    magnitude and 127; that of 4-bit codes is the number of the largest magnitude, with its sign,
    over -8, and their zero point is 8 (as in GGML's Q4_0). Blocks with infinity or NaN become NaN.

    Args:
        tensor: `[rows, columns]`, of a floating dtype.
        weight_format: one of these formats, whose blocks divide the columns.

    Raises:
        ValueError: it is another format, or its blocks do not divide the columns.
    """
    num_rows, num_columns = tensor.shape
    block, encode = weight_format.block or num_columns, _ENCODERS.get(weight_format.name)
    if encode is None or num_columns % block:
        raise ValueError(f"rows of {num_columns} columns cannot be rounded to {weight_format.name}")
    row_bytes = weight_format.row_bytes(num_columns)
    data = torch.empty((num_rows, row_bytes), dtype=torch.uint8, device=tensor.device)
    for piece in _pieces(num_rows, num_columns):
        codes, scales, zeros = encode(_divided(tensor[piece].float(), block))
        data[piece] = pack_rows(weight_format, codes.flatten(1), scales, zeros).data
    return BlockRows(weight_format, data, num_columns)


def as_blocks(source: torch.Tensor | BlockRows, weight_format: WeightFormat) -> BlockRows:
    """Returns rows in a format, with neighbouring bytes adjacent.

    Raises:
        ValueError: they are in another one, or are numbers that cannot be rounded to it.
    """
    if isinstance(source, torch.Tensor):
        return quantize_rows(source, weight_format)
    if source.format != weight_format:
        raise ValueError(f"source is {source.format.name}, not {weight_format.name}")
    if source.data.stride(1) != 1:
        return BlockRows(weight_format, source.data.contiguous(), source.num_columns)
    return source


def pack_rows(
    weight_format: WeightFormat,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
) -> BlockRows:
    """Returns rows of the given codes in one of the formats without a GGML name.

    Args:
        weight_format: the format.
        codes: `[rows, columns]`, of int8 or uint8; the latter may be the bytes of 8-bit floats.
        scales: `[rows, blocks]` float32.
        zeros: `[rows, blocks]` float32 zero points of a format with 4 bits; None for the others.
    """
    num_columns = codes.shape[1]
    blocks = _divided(codes, num_columns // scales.shape[1]).contiguous().view(torch.uint8)
    parts = [_bytes(scales)]
    if zeros is not None:
        runs = blocks.view(*blocks.shape[:2], -1, 2, _RUN)
        blocks = (runs[..., 0, :] | runs[..., 1, :] << 4).flatten(2)
        parts.append(_bytes(zeros))
    data = torch.cat((*parts, blocks), dim=2).flatten(1)
    return BlockRows(weight_format, data, num_columns)


def unpack_nibbles(codes: torch.Tensor, run: int = _RUN) -> torch.Tensor:
    """Returns 4-bit codes, `[rows, codes]` uint8.

    Args:
        codes: `[rows, bytes]` uint8.
        run: bytes whose low halves come before their high halves; they divide the bytes of a row.
    """
    runs = _divided(codes, run)
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)


def take_columns(rows: BlockRows, start: int, stop: int) -> BlockRows | torch.Tensor:
    """Returns columns of rows: as blocks if these are whole ones, otherwise as float32 numbers."""
    block = rows.format.block or 1
    if start % block or stop % block:
        return dequantize(rows, torch.float32)[:, start:stop]
    return rows.columns(start, stop)


def _pieces(num_rows: int, num_columns: int) -> list[slice]:
    step = max(1, _PIECE_ELEMENTS // max(1, num_columns))
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _divided(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Returns `[rows, columns]` as `[rows, columns // width, width]`."""
    return rows.reshape(len(rows), rows.shape[1] // width, width)


def _block_bytes(weight_format: WeightFormat, num_columns: int) -> int:
    return weight_format.row_bytes(weight_format.block or num_columns)


def _floats(blocks: torch.Tensor, first: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the number at byte `first` of each block, `[blocks, 1]` float32."""
    stored = blocks[:, first : first + dtype.itemsize]
    return stored.clone(memory_format=torch.contiguous_format).view(dtype).float()


def _bit_planes(codes: torch.Tensor, run: int, width: int) -> torch.Tensor:
    """Returns fields of `width` bits: of each run of bytes all lowest fields, then the next ones.

    Args:
        codes: `[blocks, bytes]`.
        run: bytes of a run.
        width: bits of a field.
    """
    runs = _divided(codes, run)
    planes = [(runs >> shift) & ((1 << width) - 1) for shift in range(0, 8, width)]
    return torch.stack(planes, dim=2).flatten(1)


def _q8_0(blocks: torch.Tensor) -> BlockParts:
    return BlockParts(blocks[:, 2:].view(torch.int8), _floats(blocks, 0, torch.float16))


def _q4_0(blocks: torch.Tensor) -> BlockParts:
    scales = _floats(blocks, 0, torch.float16)
    return BlockParts(unpack_nibbles(blocks[:, 2:]), scales, zeros=torch.full_like(scales, 8))


def _q4_1(blocks: torch.Tensor) -> BlockParts:
    scales, minimums = _floats(blocks, 0, torch.float16), _floats(blocks, 2, torch.float16)
    return BlockParts(unpack_nibbles(blocks[:, 4:]), scales, offsets=minimums)


def _q5_0(blocks: torch.Tensor) -> BlockParts:
    codes = unpack_nibbles(blocks[:, 6:]) | _bit_planes(blocks[:, 2:6], 1, 1) << 4
    return BlockParts(codes.view(torch.int8) - 16, _floats(blocks, 0, torch.float16))


def _q5_1(blocks: torch.Tensor) -> BlockParts:
    codes = unpack_nibbles(blocks[:, 8:]) | _bit_planes(blocks[:, 4:8], 1, 1) << 4
    scales, minimums = _floats(blocks, 0, torch.float16), _floats(blocks, 2, torch.float16)
    return BlockParts(codes.view(torch.int8), scales, offsets=minimums)


def _q4_k(blocks: torch.Tensor) -> BlockParts:
    return _scaled_runs(blocks, unpack_nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: torch.Tensor) -> BlockParts:
    fifth_bits = _bit_planes(blocks[:, 16:48], 32, 1)
    codes = unpack_nibbles(blocks[:, 48:], 32) | fifth_bits << 4
    return _scaled_runs(blocks, codes.view(torch.int8))


def _scaled_runs(blocks: torch.Tensor, codes: torch.Tensor) -> BlockParts:
    """Returns codes in eight runs, each with a scale and a minimum of 6 bits.

    Of bytes 4 to 16 of a block, the first four have the scales of runs 0 to 3 in their low bits,
    the next four the minimums of these runs. The last four have the low bits of scales and of
    minimums of runs 4 to 7, whose high bits are the high bits of the other eight.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (low & 15) | (first >> 2 & 48)), dim=1)
    minimums = torch.cat((second & 63, (low >> 4) | (second >> 2 & 48)), dim=1)
    factors = _floats(blocks, 0, torch.float16) * scales
    return BlockParts(codes, factors, offsets=-_floats(blocks, 2, torch.float16) * minimums)


def _q6_k(blocks: torch.Tensor) -> BlockParts:
    codes = unpack_nibbles(blocks[:, :128], 64) | _bit_planes(blocks[:, 128:192], 32, 2) << 4
    factors = _floats(blocks, 208, torch.float16) * blocks[:, 192:208].view(torch.int8)
    return BlockParts(codes.view(torch.int8) - 32, factors)


def _mxfp4(blocks: torch.Tensor) -> BlockParts:
    exponents = blocks[:, :1].int()
    # The bits of 2 ** (exponent - 128) in float32; the two smallest are subnormal.
    normal, subnormal = (exponents - 1) << 23, (1 << 21) << exponents.clamp(max=1)
    factors = torch.where(exponents < 2, subnormal, normal).view(torch.float32)
    return BlockParts(unpack_nibbles(blocks[:, 1:]), factors, are_floats=True)


def _scaled_bytes(blocks: torch.Tensor) -> BlockParts:
    return BlockParts(blocks[:, 4:].view(torch.int8), _floats(blocks, 0, torch.float32))


def _scaled_nibbles(blocks: torch.Tensor) -> BlockParts:
    scales, zeros = _floats(blocks, 0, torch.float32), _floats(blocks, 4, torch.float32)
    return BlockParts(unpack_nibbles(blocks[:, 8:]), scales, zeros=zeros)


def _scaled_floats(blocks: torch.Tensor) -> BlockParts:
    codes = blocks[:, 4:].view(torch.float8_e4m3fn)
    return BlockParts(codes, _floats(blocks, 0, torch.float32), are_floats=True)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of float32 numbers, in an axis of their own."""
    return values.unsqueeze(-1).contiguous().view(torch.uint8)


def _int8_codes(blocks: torch.Tensor) -> _Rounded:
    """Returns the codes, `[rows, blocks, columns]`, and the scales of float32 numbers."""
    scales = blocks.abs().amax(dim=2) / 127
    return _nearest(blocks, scales).clamp_(-127, 127).to(torch.int8), scales, None


def _int4_codes(blocks: torch.Tensor) -> _Rounded:
    """Returns the same, and the zero points."""
    highest, lowest = blocks.amax(dim=2), blocks.amin(dim=2)
    scales = torch.where(-lowest > highest, lowest, highest) / -8
    codes = (_nearest(blocks, scales) + _INT4_ZERO).clamp_(0, 15).to(torch.uint8)
    return codes, scales, torch.full_like(scales, _INT4_ZERO)


def _nearest(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns numbers over scales, rounded; 0 where the quotient is NaN."""
    return (blocks / scales.unsqueeze(2)).round_().nan_to_num_(nan=0.0)


_DECODERS: Mapping[str, _Decoder] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "INT8": _scaled_bytes,
    "INT8_32": _scaled_bytes,
    "INT8_128": _scaled_bytes,
    "INT4_32": _scaled_nibbles,
    "INT4_128": _scaled_nibbles,
    "FP8": _scaled_floats,
    "FP8_128": _scaled_floats,
}
"""By format, the function that takes `[blocks, bytes]` apart."""
_ENCODERS: Mapping[str, Callable[[torch.Tensor], _Rounded]] = {
    "INT8": _int8_codes,
    "INT8_32": _int8_codes,
    "INT8_128": _int8_codes,
    "INT4_32": _int4_codes,
    "INT4_128": _int4_codes,
}
"""By format, the function that rounds `[rows, blocks, columns]`."""
