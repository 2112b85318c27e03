"""`--quantization`: weights that are rounded to a storage format while they are loaded.

They are rounded before they are cut, by `kernels.quantize_rows`, so that tiers on other devices and
with other numbers of ranks have the same numbers.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

import kernels
from baton.common.errors import ConfigurationError
from engine.models.experts import SparseMlp
from engine.models.layers import CausalModel
from engine.models.linear import Embedding, PackedModule
from engine.models.tensor_parts import TensorPart
from kernels import WeightUse
from kernels.block_rows import BlockRows
from kernels.formats import FORMATS, WeightFormat

__all__ = ["check_quantization", "online_formats", "read_part"]

# By the flag's value, the format of layers, and those of layers whose widths it does not divide.
_ONLINE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "int8": ("INT8",),
        "int8-128": ("INT8_128", "INT8_32", "INT8"),
        "int4": ("INT4_32", "INT8"),
        "int4-128": ("INT4_128", "INT4_32", "INT8"),
    }
)
_WHOLE_ROWS = FORMATS["INT8"]


def check_quantization(quantization: str, kind: str, name: str) -> None:
    """Checks that a checkpoint is quantized as `--quantization` says, or can be.

    Args:
        quantization: the flag's value.
        kind: how the checkpoint is quantized; empty if it is not.
        name: the checkpoint's.

    Raises:
        ConfigurationError: it is quantized in another way, or not at all.
    """
    if quantization in _ONLINE and kind:
        raise ConfigurationError(
            f"--quantization is {quantization}; the weights of {name} are stored as {kind} already"
        )
    if quantization not in ("none", *_ONLINE) and quantization != kind:
        raise ConfigurationError(
            f"--quantization is {quantization}; the weights of {name} are "
            f"{f'stored as {kind}' if kind else 'not quantized'}"
        )


def online_formats(model: CausalModel, quantization: str) -> dict[str, WeightFormat]:
    """Returns the formats to which `--quantization` rounds the tensors of a checkpoint, by name.

    Embeddings that are looked up alone, routers of experts, norms and biases stay as they are; the
    output head has a scale per row.

    Args:
        model: the whole model.
        quantization: the flag's value.
    """
    if quantization not in _ONLINE:
        return {}
    routers = {id(module.router) for module in model.modules() if isinstance(module, SparseMlp)}
    found: dict[str, WeightFormat] = {}
    for module, parts in model.parts_by_module():
        if isinstance(module, PackedModule) and id(module) not in routers:
            for part in parts:
                if part.takes_blocks and module.weight.use is not WeightUse.LOOKUP:
                    is_head = isinstance(module, Embedding) or part.name == model.head_tensor
                    found[part.name] = _WHOLE_ROWS if is_head else _format_of(part, quantization)
    return found


def read_part(
    read: Callable[[tuple[slice, ...]], Any], part: TensorPart, rounded_to: WeightFormat | None
) -> BlockRows | torch.Tensor:
    """Reads a part of a tensor: of a matrix, or of one in a stack, if it is rounded.

    Args:
        read: reads the numbers, or blocks, at an index of the tensor.
        part: the part.
        rounded_to: the format to which numbers are rounded; None for none.
    """
    stored: BlockRows | torch.Tensor
    if rounded_to is None:
        stored = read(part.index)
        return stored
    *others, columns = part.index
    numbers = read((*others, slice(0, part.tensor_shape[-1]))).flatten(0, -2)
    blocks = kernels.quantize_rows(numbers, rounded_to)
    return kernels.take_columns(blocks, columns.start, columns.stop)


def _format_of(part: TensorPart, quantization: str) -> WeightFormat:
    names, num_columns = _ONLINE[quantization], part.tensor_shape[-1]
    formats = (FORMATS[name] for name in names)
    return next(each for each in formats if num_columns % (each.block or 1) == 0)
