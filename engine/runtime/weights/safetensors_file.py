"""`SafetensorsFile`: reads parts of the tensors of a safetensors file, without mapping it.

Format of the files: https://huggingface.co/docs/safetensors
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

from baton.common.errors import ConfigurationError
from baton.common.file_access import has_file, unreadable
from engine.runtime.weights.file_reader import FileReader
from kernels import Cut

__all__ = ["SafetensorsFile", "StoredTensor", "locate_tensors"]

_LENGTH_BYTES = 8  # size of the header's length, at the start of a file
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        file: the file.
        name: its name there.
        offset: offset of its first byte in the file.
        num_bytes: size of the tensor.
        type_name: the file's name of the type of its elements.
        shape: its shape, in row-major order.
    """

    file: Path
    name: str
    offset: int
    num_bytes: int
    type_name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements.

        Raises:
            ConfigurationError: it has none here; names the tensor.
        """
        dtype = _DTYPES.get(self.type_name)
        if dtype is None:
            raise ConfigurationError(
                f"{self.file}: tensor {self.name} is {self.type_name}, which is not supported"
            )
        return dtype

    def rows(self, cut: Cut) -> "StoredTensor":
        """Returns a range of the first axis as a tensor."""
        row_bytes = self.num_bytes // cut.total
        return replace(
            self,
            offset=self.offset + cut.start * row_bytes,
            num_bytes=cut.size * row_bytes,
            shape=(cut.size, *self.shape[1:]),
        )


class SafetensorsFile:
    """The tensors of a file, with the methods of safetensors' `safe_open`.

    Args:
        file: the file.

    Raises:
        ConfigurationError: it is not readable.
    """

    def __init__(self, file: Path) -> None:
        try:
            has_file(file)  # `safe_open` calls one without permission "No such file"
            with safe_open(file, framework="pt", device="cpu"):  # checks the header
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(
                f"{file} is not a readable safetensors file: {error}"
            ) from error
        self._tensors = locate_tensors(file)
        self._reader = FileReader()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; reading from it opens it again."""
        self._reader.close()

    def keys(self) -> list[str]:
        """Returns the tensors' names."""
        return list(self._tensors)

    def get_slice(self, name: str) -> "_Slice":
        """Returns a tensor's type and shape; an index reads a part."""
        return _Slice(self._tensors[name], self._reader)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Reads a tensor."""
        return self.get_slice(name)[()]


@dataclass(frozen=True, slots=True)
class _Slice:
    stored: StoredTensor
    reader: FileReader

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Reads a part: a slice per axis, in steps of one; axes without any are whole.

        Elements of the file that lie between those of the part are read too.
        """
        stored, shape = self.stored, self.stored.shape
        ranges = [range(size)[part] for size, part in zip(shape, index, strict=False)]
        axis, first, count, step = 0, 0, 1, math.prod(shape)
        while axis < len(ranges) and count == 1:  # a range of one axis after single indices
            step //= max(1, shape[axis])
            first, count = first + ranges[axis].start * step, len(ranges[axis])
            axis += 1
        rows = torch.empty(count * step, dtype=stored.dtype)
        memory = rows.view(torch.uint8).numpy().data
        self.reader.read(stored.file, stored.offset + first * rows.itemsize, memory)
        sizes = [1] * (axis - 1) + [count] * min(axis, 1)
        others = [slice(part.start, part.stop) for part in ranges[axis:]]
        return rows.view((*sizes, *shape[axis:]))[(*[slice(None)] * axis, *others)]

    def get_dtype(self) -> str:
        """Returns safetensors' name of its type."""
        return self.stored.type_name

    def get_shape(self) -> list[int]:
        """Returns its shape."""
        return list(self.stored.shape)


def locate_tensors(file: Path) -> dict[str, StoredTensor]:
    """Returns a valid safetensors file's tensors, by name.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        with file.open("rb") as source:
            length = int.from_bytes(source.read(_LENGTH_BYTES), "little")
            header = json.loads(source.read(length))
    except OSError as error:
        raise unreadable(file, error) from error
    except ValueError as error:
        raise ConfigurationError(f"{file} is not a readable safetensors file: {error}") from error
    first = _LENGTH_BYTES + length
    return {
        name: StoredTensor(
            file=file,
            name=name,
            offset=first + facts["data_offsets"][0],
            num_bytes=facts["data_offsets"][1] - facts["data_offsets"][0],
            type_name=facts["dtype"],
            shape=tuple(facts["shape"]),
        )
        for name, facts in header.items()
        if name != "__metadata__"
    }
