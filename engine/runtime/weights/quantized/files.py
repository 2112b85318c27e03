"""`QuantizedFiles`: the files of a quantized checkpoint, with one tensor for each layer's weight.

A layer's codes, scales and zero points may lie in several files; its weight is a tensor of the
file that has the codes.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch

import kernels
from engine.models.quantization import Scheme, SchemeKind
from engine.runtime.weights.quantized.layers import LayerTensors, OpenFiles, QuantizedLayer
from engine.runtime.weights.quantized.packed_words import awq_layer, gptq_layer
from engine.runtime.weights.quantized.scaled_tensors import packed_layer, scaled_layer
from engine.runtime.weights.stored_tensors import StoredEntry, open_safetensors, read_headers
from kernels.block_rows import BlockRows

__all__ = ["QuantizedFiles"]

_PARTS = frozenset(
    {
        *("qweight", "qzeros", "scales", "g_idx"),
        *("weight", "weight_packed", "weight_scale", "weight_scale_inv"),
        *("weight_zero_point", "weight_shape", "weight_g_idx"),
    }
)
"""Last components of the names of a quantized layer's tensors."""
# Scales of activations, by which Baton does not round them.
_WITHOUT_EFFECT = frozenset(
    {"input_scale", "input_zero_point", "output_scale", "output_zero_point"}
)

_Entries = dict[str, StoredEntry]
_logger = logging.getLogger("baton.engine")
_MakeLayer = Callable[[LayerTensors, Scheme], QuantizedLayer]


class QuantizedFiles:
    """The tensors of a checkpoint whose layers are quantized.

    Args:
        files: its safetensors files.
        scheme: of its config.json.

    Raises:
        ConfigurationError: a file is not readable, or the tensors of a layer do not fit each
            other; names the tensor.
    """

    def __init__(self, files: Iterable[Path], scheme: Scheme) -> None:
        self._files = OpenFiles()
        self._plain: dict[Path, list[str]] = defaultdict(list)
        self._weights: dict[Path, dict[str, QuantizedLayer]] = defaultdict(dict)
        entries = list(read_headers(files, open_safetensors))
        parts: dict[str, _Entries] = defaultdict(dict)
        for entry in entries:
            path, _, part = entry.name.rpartition(".")
            parts[path][part] = entry
        with self._files:
            layers = {path for path, tensors in parts.items() if self._add(path, tensors, scheme)}
        for entry in entries:
            path, _, part = entry.name.rpartition(".")
            is_of_layer = path in layers and part in _PARTS
            if not is_of_layer and part not in _WITHOUT_EFFECT:
                self._plain[entry.file].append(entry.name)
        self._log(scheme)

    def open(self, file: Path) -> "_QuantizedFile":
        """Opens one of the files; the result has the methods of `safe_open`'s."""
        return _QuantizedFile(self._files, file, self._plain[file], self._weights[file])

    def _add(self, path: str, tensors: _Entries, scheme: Scheme) -> bool:
        """Adds the weight of a layer with these tensors; returns whether it is quantized."""
        for main, (make, dtypes) in _LAYERS[scheme.kind].items():
            if main in tensors and tensors[main].dtype in dtypes:
                layer = make(LayerTensors(path, tensors, self._files), scheme)
                self._weights[tensors[main].file][f"{path}.weight"] = layer
                return True
        return False

    def _log(self, scheme: Scheme) -> None:
        """Logs what of a scheme has no effect, and which layers take more memory than stored."""
        if scheme.unused:
            _logger.info("quantization_config: %s: no effect", ", ".join(scheme.unused))
        layers = chain.from_iterable(weights.items() for weights in self._weights.values())
        dense = sorted(name for name, layer in layers if layer.format is None)
        if dense:
            _logger.warning(
                "%d weights are dequantized (first: %s): no storage format has their groups or "
                "zero points",
                *(len(dense), dense[0]),
            )


class _QuantizedFile:
    """One file.

    Args:
        files: opens the files of a layer's tensors.
        file: the file.
        plain: names of its tensors that belong to no quantized layer.
        weights: by name, the weights of quantized layers.
    """

    def __init__(
        self,
        files: OpenFiles,
        file: Path,
        plain: list[str],
        weights: Mapping[str, QuantizedLayer],
    ) -> None:
        self._files, self._file = files, file
        self._plain, self._weights = plain, weights

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def keys(self) -> list[str]:
        """Returns the tensors' names."""
        return [*self._plain, *self._weights]

    def get_slice(self, name: str) -> Any:
        """Returns the type and the shape of a tensor; an index reads a part."""
        if name in self._weights:
            return _Weight(self._weights[name])
        return self._files[self._file].get_slice(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Reads a tensor that belongs to no quantized layer."""
        return self._files[self._file].get_tensor(name)


@dataclass(frozen=True, slots=True)
class _Weight:
    """The weight of a quantized layer."""

    layer: QuantizedLayer

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor | BlockRows:
        """Reads a part of it: a slice per axis, each in steps of one.

        Returns:
            Rows in the layer's format, if it has one and the columns are whole blocks; otherwise
            the exact numbers, in float32.
        """
        rows, columns = (
            range(size)[part] for size, part in zip(self.layer.shape, index, strict=True)
        )
        coded = self.layer.read(slice(rows.start, rows.stop))
        if self.layer.format is None:
            return coded.numbers()[:, index[1]]
        blocks = coded.in_format(self.layer.format)
        return kernels.take_columns(blocks, columns.start, columns.stop)

    def get_dtype(self) -> str:
        """Returns the name of the layer's format, or safetensors' name of its numbers' type."""
        return "F32" if self.layer.format is None else self.layer.format.name

    def get_shape(self) -> list[int]:
        """Returns the shape."""
        return list(self.layer.shape)


_LAYERS: Mapping[SchemeKind, Mapping[str, tuple[_MakeLayer, tuple[str, ...]]]] = MappingProxyType(
    {
        SchemeKind.GPTQ: {"qweight": (gptq_layer, ("I32",))},
        SchemeKind.AWQ: {"qweight": (awq_layer, ("I32",))},
        SchemeKind.COMPRESSED: {
            "weight_packed": (packed_layer, ("I32",)),
            "weight": (scaled_layer, ("I8", "F8_E4M3")),
        },
        SchemeKind.FP8: {"weight": (scaled_layer, ("F8_E4M3",))},
        SchemeKind.MXFP4: {},
    }
)
"""By kind, the tensor by which a quantized layer is known, with its types."""
