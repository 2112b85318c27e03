"""`QuantizedLayer`: the weight of a layer that a checkpoint stores as codes and scales."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch

from baton.common.errors import ConfigurationError
from engine.runtime.weights.quantized.coded_rows import CodedRows, CodeKind, block_format
from engine.runtime.weights.safetensors_file import SafetensorsFile
from engine.runtime.weights.stored_tensors import StoredEntry, open_safetensors
from kernels.formats import WeightFormat

__all__ = ["LayerTensors", "OpenFiles", "QuantizedLayer", "ordered_groups"]

_FLOATS = ("F32", "BF16", "F16")
_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qweight": ("I32",),
        "qzeros": ("I32",),
        "scales": _FLOATS,
        "g_idx": ("I32", "I64"),
        "weight": ("I8", "F8_E4M3"),
        "weight_packed": ("I32",),
        "weight_scale": (*_FLOATS, "F8_E8M0"),
        "weight_scale_inv": (*_FLOATS, "F8_E8M0"),
        "weight_zero_point": ("I8", "I32"),
        "weight_shape": ("I64", "I32"),
        "weight_g_idx": ("I32", "I64"),
    }
)
"""The types of a quantized layer's tensors, by the last components of their names."""


class OpenFiles:
    """Safetensors files, each opened once, and the tensors of one layer.

    A row of a transposed tensor is spread over all of it, so such tensors are read whole, once for
    all pieces of a layer.
    """

    def __init__(self) -> None:
        self._files: dict[Path, SafetensorsFile] = {}
        self._layer, self._tensors = "", dict[str, torch.Tensor]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files, and forgets the layer's tensors; reading opens files again."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._layer, self._tensors = "", {}

    def __getitem__(self, file: Path) -> SafetensorsFile:
        """Returns a file, with the methods of safetensors' `safe_open`."""
        if file not in self._files:
            self._files[file] = open_safetensors(file)
        return self._files[file]

    def tensor(self, layer: str, entry: StoredEntry) -> torch.Tensor:
        """Returns a tensor, and keeps it until one of another layer is read."""
        if layer != self._layer:
            self._layer, self._tensors = layer, {}
        if entry.name not in self._tensors:
            self._tensors[entry.name] = self[entry.file].get_tensor(entry.name)
        return self._tensors[entry.name]


class LayerTensors:
    """The tensors of one layer.

    Args:
        path: the layer's name.
        entries: by the last component of their names.
        files: opens their files.
    """

    def __init__(self, path: str, entries: Mapping[str, StoredEntry], files: OpenFiles) -> None:
        self.path = path
        self._entries, self._files = entries, files

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entry(self, name: str) -> StoredEntry:
        """Returns a tensor's entry.

        Raises:
            ConfigurationError: the files lack it, or it has a type that such tensors do not have.
        """
        if name not in self._entries:
            file = next(iter(self._entries.values())).file
            raise ConfigurationError(f"{file.parent} lacks tensor {self.path}.{name}")
        entry = self._entries[name]
        if entry.dtype not in _DTYPES[name]:
            raise self.refuse(name, f"it must be {' or '.join(_DTYPES[name])}")
        return entry

    def shape(self, name: str, num_axes: int = 2) -> tuple[int, ...]:
        """Returns a tensor's shape.

        Raises:
            ConfigurationError: the files lack it, or it has another number of axes, or an empty
                one.
        """
        shape = self.entry(name).shape
        if len(shape) != num_axes or 0 in shape:
            raise self.refuse(name, f"quantized layers have {num_axes} axes there")
        return shape

    def read(self, name: str, *index: slice) -> torch.Tensor:
        """Reads a range of a tensor's first axis, or a part of it by a slice per axis; the whole
        tensor without any.
        """
        entry = self.entry(name)
        if len(index) != 1:
            return self._files.tensor(self.path, entry)[index]
        return self._files[entry.file].get_slice(entry.name)[index]

    def refuse(self, name: str, reason: str) -> ConfigurationError:
        """Returns the error for a tensor of the wrong type or shape."""
        entry = self._entries[name]
        tensor = f"{entry.file}: tensor {entry.name} is {entry.dtype} {list(entry.shape)}"
        return ConfigurationError(f"{tensor}; {reason}")


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """The weight of a layer.

    Attributes:
        shape: outputs and inputs.
        kind: the kind of its codes.
        group: consecutive inputs that share a scale; None if the inputs of a group lie apart.
        has_zeros: whether its codes have zero points other than their kind's middle.
        read: reads a range of its rows.
    """

    shape: tuple[int, int]
    kind: CodeKind
    group: int | None
    has_zeros: bool
    read: Callable[[slice], CodedRows]

    @property
    def format(self) -> WeightFormat | None:
        """The format that can have its rows; None if none can, so that they become numbers."""
        has_other_zeros = self.has_zeros and self.kind is not CodeKind.INT4
        if self.group is None or has_other_zeros:
            return None
        return block_format(self.kind, self.shape[1], self.group)


def ordered_groups(num_columns: int, group: int) -> torch.Tensor:
    """Returns the group of each column, `[num_columns]` int64, if groups follow each other."""
    return torch.arange(num_columns) // group
