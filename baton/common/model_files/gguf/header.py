"""Reads the start of a GGUF file: metadata, and each tensor's name, shape, type and place.

A model may be split into several files, as `llama-gguf-split` does: the first one has the metadata
of the model, and each has some of its tensors.

The `gguf` package makes two arrays per string, which takes seconds for a vocabulary; this module
reads one in a fraction of a second and does not import numpy.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.file_access import unreadable

__all__ = ["GgufHeader", "GgufTensor", "name_without_part", "read_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_HEADER_BYTES = 2**26
"""Bounds the memory and the time for a malformed file; a vocabulary takes some megabytes."""
_MAX_DIMS = 4
_MAX_PARTS = 99_999  # their names have five digits
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_STRING, _ARRAY = 8, 9
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # of files that do not state them
# By the format's number of a type: struct's letter.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a GGUF file.

    Attributes:
        shape: its shape, in row-major order.
        type_id: GGML's number of its type.
        offset: offset of its first byte in the file.
        file: the file, which is one of several for a model that is split.
    """

    shape: tuple[int, ...]
    type_id: int
    offset: int
    file: Path


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file, before its weights.

    Attributes:
        path: the file; the first one of a model that is split.
        metadata: values by key.
        tensors: the tensors of all files by their names.
        parts: all files of the model, in their order.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    parts: tuple[Path, ...]

    def refuse(self, reason: str) -> ConfigurationError:
        """Returns the error for a file that cannot be used; `reason` names the key or tensor."""
        return ConfigurationError(f"{self.path}: {reason}")

    @property
    def tokens(self) -> list[str]:
        """The vocabulary, in the order of the ids; empty if the file has none."""
        return list(self.metadata.get("tokenizer.ggml.tokens", ()))

    def token_id(self, role: str) -> int | None:
        """Returns the id of the token with a role, such as `bos`; None if there is no such token.

        Ids outside of the vocabulary count as none: some files state -1.
        """
        is_sentencepiece = self.metadata.get("tokenizer.ggml.model") == "llama"
        default = _SENTENCEPIECE_IDS.get(role) if is_sentencepiece else None
        value = self.metadata.get(f"tokenizer.ggml.{role}_token_id", default)
        num_tokens = len(self.metadata.get("tokenizer.ggml.tokens", ()))
        return value if type(value) is int and 0 <= value < num_tokens else None


def read_header(path: Path) -> GgufHeader:
    """Reads the metadata of a model and the list of its tensors.

    Args:
        path: the file; the first one of a model that is split.

    Raises:
        ConfigurationError: a file cannot be read, is no GGUF file, or is cut off or damaged; or
            the path is not the first of several files, or one of them is missing.
    """
    header = _read_file(path)
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count > _MAX_PARTS:
        raise header.refuse(f"split.count {count!r} is not supported")
    return _with_other_parts(header, count) if count > 1 else header


def name_without_part(file_name: str) -> str:
    """Returns the name that all files of a model share, without `.gguf`."""
    part = _PART_NAME.fullmatch(file_name)
    return part["stem"] if part else file_name.removesuffix(".gguf")


def _with_other_parts(first: GgufHeader, count: int) -> GgufHeader:
    """Returns the header of a model in `count` files, the first of which was read.

    Raises:
        ConfigurationError: the file is not the first one, or another one is missing or belongs to
            another model.
    """
    part = _PART_NAME.fullmatch(first.path.name)
    if part is None or int(part["count"]) != count:
        raise first.refuse(
            f"split.count is {count}; the name of such a file ends with "
            f"-00001-of-{count:05}.gguf, as that of the first one"
        )
    names = [f"{part['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if first.metadata.get("split.no") != 0 or first.path.name != names[0]:
        raise first.refuse(f"it is a part of a model; name the first one, {names[0]}")
    tensors = dict(first.tensors)
    parts = [first.path, *(first.path.with_name(name) for name in names[1:])]
    for number, path in enumerate(parts[1:], 1):
        header = _read_file(path)
        stated = header.metadata.get("split.no"), header.metadata.get("split.count")
        if stated != (number, count):
            raise header.refuse(f"split.no and split.count are {stated}, not {(number, count)}")
        if twice := tensors.keys() & header.tensors.keys():
            raise header.refuse(f"tensor {min(twice)} is in an earlier part too")
        tensors |= header.tensors
    num_tensors = first.metadata.get("split.tensors.count", len(tensors))
    if num_tensors != len(tensors):
        raise first.refuse(f"split.tensors.count is {num_tensors}; the parts have {len(tensors)}")
    return replace(first, tensors=tensors, parts=tuple(parts))


def _read_file(path: Path) -> GgufHeader:
    """Reads the header of one file."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ConfigurationError(f"{path} is not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, _Cursor(data, len(_MAGIC)))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, OverflowError, struct.error) as error:
        raise ConfigurationError(f"{path} is not a readable GGUF file: {error}") from error


class _Cursor:
    """Reads one value after another.

    Raises:
        struct.error, ValueError: the file ends before the value does, or the value is malformed.
    """

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def take(self, num_bytes: int) -> int:
        """Moves on by a value's bytes; returns where they start."""
        start, end = self.offset, self.offset + num_bytes
        if end > len(self._data):
            raise ValueError("it ends within its header")
        if end > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {_MAX_HEADER_BYTES >> 20} MiB")
        self.offset = end
        return start

    def unpack(self, letters: str) -> tuple[Any, ...]:
        fields = struct.Struct(f"<{letters}")
        return fields.unpack_from(self._data, self.take(fields.size))

    def number(self, letter: str) -> Any:
        return self.unpack(letter)[0]

    def string(self) -> str:
        start = self.take(self.number("Q"))
        return self._data[start : self.offset].decode()

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array(*self.unpack("IQ"))
        return self.number(_letter_of(type_id))

    def _array(self, type_id: int, count: int) -> list[Any]:
        if type_id == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.unpack(f"{count}{_letter_of(type_id)}"))


def _letter_of(type_id: int) -> str:
    if type_id not in _SCALARS:
        raise ValueError(f"it has a value of the unknown type {type_id}")
    return _SCALARS[type_id]


def _read(path: Path, cursor: _Cursor) -> GgufHeader:
    version = cursor.number("I")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise ConfigurationError(
            f"{path} is a big-endian GGUF file; little-endian ones are supported: convert it in "
            f"place with gguf-convert-endian {path} little"
        )
    if version not in _VERSIONS:
        raise ConfigurationError(
            f"{path} has version {version} of GGUF; the versions "
            f"{', '.join(map(str, _VERSIONS))} are supported"
        )
    num_tensors, num_keys = cursor.unpack("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"it has the key {key} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    tensors = _read_tensors(cursor, num_tensors, path)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigurationError(f"{path}: general.alignment {alignment!r} is not supported")
    start = -(-cursor.offset // alignment) * alignment
    placed = {
        name: replace(tensor, offset=start + tensor.offset) for name, tensor in tensors.items()
    }
    return GgufHeader(path, metadata, placed, (path,))


def _read_tensors(cursor: _Cursor, num_tensors: int, path: Path) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name, tensor = _read_tensor(cursor, path)
        if name in tensors:
            raise ValueError(f"it has the tensor {name} twice")
        tensors[name] = tensor
    return tensors


def _read_tensor(cursor: _Cursor, path: Path) -> tuple[str, GgufTensor]:
    """Reads a tensor's description, whose offset counts from the first tensor."""
    name = cursor.string()
    num_dims = cursor.number("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
    dims = cursor.unpack(f"{num_dims}Q")  # the fastest one first
    type_id, offset = cursor.unpack("IQ")
    return name, GgufTensor(tuple(reversed(dims)), type_id, offset, path)
