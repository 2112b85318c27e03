"""Reads the weights of a GGUF file, under the names of a checkpoint, a few rows at a time.

Quantized weights are dequantized. Of a tensor the host holds the result, in the type that the
model computes in, and the rows under way; never the whole in another type.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import gguf
import numpy as np
import torch

from baton.common.model_files.gguf.architectures import architecture_of
from baton.common.model_files.gguf.config import config_json
from baton.common.model_files.gguf.header import GgufHeader, GgufTensor
from baton.common.model_files.gguf.rope import FACTOR_TENSORS

__all__ = ["GgufWeights"]

_PIECE_ELEMENTS = 2**18  # their float32 forms stay in the cache
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ROTATED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
_Numbers = np.ndarray[Any, np.dtype[np.int64]]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a checkpoint's tensor lies in a GGUF file.

    Attributes:
        name: name of the file's tensor.
        shape: shape of the checkpoint's tensor.
        first: number of elements before it in the file's tensor.
    """

    name: str
    shape: tuple[int, ...]
    first: int = 0


class GgufWeights:
    """The tensors of a GGUF file, with the methods of safetensors' `safe_open`.

    Args:
        header: of the model, which may be split into several files.
        file: one of its files.
        dtype: type of the tensors that `get_tensor` returns.

    Raises:
        ConfigurationError: a tensor has a type that cannot be dequantized, a shape that the type
            does not allow, or bytes outside of the file; names the tensor.
    """

    def __init__(self, header: GgufHeader, file: Path, dtype: torch.dtype) -> None:
        self._header = header
        self._dtype = dtype
        self._architecture = architecture_of(header)
        self._head_dim: int = config_json(header)["head_dim"]
        self._data = np.memmap(file, mode="r")
        self._places: dict[str, _Place] = {}
        for name, tensor in header.tensors.items():
            if tensor.file == file and name not in FACTOR_TENSORS:
                self._check(name)
                self._places |= self._places_of(name, tensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._data

    def keys(self) -> list[str]:
        """Returns the tensors' names, as in a checkpoint."""
        return list(self._places)

    def get_slice(self, name: str) -> "_Description":
        """Returns the type and the shape of what `get_tensor` returns; an index reads a part."""
        return _Description(self._places[name].shape, partial(self._read_part, name))

    def get_tensor(self, name: str) -> torch.Tensor:
        """Reads and dequantizes a tensor."""
        return self._read_part(name, (slice(None),))

    def _read_part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Reads and dequantizes some rows, and returns the part of them that `index` names."""
        place = self._places[name]
        rows, type_id = self._rows(place), self._header.tensors[place.name].type_id
        order = self._order_of_rows(place)
        offset = self._architecture.norm_offset if _is_norm(place.name) else 0
        selected = range(len(rows))[index[0]]
        columns = math.prod(place.shape[1:])
        result = torch.empty(len(selected), columns, dtype=self._dtype)
        step = max(1, _PIECE_ELEMENTS // columns)
        for start in range(0, len(selected), step):
            part = slice(selected.start + start, min(selected.start + start + step, selected.stop))
            piece = rows[part] if order is None else rows[order[part]]
            numbers = _dequantize(piece, type_id)
            if offset:
                numbers -= offset
            result[start : start + step] = numbers.view(-1, columns)
        return result.view(len(selected), *place.shape[1:])[(slice(None), *index[1:])]

    def _rows(self, place: _Place) -> _Bytes:
        """Returns the stored bytes, `[rows, bytes per row]`; a vector has a row per element."""
        tensor = self._header.tensors[place.name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
        row_bytes = math.prod(place.shape[1:]) // block * block_bytes
        start = tensor.offset + place.first // block * block_bytes
        end = start + place.shape[0] * row_bytes
        return self._data[start:end].reshape(place.shape[0], row_bytes)

    def _places_of(self, name: str, tensor: GgufTensor) -> Iterator[tuple[str, _Place]]:
        """Yields the checkpoint's name and the place of each tensor that one of the file has."""
        stem, _, suffix = name.rpartition(".")
        layer = _LAYER.fullmatch(stem)
        names = self._architecture.layer_names if layer else self._architecture.model_names
        part = layer[2] if layer else stem
        whole = names.get(f"{part}.{suffix}")
        if whole is None and part in names:
            whole = f"{names[part]}.{suffix}"
        if whole is None:  # the model has no such tensor
            yield name, _Place(name, tensor.shape)
            return
        shape, axis = tensor.shape, self._architecture.new_axes.get(part)
        if axis is not None and len(shape) <= axis + 1:
            shape = (*shape[:axis], 1, *shape[axis:])
        known = f"model.layers.{layer[1]}.{whole}" if layer else whole
        if "{expert}" not in known:
            yield known, _Place(name, shape)
            return
        for expert in range(shape[0]):
            place = _Place(name, shape[1:], expert * math.prod(shape[1:]))
            yield known.replace("{expert}", str(expert)), place

    def _order_of_rows(self, place: _Place) -> _Numbers | None:
        """Returns the file's row of each row of the tensor; None if they have the same order.

        Row 2i of a head in the file is row i of the head's first half; row 2i + 1 is row i of
        its second half.
        """
        if not self._is_in_order_of_pairs(place.name):
            return None
        num_rows = place.shape[0]
        pairs = np.arange(num_rows).reshape(-1, self._head_dim // 2, 2)
        return pairs.swapaxes(1, 2).reshape(num_rows)

    def _check(self, name: str) -> None:
        tensor = self._header.tensors[name]
        block, block_bytes = self._check_type(name, tensor.type_id)
        shape, columns = list(tensor.shape), math.prod(tensor.shape[1:])
        if 0 in shape or ([1, *shape[1:]][-1]) % block:
            raise self._header.refuse(f"tensor {name} has shape {shape}, which its type has not")
        if self._is_in_order_of_pairs(name) and shape[0] % self._head_dim:
            raise self._header.refuse(
                f"tensor {name} has shape {shape}; the width of a head is {self._head_dim}"
            )
        if tensor.offset + shape[0] * columns // block * block_bytes > len(self._data):
            raise self._header.refuse(f"it ends within tensor {name}")

    def _check_type(self, name: str, type_id: int) -> tuple[int, int]:
        """Returns how many elements a block of a type has, and how many bytes."""
        try:
            kind = gguf.GGMLQuantizationType(type_id)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
            raise self._header.refuse(
                f"tensor {name} has the type {names.get(type_id, type_id)}, which is not supported"
            ) from None
        return block, block_bytes

    def _is_in_order_of_pairs(self, name: str) -> bool:
        """Whether the elements that the rotary embedding pairs follow each other."""
        return self._architecture.has_pairs and _ROTATED.fullmatch(name) is not None


def _is_norm(name: str) -> bool:
    """Whether a file's tensor is the weight of a norm."""
    return name.endswith("norm.weight")


def _dequantize(rows: _Bytes, type_id: int) -> torch.Tensor:
    """Returns the numbers in whole rows as one vector."""
    # `gguf` dequantizes 16 rows at once; one long row is faster than many short ones.
    numbers = gguf.dequantize(rows.reshape(1, -1), gguf.GGMLQuantizationType(type_id))
    return torch.from_numpy(np.require(numbers, requirements="W")).flatten()


@dataclass(frozen=True, slots=True)
class _Description:
    """The type and the shape of a tensor."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], torch.Tensor]

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Reads a part of the tensor: a slice per axis, each in steps of one."""
        return self.read(index)

    def get_dtype(self) -> str:
        """Returns safetensors' name of a type that the dequantized tensor has."""
        return "F32"

    def get_shape(self) -> list[int]:
        """Returns the shape."""
        return list(self.shape)
