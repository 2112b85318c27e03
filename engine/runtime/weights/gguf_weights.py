"""Reads the weights of a GGUF file, under the names of a checkpoint, a few rows at a time.

Quantized weights are dequantized. Of a tensor the host holds the result, in the type that the
model computes in, and the rows under way; never the whole in another type.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import gguf
import numpy as np
import torch

from baton.common.model_files.gguf.config import config_json
from baton.common.model_files.gguf.header import GgufHeader, GgufTensor
from baton.common.model_files.gguf.rope import FREQUENCY_FACTORS

__all__ = ["GgufWeights"]

_PIECE_ELEMENTS = 2**18  # their float32 forms stay in the cache
# Names in GGUF files and in checkpoints, without `.weight` and `.bias`.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Files of this architecture have Q and K in the order of interleaved rotary embeddings.
_INTERLEAVED_ARCHITECTURE = "llama"
_INTERLEAVED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


class GgufWeights:
    """The tensors of a GGUF file, with the methods of safetensors' `safe_open`.

    Args:
        header: of the file.
        dtype: type of the tensors that `get_tensor` returns.

    Raises:
        ConfigurationError: a tensor has a type that cannot be dequantized, a shape that the type
            does not allow, or bytes outside of the file; names the tensor.
    """

    def __init__(self, header: GgufHeader, dtype: torch.dtype) -> None:
        self._header = header
        self._dtype = dtype
        config = config_json(header)
        self._head_dim: int = config["head_dim"]
        self._is_interleaved = config["model_type"] == _INTERLEAVED_ARCHITECTURE
        self._data = np.memmap(header.path, mode="r")
        self._names = {
            _checkpoint_name(name): name for name in header.tensors if name != FREQUENCY_FACTORS
        }
        for name in self._names.values():
            self._check(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._data

    def keys(self) -> list[str]:
        """Returns the tensors' names, as in a checkpoint."""
        return list(self._names)

    def get_slice(self, name: str) -> "_Description":
        """Returns the type and the shape of what `get_tensor` returns; an index reads a part."""
        return _Description(self._tensor(name).shape, partial(self._read_part, name))

    def get_tensor(self, name: str) -> torch.Tensor:
        """Reads and dequantizes a tensor."""
        return self._read_part(name, (slice(None),))

    def _read_part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Reads and dequantizes some rows, and returns the part of them that `index` names."""
        tensor = self._tensor(name)
        rows = self._rows(tensor)
        order = self._order_of_rows(name)
        selected = range(len(rows))[index[0]]
        columns = math.prod(tensor.shape[1:])
        result = torch.empty(len(selected), columns, dtype=self._dtype)
        step = max(1, _PIECE_ELEMENTS // columns)
        for start in range(0, len(selected), step):
            part = slice(selected.start + start, min(selected.start + start + step, selected.stop))
            piece = rows[part] if order is None else rows[order[part]]
            result[start : start + step] = _dequantize(piece, tensor.type_id).view(-1, columns)
        return result.view(len(selected), *tensor.shape[1:])[(slice(None), *index[1:])]

    def _tensor(self, name: str) -> GgufTensor:
        return self._header.tensors[self._names[name]]

    def _rows(self, tensor: GgufTensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Returns the stored bytes, `[rows, bytes per row]`; a vector has a row per element."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
        row_bytes = math.prod(tensor.shape[1:]) // block * block_bytes
        end = tensor.offset + tensor.shape[0] * row_bytes
        return self._data[tensor.offset : end].reshape(tensor.shape[0], row_bytes)

    def _order_of_rows(self, name: str) -> "np.ndarray[Any, np.dtype[np.int64]] | None":
        """Returns the file's row of each row of the tensor; None if they have the same order.

        Row 2i of a head in the file is row i of the head's first half; row 2i + 1 is row i of
        its second half.
        """
        if not self._is_in_order_of_pairs(self._names[name]):
            return None
        num_rows = self._tensor(name).shape[0]
        pairs = np.arange(num_rows).reshape(-1, self._head_dim // 2, 2)
        return pairs.swapaxes(1, 2).reshape(num_rows)

    def _check(self, name: str) -> None:
        tensor = self._header.tensors[name]
        block, block_bytes = self._check_type(name, tensor.type_id)
        shape, columns = list(tensor.shape), math.prod(tensor.shape[1:])
        if 0 in shape or columns % block:
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
        return self._is_interleaved and _INTERLEAVED.fullmatch(name) is not None


def _dequantize(rows: "np.ndarray[Any, np.dtype[np.uint8]]", type_id: int) -> torch.Tensor:
    """Returns the numbers in whole rows as one vector."""
    # `gguf` dequantizes 16 rows at once; one long row is faster than many short ones.
    numbers = gguf.dequantize(rows.reshape(1, -1), gguf.GGMLQuantizationType(type_id))
    return torch.from_numpy(np.require(numbers, requirements="W")).flatten()


def _checkpoint_name(name: str) -> str:
    """Returns a tensor's name in a checkpoint; unknown names stay as they are."""
    stem, _, suffix = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    if layer is not None and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}" if stem in _NAMES else name


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
