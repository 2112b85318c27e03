"""The native CPU kernels under the names and signatures of `kernels.reference`.

For float32 and bfloat16 tensors of the CPU. What the library does not speed up, or cannot take
(odd head widths in bfloat16, 8-bit caches, capped scores), goes to the reference.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kernels import reference
from kernels.attention_metadata import AttentionMetadata
from kernels.native import commands
from kernels.native.argument_checks import check_heads, check_preparation, is_vector
from kernels.native.commands import CommandType, NativeKernels
from kernels.native.packed_weight import ELEMENT_TYPES, PackedWeight, make_packed_weight
from kernels.native.recording import note_command, note_mark, record_commands
from kernels.recorded_step import Arena, RecordedStep
from kernels.reference import (
    copy_blocks,
    draw_tokens,
    gather_blocks,
    keep_drawn,
    lay_out_decode,
    scatter_blocks,
    swap_blocks,
    token_logprobs,
    write_table_entries,
)
from kernels.rotary import QkNorms, Rotation
from kernels.weights import Weight, WeightUse

__all__ = [
    "copy_blocks",
    "draw_tokens",
    "embed",
    "gather_blocks",
    "keep_drawn",
    "lay_out_decode",
    "linear",
    "linear_silu_and_mul",
    "make_weight",
    "mark_step",
    "paged_attention",
    "point_to",
    "record_step",
    "rms_norm",
    "rotary_angles",
    "rotate_and_write_kv",
    "row_maxima",
    "scatter_blocks",
    "swap_blocks",
    "take_rows",
    "token_logprobs",
    "write_table_entries",
]

_NO_ACTIVATION, _SILU_AND_MUL = 0, 1


def make_weight(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    use: WeightUse,
) -> Weight:
    """See `kernels.make_weight`."""
    if use is WeightUse.LOOKUP:
        return reference.make_weight(num_rows, num_columns, dtype, device, use)
    return make_packed_weight(_library(), num_rows, num_columns, dtype, use)


def embed(token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """See `reference.embed`. That every id is a row of the weight is the caller's duty."""
    out = torch.empty((len(token_ids), weight.num_columns), dtype=weight.data.dtype)
    _take_rows(weight.data, token_ids, out, is_packed=isinstance(weight, PackedWeight))
    return out


def take_rows(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """See `reference.take_rows`. That every row is one of the matrix is the caller's duty."""
    matrix = _rows(matrix)
    out = torch.empty((len(rows), matrix.shape[1]), dtype=matrix.dtype)
    _take_rows(matrix, rows, out, is_packed=False)
    return out


def linear(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `reference.linear`."""
    return _linear(hidden, weight, bias, residual, _NO_ACTIVATION, out_dtype or hidden.dtype)


def linear_silu_and_mul(
    hidden: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See `reference.linear_silu_and_mul`."""
    return _linear(hidden, weight, bias, None, _SILU_AND_MUL, hidden.dtype)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`."""
    assert is_vector(weight, hidden.shape[-1], hidden.dtype)
    rows = _rows(hidden.flatten(0, -2))
    out = torch.empty(hidden.shape, dtype=hidden.dtype)
    _run(
        commands.RMS_NORM,
        ELEMENT_TYPES[hidden.dtype],
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        keep=(rows, out),
    )
    return out


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float) -> Rotation:
    """See `reference.rotary_angles`."""
    assert positions.dtype == torch.int64
    assert is_vector(frequencies, len(frequencies), torch.float32)
    positions = positions.contiguous()
    cos, sin = torch.empty((2, len(positions), len(frequencies))).unbind()
    _run(
        commands.ROTARY_ANGLES,
        positions.data_ptr(),
        len(positions),
        frequencies.data_ptr(),
        len(frequencies),
        amplitude,
        cos.data_ptr(),
        sin.data_ptr(),
        keep=(cos, sin),
    )
    return Rotation(cos, sin)


def rotate_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    rotation: Rotation | None = None,
    norms: QkNorms | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.rotate_and_write_kv`; here the query is turned where it is."""
    if not _takes_heads(query) or kv_scales is not None:
        return reference.rotate_and_write_kv(
            query, key, value, kv_layer, meta, rotation=rotation, norms=norms, kv_scales=kv_scales
        )
    check_heads((query, key, value), kv_layer, meta)
    check_preparation(query, rotation, norms)
    assert key.shape == value.shape
    query, key, value = _heads(query), _heads(key), _heads(value)
    _run(
        commands.ROTATE_AND_WRITE_KV,
        ELEMENT_TYPES[query.dtype],
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        query.stride(0),
        key.stride(0),
        value.stride(0),
        query.shape[1],
        *key.shape[1:],
        norms.query_weight.data_ptr() if norms else 0,
        norms.key_weight.data_ptr() if norms else 0,
        norms.eps if norms else 0.0,
        rotation.cos.data_ptr() if rotation else 0,
        rotation.sin.data_ptr() if rotation else 0,
        *_cache_fields(kv_layer),
        _batch_of(meta).ctypes.data,
        keep=(query, key, value),
    )
    return query


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.paged_attention`."""
    if not _takes_heads(query) or soft_cap is not None or kv_scales is not None:
        return reference.paged_attention(
            query,
            kv_layer,
            meta,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            kv_scales=kv_scales,
        )
    check_heads((query,), kv_layer, meta)
    query = _heads(query)
    out = torch.empty(query.shape, dtype=query.dtype)
    _run(
        commands.PAGED_ATTENTION,
        ELEMENT_TYPES[query.dtype],
        query.data_ptr(),
        query.stride(0),
        query.shape[1],
        kv_layer.shape[2],
        query.shape[2],
        *_cache_fields(kv_layer),
        scale,
        sliding_window or 0,
        out.data_ptr(),
        _batch_of(meta).ctypes.data,
        keep=(query, out),
    )
    return out


def row_maxima(
    logits: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.row_maxima`."""
    assert logits.dtype == torch.float32
    rows = _rows(logits)
    if out is None:
        maxima = torch.empty(len(rows))
        indices = torch.empty(len(rows), dtype=torch.int64)
        keep: tuple[torch.Tensor, ...] = (rows, maxima, indices)
    else:
        maxima, indices = out
        assert is_vector(maxima, len(rows), torch.float32)
        assert is_vector(indices, len(rows), torch.int64)
        keep = (rows,)  # what is given stays where it is
    _run(
        commands.ARGMAX,
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        maxima.data_ptr(),
        indices.data_ptr(),
        keep=keep,
    )
    return maxima, indices


def record_step(
    device: torch.device, arena: Arena, run: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, RecordedStep | None]:
    """See `reference.record_step`."""
    return record_commands(_library(), arena, run)


def mark_step(device: torch.device, number: int) -> None:
    """See `reference.mark_step`."""
    note_mark(number)


def _linear(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    assert isinstance(weight, PackedWeight)
    rows = _rows(hidden)
    assert rows.dtype == weight.data.dtype
    assert rows.shape[1] == weight.num_columns
    assert out_dtype in (torch.float32, rows.dtype)
    assert bias is None or is_vector(bias, weight.num_rows, rows.dtype)
    out_features = weight.num_rows // 2 if activation else weight.num_rows
    if residual is not None:
        assert residual.dtype == rows.dtype
        assert residual.shape == (len(rows), out_features)
        residual = _rows(residual)
    out = torch.empty((len(rows), out_features), dtype=out_dtype)
    _run(
        commands.LINEAR,
        ELEMENT_TYPES[rows.dtype],
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        weight.data.data_ptr(),
        out_features,
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        activation,
        out.data_ptr(),
        out_features,
        out_dtype == torch.float32,
        keep=(rows, out),
    )
    return out


def _take_rows(
    matrix: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, *, is_packed: bool
) -> None:
    rows = rows.contiguous()
    assert rows.dtype == torch.int64
    assert rows.dim() == 1
    _run(
        commands.TAKE_ROWS,
        ELEMENT_TYPES[matrix.dtype],
        matrix.data_ptr(),
        is_packed,
        matrix.stride(0),
        out.shape[1],
        rows.data_ptr(),
        len(rows),
        out.data_ptr(),
        keep=(matrix, out),
    )


def _run(kind: CommandType, *fields: float, keep: tuple[torch.Tensor, ...]) -> None:
    """Runs a command, or notes it if this thread records.

    Args:
        kind: of command.
        fields: of `kind`.
        keep: the tensors of the step that the command reads or writes.
    """
    packed = kind.pack(*fields)
    if not note_command(kind, packed, keep):
        _library().run(packed)


def _library() -> NativeKernels:
    found = commands.library()
    if found is None:
        raise RuntimeError("no native library is loaded")
    return found


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    """`[rows, columns]` with neighbouring columns side by side."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _takes_heads(states: torch.Tensor) -> bool:
    """Whether a head is a whole number of the library's four-byte words."""
    return states.shape[2] * states.element_size() % 4 == 0


def _heads(states: torch.Tensor) -> torch.Tensor:
    """`[tokens, heads, head_dim]` with the heads of a token side by side."""
    return states if states.stride()[1:] == (states.shape[2], 1) else states.contiguous()


def _cache_fields(kv_layer: torch.Tensor) -> tuple[int, ...]:
    """Address, strides and block size of `[num_blocks, 2, num_kv_heads, block_size, head_dim]`."""
    block, value, head, slot, element = kv_layer.stride()
    assert element == 1
    return kv_layer.data_ptr(), block, value, head, slot, kv_layer.shape[3]


# The fields of src/commands.h `Batch`, by what they were made from.
_batches: "WeakKeyDictionary[AttentionMetadata, np.ndarray]" = WeakKeyDictionary()


def _batch_of(meta: AttentionMetadata) -> np.ndarray:
    batch = _batches.get(meta)
    if batch is None:
        batch = _batches[meta] = _batch_fields(meta)
    return batch


def _batch_fields(meta: AttentionMetadata) -> np.ndarray:
    for tensor in (meta.block_tables[:1], meta.query_starts, meta.context_lens):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.int32
    assert meta.slot_mapping.is_contiguous()
    assert meta.slot_mapping.dtype == torch.int64
    assert len(meta.block_tables) == len(meta.context_lens) == len(meta.query_starts) - 1
    return np.array(
        [
            meta.block_tables.data_ptr(),
            meta.block_tables.stride(0),
            meta.query_starts.data_ptr(),
            meta.context_lens.data_ptr(),
            meta.slot_mapping.data_ptr(),
            len(meta.context_lens),
            len(meta.slot_mapping),
        ],
        np.int64,
    )


def point_to(recorded: AttentionMetadata, current: AttentionMetadata) -> None:
    """See `reference.point_to`."""
    _batch_of(recorded)[:] = _batch_fields(current)
