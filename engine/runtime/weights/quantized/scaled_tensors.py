"""Layers of compressed-tensors and of 8-bit floats: a weight `[outputs, inputs]` and its scales.

Integers may be packed into int32 words along the inputs (`pack-quantized`). Sources are the
library `compressed-tensors`, and the layers of 8-bit floats of `transformers`.
"""

from collections.abc import Callable
from math import prod

import torch

from engine.models.quantization import Scheme
from engine.runtime.weights.quantized.coded_rows import (
    CODES_PER_WORD,
    CodedRows,
    CodeKind,
    unpack_words,
)
from engine.runtime.weights.quantized.layers import LayerTensors, QuantizedLayer, ordered_groups
from engine.runtime.weights.quantized.packed_words import BITS, read_groups

__all__ = ["packed_layer", "scaled_layer"]

_BLOCK = 128  # outputs, and inputs, that share a scale of 8-bit floats
_NAN = 0x7F  # bits of e4m3 but for the sign
_SCALE_NAMES = ("weight_scale", "weight_scale_inv")
_ZEROS = "weight_zero_point"
_ORDER = "weight_g_idx"


def packed_layer(tensors: LayerTensors, scheme: Scheme) -> QuantizedLayer:
    """Returns a layer with integers in words.

    Raises:
        ConfigurationError: its tensors do not fit each other.
    """
    if tensors.shape("weight_shape", 1) != (2,):
        raise tensors.refuse("weight_shape", "it must have the numbers of outputs and inputs")
    num_rows, num_columns = (int(size) for size in tensors.read("weight_shape"))
    packed_rows, num_words = tensors.shape("weight_packed")
    kinds = [kind for bits, kind in BITS.items() if -(-num_columns * bits // 32) == num_words]
    if not kinds or packed_rows != num_rows:
        reason = f"a weight of {num_rows} x {num_columns} integers of 4 or 8 bits has not"
        raise tensors.refuse("weight_packed", reason)
    kind = kinds[0]

    def codes(rows: slice) -> torch.Tensor:
        return unpack_words(tensors.read("weight_packed", rows), kind)[:, :num_columns]

    return _layer(tensors, scheme, (num_rows, num_columns), kind, codes)


def scaled_layer(tensors: LayerTensors, scheme: Scheme) -> QuantizedLayer:
    """Returns a layer with an integer, or an 8-bit float, in each byte.

    Raises:
        ConfigurationError: its tensors do not fit each other.
    """
    num_rows, num_columns = tensors.shape("weight")
    kind = CodeKind.INT8 if tensors.entry("weight").dtype == "I8" else CodeKind.FP8

    def codes(rows: slice) -> torch.Tensor:
        stored = tensors.read("weight", rows).view(torch.uint8)
        if kind is CodeKind.INT8:
            return stored ^ 0x80  # from two's complement to zero points of 128
        if (stored & _NAN == _NAN).any():
            raise tensors.refuse("weight", "it has values that are NaN")
        return stored

    return _layer(tensors, scheme, (num_rows, num_columns), kind, codes)


def _layer(
    tensors: LayerTensors,
    scheme: Scheme,
    shape: tuple[int, int],
    kind: CodeKind,
    codes: Callable[[slice], torch.Tensor],
) -> QuantizedLayer:
    """Returns the layer with the given codes."""
    name = next((name for name in _SCALE_NAMES if name in tensors), _SCALE_NAMES[0])
    rows_per_scale, group = _sharing(tensors, name, shape)
    groups, is_ordered = ordered_groups(shape[1], group), True
    if scheme.has_column_order and _ORDER in tensors:
        groups, is_ordered = read_groups(tensors, _ORDER, groups)
    has_zeros = _ZEROS in tensors and kind is not CodeKind.FP8
    if has_zeros:
        _check_zeros(tensors, kind, shape, (rows_per_scale, group))

    def read(rows: slice) -> CodedRows:
        scales = _read_shared(tensors, name, rows, rows_per_scale)
        zeros = _read_zeros(tensors, rows, kind, shape) if has_zeros else None
        return CodedRows(kind, codes(rows), scales, zeros, groups)

    return QuantizedLayer(shape, kind, group if is_ordered else None, has_zeros, read)


def _sharing(tensors: LayerTensors, name: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the numbers of rows and of columns that share a scale.

    Raises:
        ConfigurationError: the scales have a shape of no known kind.
    """
    stored, (num_rows, num_columns) = tensors.entry(name).shape, shape
    if prod(stored) == 1:
        return shape
    if stored == (-(-num_rows // _BLOCK), -(-num_columns // _BLOCK)):
        return _BLOCK, _BLOCK
    num_groups = prod(stored[1:])
    if len(stored) > 2 or stored[0] != num_rows or not num_groups or num_columns % num_groups:
        raise tensors.refuse(name, f"it does not fit a weight of {num_rows} x {num_columns}")
    return 1, num_columns // num_groups


def _check_zeros(
    tensors: LayerTensors, kind: CodeKind, shape: tuple[int, int], shared: tuple[int, int]
) -> None:
    """Checks that zero points are those of the same rows and columns as scales.

    Raises:
        ConfigurationError: they are not.
    """
    num_rows, num_columns = shape
    if tensors.entry(_ZEROS).dtype != "I32":
        is_equal = _sharing(tensors, _ZEROS, shape) == shared
    else:
        needed = -(-num_rows // CODES_PER_WORD[kind]), num_columns // shared[1]
        is_equal = shared[0] == 1 and tensors.shape(_ZEROS) == needed
    if not is_equal:
        raise tensors.refuse(_ZEROS, "the layer's scales have another shape")


def _read_shared(
    tensors: LayerTensors, name: str, rows: slice, rows_per_scale: int
) -> torch.Tensor:
    """Reads what a range of rows has per group of columns, `[rows, groups]` float32."""
    first = rows.start // rows_per_scale
    if len(tensors.entry(name).shape) == 0:
        stored = tensors.read(name)
    else:
        stored = tensors.read(name, slice(first, -(-rows.stop // rows_per_scale)))
    numbers = torch.arange(rows.start, rows.stop) // rows_per_scale - first
    return stored.float().view(-(-rows.stop // rows_per_scale) - first, -1)[numbers]


def _read_zeros(
    tensors: LayerTensors, rows: slice, kind: CodeKind, shape: tuple[int, int]
) -> torch.Tensor:
    """Reads zero points of a range of rows, `[rows, groups]` float32, in the range of codes."""
    if tensors.entry(_ZEROS).dtype != "I32":
        rows_per_zero, _ = _sharing(tensors, _ZEROS, shape)
        return _read_shared(tensors, _ZEROS, rows, rows_per_zero) + kind.middle
    per_word = CODES_PER_WORD[kind]
    first = rows.start // per_word
    words = tensors.read(_ZEROS, slice(first, -(-rows.stop // per_word)))
    start = rows.start - first * per_word
    return unpack_words(words.t(), kind)[:, start : start + rows.stop - rows.start].t().float()
