"""Reads the weights of a GGUF file, under the names of a checkpoint, a few rows at a time.

Matrices in a storage format of `kernels.formats` are read as they are; those in other types are
dequantized. Of these the host holds the result, in the type that the model computes in, and the
rows under way; never the whole in another type.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import gguf
import numpy as np
import torch

import kernels
from baton.common.model_files.gguf.architecture import TensorOrder
from baton.common.model_files.gguf.architectures import architecture_of
from baton.common.model_files.gguf.header import GgufHeader, GgufTensor
from baton.common.model_files.gguf.rope import FACTOR_TENSORS
from baton.common.model_files.gguf.values import HeaderValues
from engine.runtime.weights.file_reader import FileReader
from kernels.block_rows import BlockRows
from kernels.formats import GGML_FORMATS, WeightFormat

__all__ = ["GgufWeights", "count_quantized", "log_dequantized"]

_PIECE_ELEMENTS = 2**18  # their float32 forms stay in the cache
_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,8})\.)?(.+?)(\.weight|\.bias)?")
_UNCHANGED = TensorOrder()
_Numbers = np.ndarray[Any, np.dtype[np.int64]]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a checkpoint's tensor lies in a GGUF file.

    Attributes:
        names: names of the file's tensors, whose rows follow each other.
        shape: shape of the checkpoint's tensor.
        first: number of elements before it in the file's tensor.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    first: int = 0

    @property
    def columns(self) -> int:
        """The number of elements of a row."""
        return math.prod(self.shape[1:])


class GgufWeights:
    """The tensors of a GGUF file, with the methods of safetensors' `safe_open`.

    Args:
        header: of the model, which may be split into several files.
        file: one of its files.
        dtype: type of the tensors that `get_tensor` returns, but for vectors, which are float32.

    Raises:
        ConfigurationError: a tensor has a type that cannot be dequantized, a shape that the type
            does not allow, or bytes outside of the file; names the tensor.
    """

    def __init__(self, header: GgufHeader, file: Path, dtype: torch.dtype) -> None:
        self._header = header
        self._dtype = dtype
        self._architecture = architecture_of(header)
        values = HeaderValues(header, header.metadata["general.architecture"])
        self._orders = self._architecture.orders(values)
        drafting = range(values.num_layers, values.num_blocks)
        self._reader = FileReader()
        self._places: dict[str, _Place] = {}
        for name, tensor in header.tensors.items():
            layer = _name_of(name).layer
            is_used = name not in FACTOR_TENSORS and layer not in drafting
            if tensor.file == file and is_used:
                self._check(name)
                self._places |= self._places_of(name, tensor)
        for place in self._places.values():
            self._check_order(place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def keys(self) -> list[str]:
        """Returns the tensors' names, as in a checkpoint."""
        return list(self._places)

    def get_slice(self, name: str) -> "_Description":
        """Returns a tensor's type and shape; an index reads a part: `BlockRows` of a matrix in a
        storage format, otherwise numbers.
        """
        place = self._places[name]
        weight_format = self._format_of(place)
        if weight_format is None:
            return _Description(place.shape, "F32", partial(self._read_part, name))
        read = partial(self._read_blocks, place, weight_format)
        return _Description(place.shape, weight_format.name, read)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Reads and dequantizes a tensor."""
        return self._read_part(name, (slice(None),))

    def _read_part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Reads and dequantizes some rows, and returns the part of them that `index` names."""
        place = self._places[name]
        order = self._order_of_rows(place)
        columns = self._order_of(place.names[0]).columns
        selected = range(place.shape[0])[index[0]]
        # Some vectors are not rounded to the type of the weights.
        dtype = self._dtype if len(place.shape) > 1 else torch.float32
        result = torch.empty(len(selected), place.columns, dtype=dtype)
        step = max(1, _PIECE_ELEMENTS // place.columns)
        for start in range(0, len(selected), step):
            part = slice(selected.start + start, min(selected.start + start + step, selected.stop))
            rows = self._read_rows(place, part if order is None else order[part])
            result[start : start + step] = rows[:, columns] if columns else rows
        return result.view(len(selected), *place.shape[1:])[(slice(None), *index[1:])]

    def _read_rows(self, place: _Place, rows: slice | _Numbers) -> torch.Tensor:
        """Returns rows of a place's tensors in the file as the checkpoint's numbers."""
        if isinstance(rows, slice) or len(place.names) == 1:  # a place with several has an order
            return self._dequantize(place.names[0], self._read_bytes(place, rows), place.columns)
        numbers = torch.empty(len(rows), place.columns)
        first = 0
        for name in place.names:
            shape = self._header.tensors[name].shape
            (here,) = np.nonzero((rows >= first) & (rows < first + shape[0]))
            if len(here):
                stored = self._read_bytes(_Place((name,), shape), rows[here] - first)
                numbers[here] = self._dequantize(name, stored, place.columns)
            first += shape[0]
        return numbers

    def _dequantize(self, name: str, rows: _Bytes, columns: int) -> torch.Tensor:
        """Returns the numbers of rows of one of the file's tensors, as the checkpoint has them."""
        numbers = _dequantize(rows, self._header.tensors[name].type_id)
        part = _name_of(name).part
        if part.endswith("norm") and part not in self._architecture.plain_norms:
            numbers -= self._architecture.norm_offset
        convert = self._architecture.conversions.get(part)
        return (numbers if convert is None else convert(numbers)).view(-1, columns)

    def _read_blocks(
        self, place: _Place, weight_format: WeightFormat, index: tuple[slice, ...]
    ) -> BlockRows | torch.Tensor:
        """Reads a part of a matrix as blocks, or as numbers if its columns are no whole blocks."""
        rows, columns = (range(size)[part] for size, part in zip(place.shape, index, strict=True))
        order = self._order_of_rows(place)
        part = slice(rows.start, rows.stop)
        stored = self._read_bytes(place, part if order is None else order[part])
        blocks = BlockRows(weight_format, torch.from_numpy(stored), place.columns)
        return kernels.take_columns(blocks, columns.start, columns.stop)

    def _format_of(self, place: _Place) -> WeightFormat | None:
        """Returns the format in which a matrix can be read; None if it has to be dequantized."""
        part = _name_of(place.names[0]).part
        is_changed = (
            part in self._architecture.conversions or self._order_of(place.names[0]).columns
        )
        if is_changed or len(place.names) > 1 or len(place.shape) != 2:
            return None
        return GGML_FORMATS.get(self._header.tensors[place.names[0]].type_id)

    def _read_bytes(self, place: _Place, rows: slice | _Numbers) -> _Bytes:
        """Reads rows as they are stored, `[rows, bytes per row]`; a vector has a row per element.

        Args:
            place: the place of the tensor in one of the file's.
            rows: a range of its rows, or their numbers, each once.
        """
        tensor = self._header.tensors[place.names[0]]
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
        row_bytes = place.columns // block * block_bytes
        first = tensor.offset + place.first // block * block_bytes
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else np.sort(rows)
        stored = np.empty((len(numbers), row_bytes), np.uint8)
        ends = [*(np.flatnonzero(np.diff(numbers) != 1) + 1), len(numbers)]
        for start, end in pairwise([0, *ends]):
            if start < end:
                memory = stored[start:end].reshape(-1).data
                self._reader.read(tensor.file, first + int(numbers[start]) * row_bytes, memory)
        return stored if isinstance(rows, slice) else stored[np.searchsorted(numbers, rows)]

    def _places_of(self, name: str, tensor: GgufTensor) -> Iterator[tuple[str, _Place]]:
        """Yields the checkpoint's name and the place of each tensor that one of the file has."""
        layer, part, suffix = _name_of(name)
        if any(part in parts for parts in self._architecture.joined.values()):
            return  # `_joined_shape` finds it
        in_layer = layer is not None
        names = self._architecture.layer_names if in_layer else self._architecture.model_names
        whole = names.get(f"{part}{suffix}")
        if whole is None and part in names:
            whole = f"{names[part]}{suffix}"
        if whole is None:  # the model has no such tensor
            yield name, _Place((name,), tensor.shape)
            return
        shape, axis = tensor.shape, self._architecture.new_axes.get(part)
        if axis is not None and len(shape) <= axis + 1:
            shape = (*shape[:axis], 1, *shape[axis:])
        known = f"model.layers.{layer}.{whole}" if in_layer else whole
        if "{expert}" in known:
            for expert in range(shape[0]):
                place = _Place((name,), shape[1:], expert * math.prod(shape[1:]))
                yield known.replace("{expert}", str(expert)), place
            return
        joined = self._architecture.joined.get(part, ())
        others = [f"blk.{layer}.{other}{suffix}" for other in joined]
        yield known, _Place((name, *others), self._joined_shape(shape, others))

    def _joined_shape(self, shape: tuple[int, ...], others: Sequence[str]) -> tuple[int, ...]:
        """Returns the shape of a tensor with the rows of others."""
        for name in others:
            other = self._header.tensors.get(name)
            if other is None:
                raise self._header.refuse(f"it has no tensor {name}")
            if other.shape[1:] != shape[1:]:
                raise self._header.refuse(f"tensor {name} has shape {list(other.shape)}")
            self._check(name)
            shape = (shape[0] + other.shape[0], *shape[1:])
        return shape

    def _order_of(self, name: str) -> TensorOrder:
        return self._orders.get(_name_of(name).part, _UNCHANGED)

    def _order_of_rows(self, place: _Place) -> _Numbers | None:
        """Returns the file's row of each row of the tensor; None if they have the same order."""
        rows = self._order_of(place.names[0]).rows or range(1)
        if len(rows) == len(place.names) == 1:
            return None
        groups = np.arange(place.shape[0]).reshape(-1, len(rows))
        return groups[:, np.array(rows)].reshape(-1)

    def _check(self, name: str) -> None:
        tensor = self._header.tensors[name]
        block, block_bytes = self._check_type(name, tensor.type_id)
        shape, columns = list(tensor.shape), math.prod(tensor.shape[1:])
        if 0 in shape or ([1, *shape[1:]][-1]) % block:
            raise self._header.refuse(f"tensor {name} has shape {shape}, which its type has not")
        num_bytes = shape[0] * columns // block * block_bytes
        if tensor.offset + num_bytes > tensor.file.stat().st_size:
            raise self._header.refuse(f"it ends within tensor {name}")

    def _check_order(self, place: _Place) -> None:
        name, order = place.names[0], self._order_of(place.names[0])
        found = f"tensor {name} has shape {list(place.shape)}"
        if place.shape[0] % (len(order.rows) or 1):
            raise self._header.refuse(f"{found}; its rows come in groups of {len(order.rows)}")
        if order.columns and place.columns != len(order.columns):
            raise self._header.refuse(f"{found}; the model has {len(order.columns)} columns")

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


def count_quantized(header: GgufHeader) -> Counter[int]:
    """Returns the numbers of quantized tensors, by `gguf.GGMLQuantizationType`."""
    types = Counter(tensor.type_id for tensor in header.tensors.values())
    blocks = {kind.value: block for kind, (block, _) in gguf.GGML_QUANT_SIZES.items()}
    return Counter({kind: count for kind, count in types.items() if blocks.get(kind, 1) > 1})


def log_dequantized(header: GgufHeader) -> None:
    """Logs the types of tensors that no storage format has, so that they become dense."""
    texts = [
        f"{gguf.GGMLQuantizationType(kind).name} ({count})"
        for kind, count in count_quantized(header).items()
        if kind not in GGML_FORMATS
    ]
    if texts:
        _logger.info("tensors of types without kernels are dequantized: %s", ", ".join(texts))


class _Name(NamedTuple):
    """The parts of a tensor's name in a file.

    Attributes:
        layer: number of the layer; None outside of layers.
        part: what the tensor is.
        suffix: `.weight`, `.bias` or nothing.
    """

    layer: int | None
    part: str
    suffix: str


def _name_of(name: str) -> _Name:
    match = _NAME.fullmatch(name)
    if match is None:
        return _Name(None, name, "")
    layer, part, suffix = match.groups()
    return _Name(None if layer is None else int(layer), part, suffix or "")


def _dequantize(rows: _Bytes, type_id: int) -> torch.Tensor:
    """Returns the numbers in whole rows as one vector."""
    # `gguf` dequantizes 16 rows at once; one long row is faster than many short ones.
    numbers = gguf.dequantize(rows.reshape(1, -1), gguf.GGMLQuantizationType(type_id))
    return torch.from_numpy(np.require(numbers, requirements="W")).flatten()


@dataclass(frozen=True, slots=True)
class _Description:
    """The type and the shape of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[slice, ...]], torch.Tensor | BlockRows]

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor | BlockRows:
        """Reads a part of the tensor: a slice per axis, each in steps of one."""
        return self.read(index)

    def get_dtype(self) -> str:
        """Returns the name of a storage format, or safetensors' name of a type of numbers."""
        return self.dtype

    def get_shape(self) -> list[int]:
        """Returns the shape."""
        return list(self.shape)
