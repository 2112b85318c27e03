"""The tensors in a checkpoint's weight files, under the names that the model has for them.

Files' headers are read, and, if both an embedding and an output head that should share its
weights are stored, these two.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from baton.common.errors import ConfigurationError
from engine.models.layers import OUTPUT_HEAD, CausalModel
from engine.models.tensor_parts import TensorPart, as_numbers
from engine.runtime.weights.safetensors_file import SafetensorsFile
from kernels.block_rows import BlockRows
from kernels.formats import FORMATS, WeightFormat

__all__ = [
    "OpenFile",
    "StoredEntry",
    "StoredTensors",
    "first_float_dtype",
    "is_without_effect",
    "open_safetensors",
    "read_headers",
]

OpenFile = Callable[[Path], Any]
"""Opens a file of tensors; the result has the methods of `safe_open`'s."""

# By safetensors' names of types.
_FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_BYTES = "U8"  # of numbers in 4 bits, and their scales
# Constants of the code that wrote a checkpoint, a value head from training, and scales for KV in
# eight bits, which Baton measures itself.
_WITHOUT_EFFECT = re.compile(
    r"(^|\.)(rotary_emb\..+|position_ids|decoder\.version|(attn|attention)\.(masked_)?bias"
    r"|v_head\..+|(q|k|v|kv|prob)_scale)$"
)
# The text part of a model that reads images too may have a component of its own in names.
_TEXT_PART = re.compile(r"^(model\.)?language_model\.")
_COMPARED_ROWS = 4096


class _Unused(Enum):
    """Parts of checkpoints that are not used. The values are for warnings, with a place for the
    number of layers.
    """

    BEYOND = "layers beyond num_hidden_layers {}, which are not used"
    DRAFTS = "layers that draft tokens, which are not used"
    OTHER_MEDIA = "the parts that read images or sound, which are not used: only text is served"


_UNUSED_PARTS: Mapping[_Unused, re.Pattern[str]] = MappingProxyType(
    {
        _Unused.DRAFTS: re.compile(r"(^|\.)mtp\."),
        _Unused.OTHER_MEDIA: re.compile(
            r"^(model\.)?(visual|multi_modal_projector|(vision|audio)_tower|embed_(vision|audio))\."
        ),
    }
)

_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A tensor in a file.

    Attributes:
        file: the file.
        name: the tensor's name in the file.
        dtype: safetensors' name of its type, or that of its storage format.
        shape: its shape.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def format(self) -> WeightFormat | None:
        """Its storage format; None for numbers and other types."""
        return FORMATS.get(self.dtype)


class StoredTensors:
    """The tensors of a checkpoint that a model needs.

    Args:
        entries: of the weight files.
        open_file: opens one of them.
        model: the whole model, with or without memory for weights.
        dtype: type of its weights, in which tensors are compared.

    Raises:
        ConfigurationError: a file has a tensor that the model does not have.
    """

    def __init__(
        self,
        entries: Iterable[StoredEntry],
        open_file: OpenFile,
        model: CausalModel,
        dtype: torch.dtype,
    ) -> None:
        self._open_file, self._dtype = open_file, dtype
        self._entries: dict[str, StoredEntry] = {}
        names, unused = _Names(model, self._is_zero), Counter[tuple[Path, _Unused]]()
        for entry in entries:
            name = names.find(entry)
            if isinstance(name, str):
                self._add(name, entry)
            elif name is not None:
                unused[entry.file.parent, name] += 1
        for (folder, part), count in unused.items():
            text = part.value.format(model.config.num_layers)
            _logger.warning("%s has %d tensors of %s", folder, count, text)

    def tie_head(self, embedding: str, head_tensor: str) -> bool:
        """Makes the output head's tensor that of the embedding, unless both are stored and differ.

        Args:
            embedding: name of the embedding's tensor.
            head_tensor: name of the output head's tensor.

        Returns:
            Whether one tensor is for both.
        """
        table, head = self._entries.get(embedding), self._entries.get(head_tensor)
        if head is None:
            return True
        if table is not None and not self._are_equal(table, head):
            _logger.warning(
                "%s: tie_word_embeddings is true, but %s and %s are different; the output head "
                "has its own weights",
                head.file,
                table.name,
                head.name,
            )
            return False
        del self._entries[head_tensor]
        self._entries.setdefault(embedding, head)
        return True

    def locate(self, name: str, part: TensorPart) -> tuple[Path, str] | None:
        """Returns the file of a tensor, and its name there; None if it is not stored.

        Args:
            name: the model's name for it.
            part: a part of it.

        Raises:
            ConfigurationError: it has another shape, or a type that is not supported.
        """
        shape = part.tensor_shape
        entry = self._entries.get(name)
        if entry is None:
            return None
        is_readable = entry.dtype in _FLOAT_DTYPES or entry.format is not None
        if (entry.dtype != _BYTES) if part.is_quantized else not is_readable:
            raise ConfigurationError(
                f"{entry.file}: tensor {entry.name} is {entry.dtype}; "
                "config.json does not say how it is quantized"
            )
        if entry.shape != shape:
            raise ConfigurationError(
                f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}; "
                f"config.json asks for {list(shape)}"
            )
        return entry.file, entry.name

    def format_of(self, name: str) -> WeightFormat | None:
        """Returns the storage format of a tensor, by the model's name for it; None if it has none
        or is not stored.
        """
        entry = self._entries.get(name)
        return None if entry is None else entry.format

    @property
    def formats(self) -> frozenset[WeightFormat]:
        """The storage formats of all tensors."""
        of_bytes = FORMATS["MXFP4"]  # the only one that a checkpoint has as tensors of bytes
        formats = (
            of_bytes if entry.dtype == _BYTES else entry.format for entry in self._entries.values()
        )
        return frozenset(kind for kind in formats if kind is not None)

    def _add(self, name: str, entry: StoredEntry) -> None:
        """Adds a tensor; of two with the same name the later one counts."""
        earlier = self._entries.get(name)
        self._entries[name] = entry
        if earlier is not None and not self._are_equal(earlier, entry):
            _logger.warning(
                "%s and %s have different tensors %s; the second one is used",
                earlier.file,
                entry.file,
                name,
            )

    def _are_equal(self, first: StoredEntry, second: StoredEntry) -> bool:
        if first.shape != second.shape or first.format != second.format:
            return False
        if first.format is None and not {first.dtype, second.dtype} <= _FLOAT_DTYPES.keys():
            return False
        with self._open_file(first.file) as file, self._open_file(second.file) as like:
            parts = zip(_rows(file, first), _rows(like, second), strict=True)
            return all(self._are_same(*rows) for rows in parts)

    def _is_zero(self, entry: StoredEntry) -> bool:
        with self._open_file(entry.file) as file:
            return entry.dtype in _FLOAT_DTYPES and not file.get_tensor(entry.name).any()

    def _are_same(self, rows: torch.Tensor | BlockRows, like: torch.Tensor | BlockRows) -> bool:
        if isinstance(rows, BlockRows) and isinstance(like, BlockRows):
            return torch.equal(rows.data, like.data)
        return torch.equal(as_numbers(rows).to(self._dtype), as_numbers(like).to(self._dtype))


class _Names:
    """Finds the model's names of a checkpoint's tensors.

    Names in checkpoints that were saved from the bare model lack the first part of the prefix.

    Args:
        model: the whole model.
        is_zero: reads whether a tensor has only zeros.
    """

    def __init__(self, model: CausalModel, is_zero: Callable[[StoredEntry], bool]) -> None:
        self._is_zero = is_zero
        self._known: Set[str] = model.checkpoint_tensors().keys() | {model.head_tensor}
        self._head, self._is_unused = model.head_tensor, model.is_unused
        stem, _, inner = model.layers_path.partition(".")
        self._first_part = f"{stem}."
        layers = f"({re.escape(self._first_part)})?{re.escape(inner)}"
        self._layer = re.compile(rf"{layers}\.([0-9]{{1,9}})\.")
        self._num_layers = model.config.num_layers

    def find(self, entry: StoredEntry) -> str | _Unused | None:
        """Returns the model's name for a tensor, or the part of a checkpoint that it belongs to;
        None if it has no effect.

        Raises:
            ConfigurationError: the model does not have it, and it may have an effect.
        """
        name = _TEXT_PART.sub(r"\1", entry.name)
        name = self._head if name == OUTPUT_HEAD else name  # a new name of all families' heads
        for candidate in (name, self._first_part + name):
            if candidate in self._known:
                return candidate
        if is_without_effect(name):
            return None
        if self._is_beyond(name):
            return _Unused.BEYOND
        for part, pattern in _UNUSED_PARTS.items():
            if pattern.search(name):
                return part
        if self._is_unused(name):
            return None
        # AutoGPTQ writes biases of layers that have none.
        if name.endswith(".bias") and self._is_zero(entry):
            return None
        raise ConfigurationError(
            f"{entry.file} has tensor {entry.name}, which the model does not have"
        )

    def _is_beyond(self, name: str) -> bool:
        layer = self._layer.match(name)
        return layer is not None and int(layer[2]) >= self._num_layers


def is_without_effect(name: str) -> bool:
    """Whether a tensor of this name has no effect on what a model computes."""
    return _WITHOUT_EFFECT.search(name) is not None


def first_float_dtype(files: Iterable[Path]) -> str | None:
    """Returns the name of the first floating-point type in safetensors files; None if none has.

    Raises:
        ConfigurationError: a file is not readable.
    """
    dtypes = (entry.dtype for entry in read_headers(files, open_safetensors))
    return next((_FLOAT_DTYPES[dtype] for dtype in dtypes if dtype in _FLOAT_DTYPES), None)


def open_safetensors(file: Path) -> SafetensorsFile:
    """Opens a safetensors file.

    Raises:
        ConfigurationError: it is not readable.
    """
    return SafetensorsFile(file)


def read_headers(files: Iterable[Path], open_file: OpenFile) -> Iterator[StoredEntry]:
    """Yields the tensors of all files.

    Raises:
        ConfigurationError: a file is not readable.
    """
    for file in files:
        with open_file(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                stored = tensors.get_slice(name)
                yield StoredEntry(file, name, stored.get_dtype(), tuple(stored.get_shape()))


def _rows(tensors: Any, entry: StoredEntry) -> Iterator[torch.Tensor | BlockRows]:
    """Yields a tensor's rows, some at a time; one without axes, or with empty ones, as it is."""
    if not all(entry.shape) or not entry.shape:
        yield tensors.get_tensor(entry.name)
        return
    stored, others = tensors.get_slice(entry.name), [slice(0, size) for size in entry.shape[1:]]
    for start in range(0, entry.shape[0], _COMPARED_ROWS):
        yield stored[(slice(start, min(start + _COMPARED_ROWS, entry.shape[0])), *others)]
