"""`--quantization`: weights that are rounded to a storage format while they are loaded.

They are rounded before they are cut, by `kernels.quantize_rows`, so that tiers on other devices and
with other numbers of ranks have the same numbers.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
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
_logger = logging.getLogger("baton.engine")


def check_quantization(quantization: str, kind: str, name: str, *, is_quantized: bool) -> None:
    """Checks that a checkpoint is quantized as `--quantization` says, or can be.

    Args:
        quantization: the flag's value.
        kind: the kind of the checkpoint; empty if it is not quantized.
        name: the checkpoint's.
        is_quantized: whether it has quantized tensors, which a GGUF file need not have.

    Raises:
        ConfigurationError: it is quantized in another way, or not at all.
    """
    if quantization in _ONLINE and is_quantized:
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
    output head has a scale per row. Layers that are stored in another order than the checkpoint's
    stay as they are too; a line of the log counts them.

    Args:
        model: the whole model.
        quantization: the flag's value.

    Raises:
        ConfigurationError: only the output head could be rounded.
    """
    if quantization not in _ONLINE:
        return {}
    heads: dict[str, WeightFormat] = {}
    layers: dict[str, WeightFormat] = {}
    unrounded: dict[str, None] = {}
    for module, part in _matrices(model):
        if not part.takes_blocks:
            unrounded[part.name] = None
        elif isinstance(module, Embedding) or part.name == model.head_tensor:
            heads[part.name] = _WHOLE_ROWS
        else:
            layers[part.name] = _choose_format(part, quantization)
    if not layers:
        raise ConfigurationError(
            f"--quantization is {quantization}; the model stores its layers densely"
        )
    if unrounded:
        _logger.warning(
            "--quantization %s leaves %d tensors, which the model stores densely, as they are; the "
            "first is %s",
            *(quantization, len(unrounded), next(iter(unrounded))),
        )
    return heads | layers


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


def _matrices(model: CausalModel) -> Iterator[tuple[PackedModule, TensorPart]]:
    """Yields the parts that are matrices of layers, but no routers or tables for look-ups."""
    routers = {id(module.router) for module in model.modules() if isinstance(module, SparseMlp)}
    for module, parts in model.parts_by_module():
        if isinstance(module, PackedModule) and id(module) not in routers:
            for part in parts if module.weight.use is not WeightUse.LOOKUP else ():
                if len(part.cuts) > 1 and not part.name.endswith("bias"):
                    yield module, part


def _choose_format(part: TensorPart, quantization: str) -> WeightFormat:
    num_columns = part.tensor_shape[-1]
    for name in _ONLINE[quantization]:
        if num_columns % (FORMATS[name].block or 1) == 0:
            return FORMATS[name]
    raise AssertionError(f"no format of {quantization} has whole rows")
