"""Layers of GPTQ and AWQ: integers in int32 words, of tensors that are `[inputs, outputs]`.

Sources are the layers of AutoGPTQ (`qlinear_cuda.py`) and AutoAWQ (`gemm.py`).
"""

import torch

from engine.models.quantization import Scheme
from engine.runtime.weights.quantized.coded_rows import (
    CODES_PER_WORD,
    CodedRows,
    CodeKind,
    unpack_words,
)
from engine.runtime.weights.quantized.layers import LayerTensors, QuantizedLayer, ordered_groups

__all__ = ["BITS", "awq_layer", "gptq_layer", "read_groups"]

BITS = {4: CodeKind.INT4, 8: CodeKind.INT8}
_WORD_BITS = 32
# AWQ's place in a word, in integers, of each of the eight outputs that share one.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_ALL = slice(None)


def gptq_layer(tensors: LayerTensors, scheme: Scheme) -> QuantizedLayer:
    """Returns a layer of GPTQ, whose words have integers of consecutive inputs.

    Raises:
        ConfigurationError: its tensors do not fit each other.
    """
    num_words, num_rows = tensors.shape("qweight")
    num_columns = num_words * _WORD_BITS // scheme.bits
    if "g_idx" in tensors:
        (num_columns,) = tensors.shape("g_idx", 1)
    kind = BITS.get(num_words * _WORD_BITS // num_columns)
    if kind is None or num_words * _WORD_BITS % num_columns:
        raise tensors.refuse("qweight", f"it must have 4 or 8 bits for {num_columns} inputs")
    group = _group_size(tensors, scheme, kind, (num_rows, num_columns))
    groups = ordered_groups(num_columns, group)
    is_ordered = True
    if "g_idx" in tensors:  # it may have another order than `desc_act` says
        groups, is_ordered = read_groups(tensors, "g_idx", groups)
    has_zeros = not scheme.is_symmetric

    def read(rows: slice) -> CodedRows:
        words = tensors.read("qweight", _ALL, rows).t()
        scales = tensors.read("scales", _ALL, rows).t().float()
        zeros = None
        if has_zeros:
            zeros = _along_outputs(tensors, "qzeros", rows, kind).float() + scheme.zero_offset
        codes = unpack_words(words, kind)
        return CodedRows(kind, codes, scales, zeros, groups)

    shape = (num_rows, num_columns)
    return QuantizedLayer(shape, kind, group if is_ordered else None, has_zeros, read)


def awq_layer(tensors: LayerTensors, scheme: Scheme) -> QuantizedLayer:
    """Returns a layer of AWQ, whose words have integers of eight outputs.

    Raises:
        ConfigurationError: its tensors do not fit each other.
    """
    num_columns, num_words = tensors.shape("qweight")
    kind = BITS[scheme.bits]
    num_rows = num_words * _WORD_BITS // scheme.bits
    group = _group_size(tensors, scheme, kind, (num_rows, num_columns))
    groups = ordered_groups(num_columns, group)

    def read(rows: slice) -> CodedRows:
        codes = _along_outputs(tensors, "qweight", rows, kind, _AWQ_ORDER)
        scales = tensors.read("scales", _ALL, rows).t().float()
        zeros = _along_outputs(tensors, "qzeros", rows, kind, _AWQ_ORDER).float()
        return CodedRows(kind, codes, scales, zeros, groups)

    return QuantizedLayer((num_rows, num_columns), kind, group, has_zeros=True, read=read)


def read_groups(
    tensors: LayerTensors, name: str, ordered: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """Reads the group of each column, and whether groups follow each other.

    Args:
        tensors: of the layer.
        name: of the tensor that has the groups.
        ordered: the groups if they follow each other.

    Raises:
        ConfigurationError: the tensor has groups that do not exist.
    """
    groups = tensors.read(name).long()
    if groups.shape != ordered.shape or not 0 <= groups.min() <= groups.max() <= ordered.max():
        raise tensors.refuse(name, f"it must have the groups 0 to {int(ordered.max())} of inputs")
    return groups, torch.equal(groups, ordered)


def _group_size(
    tensors: LayerTensors, scheme: Scheme, kind: CodeKind, shape: tuple[int, int]
) -> int:
    """Returns the number of columns that share a scale.

    Raises:
        ConfigurationError: the scales or zero points have another shape.
    """
    num_rows, num_columns = shape
    num_groups, num_scales = tensors.shape("scales")
    group = scheme.group or num_columns
    if -(-num_columns // group) != num_groups and "g_idx" in tensors:
        group = max(1, int((tensors.read("g_idx") == 0).sum()))  # the layer has a size of its own
    if num_scales != num_rows or -(-num_columns // group) != num_groups:
        raise tensors.refuse("scales", f"the layer has {num_rows} outputs and {num_columns} inputs")
    if not scheme.is_symmetric:
        expected = (num_groups, -(-num_rows // CODES_PER_WORD[kind]))
        if tensors.shape("qzeros") != expected:
            raise tensors.refuse("qzeros", f"the layer needs {list(expected)}")
    return group


def _along_outputs(
    tensors: LayerTensors,
    name: str,
    rows: slice,
    kind: CodeKind,
    order: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Reads integers of a range of outputs, which share words; returns `[outputs, ...]`."""
    per_word = CODES_PER_WORD[kind]
    first = rows.start // per_word
    words = tensors.read(name, _ALL, slice(first, -(-rows.stop // per_word)))
    codes = unpack_words(words, kind)
    if order is not None:
        codes = codes.view(len(codes), -1, per_word)[:, :, list(order)].flatten(1)
    start = rows.start - first * per_word
    return codes[:, start : start + rows.stop - rows.start].t()
