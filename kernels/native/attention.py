"""The native CPU kernels around attention: rotation and KV writes, paged attention.

The library trusts the shapes of the tensors whose addresses it gets: they are asserted here.
"""

from weakref import WeakKeyDictionary

import numpy as np
import torch

from kernels import reference
from kernels.dispatch import NATIVE
from kernels.layer_kinds import NormKind
from kernels.library import commands
from kernels.native.ops import is_vector, rows_of, run_command
from kernels.native.packed_weight import ELEMENT_TYPES
from kernels.paged_kv import AttentionMetadata, QkNorms, Rotation

__all__ = [
    "pack_batch",
    "paged_attention",
    "point_to",
    "rotate_and_write_kv",
    "rotate_and_write_latent",
]


@NATIVE.implements(reference.rotate_and_write_kv)
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
    """Rotates the query in place."""
    if not _takes_heads(query):
        return reference.rotate_and_write_kv(
            query, key, value, kv_layer, meta, rotation=rotation, norms=norms, kv_scales=kv_scales
        )
    _check_heads((query, key, value), kv_layer, kv_scales, meta)
    _check_preparation(query, rotation, norms)
    assert key.shape == value.shape
    query, key, value = _heads(query), _heads(key), _heads(value)
    run_command(
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
        (norms.kind if norms else NormKind.ROUNDED).value,
        int(norms is not None and norms.norms_values),
        rotation.cos.data_ptr() if rotation else 0,
        rotation.sin.data_ptr() if rotation else 0,
        rotation.cos.shape[1] if rotation else 0,
        *_cache_fields(kv_layer, kv_scales),
        pack_batch(meta).ctypes.data,
        keep=(query, key, value),
    )
    return query


@NATIVE.implements(reference.rotate_and_write_latent)
def rotate_and_write_latent(
    query: torch.Tensor,
    latent: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    norm_weight: torch.Tensor,
    eps: float,
    rotation: Rotation,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates the query in place."""
    assert kv_layer.shape[1:3] == (1, 1)
    _check_heads((latent.unsqueeze(1),), kv_layer, kv_scales, meta)
    assert query.dtype == latent.dtype
    assert len(query) == len(latent)
    _check_rotation(query, rotation)
    assert is_vector(norm_weight, len(norm_weight), query.dtype)
    assert len(norm_weight) + 2 * rotation.cos.shape[1] == latent.shape[1]
    query, latent = _heads(query), rows_of(latent)
    kind, address, block, _, _, slot, block_size, scales, scale_block, _, _ = _cache_fields(
        kv_layer, kv_scales
    )
    run_command(
        commands.ROTATE_AND_WRITE_LATENT,
        ELEMENT_TYPES[query.dtype],
        query.data_ptr(),
        latent.data_ptr(),
        query.stride(0),
        latent.stride(0),
        *query.shape[1:],
        norm_weight.data_ptr(),
        len(norm_weight),
        eps,
        rotation.cos.data_ptr(),
        rotation.sin.data_ptr(),
        rotation.cos.shape[1],
        kind,
        address,
        block,
        slot,
        block_size,
        scales,
        scale_block,
        pack_batch(meta).ctypes.data,
        keep=(query, latent),
    )
    return query


@NATIVE.implements(reference.paged_attention)
def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> torch.Tensor:
    if not _takes_heads(query):
        return reference.paged_attention(
            query,
            kv_layer,
            meta,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            kv_scales=kv_scales,
            value_dim=value_dim,
        )
    _check_heads((query,), kv_layer, kv_scales, meta)
    assert sinks is None or is_vector(sinks, query.shape[1], query.dtype)
    query = _heads(query)
    if value_dim is None:
        value_dim = query.shape[2]
    else:
        assert kv_layer.shape[1] == 1
        assert value_dim <= query.shape[2]
    out = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype)
    run_command(
        commands.PAGED_ATTENTION,
        ELEMENT_TYPES[query.dtype],
        query.data_ptr(),
        query.stride(0),
        query.shape[1],
        kv_layer.shape[2],
        query.shape[2],
        value_dim,
        *_cache_fields(kv_layer, kv_scales),
        scale,
        soft_cap or 0.0,
        sliding_window or 0,
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        pack_batch(meta).ctypes.data,
        keep=(query, out),
    )
    return out


@NATIVE.implements(reference.point_to)
def point_to(recorded: AttentionMetadata, current: AttentionMetadata) -> None:
    pack_batch(recorded)[:] = _batch_fields(current)


def _check_heads(
    states: tuple[torch.Tensor, ...],
    kv_layer: torch.Tensor,
    kv_scales: torch.Tensor | None,
    meta: AttentionMetadata,
) -> None:
    """Asserts that `[num_tokens, heads, head_dim]` states fit the cache and the step."""
    for tensor in states:
        assert tensor.dtype == states[0].dtype
        assert tensor.shape[2] == kv_layer.shape[4]
        assert len(tensor) == len(meta.slot_mapping)
        assert kv_layer.shape[2] == 0 or tensor.shape[1] % kv_layer.shape[2] == 0
    if kv_scales is None:
        assert kv_layer.dtype == states[0].dtype
    else:
        assert kv_layer.dtype in _CACHE_TYPES
        assert kv_scales.shape == kv_layer.shape[:4]
        assert kv_scales.dtype == torch.float32


def _check_preparation(
    query: torch.Tensor, rotation: Rotation | None, norms: QkNorms | None
) -> None:
    """Asserts that angles and norms fit a query of `[num_tokens, num_heads, head_dim]`."""
    if rotation is not None:
        _check_rotation(query, rotation)
    if norms is not None:
        assert is_vector(norms.query_weight, query.shape[2], query.dtype)
        assert is_vector(norms.key_weight, query.shape[2], query.dtype)


def _check_rotation(query: torch.Tensor, rotation: Rotation) -> None:
    """Asserts that angles fit a query of `[num_tokens, num_heads, head_dim]`."""
    num_pairs = rotation.cos.shape[1]
    assert 2 * num_pairs <= query.shape[2]
    for angles in (rotation.cos, rotation.sin):
        assert angles.dtype == torch.float32
        assert angles.shape == (len(query), num_pairs)
        assert angles.is_contiguous()


def _takes_heads(states: torch.Tensor) -> bool:
    """Returns whether a head fills a whole number of the library's four-byte words."""
    return states.shape[2] * states.element_size() % 4 == 0


def _heads(states: torch.Tensor) -> torch.Tensor:
    """Returns `[tokens, heads, head_dim]`, copied if the heads of a token are not adjacent."""
    return states if states.stride()[1:] == (states.shape[2], 1) else states.contiguous()


# `CacheType` in src/commands.h, where 0 is the type of the states.
_CACHE_TYPES = {torch.float8_e4m3fn: 1, torch.int8: 2}


def _cache_fields(kv_layer: torch.Tensor, kv_scales: torch.Tensor | None) -> tuple[int, ...]:
    """Returns type, address, strides and block size of a cache as `paged_attention` takes it, and
    address and strides of the scales.
    """
    block, value, head, slot, element = kv_layer.stride()
    assert element == 1
    has_values = kv_layer.shape[1] == 2  # otherwise V is the first elements of K
    scale_fields = 0, 0, 0, 0
    if kv_scales is not None:
        scale_block, scale_value, scale_head, scale_slot = kv_scales.stride()
        assert scale_slot == 1
        scale_fields = kv_scales.data_ptr(), scale_block, scale_value * has_values, scale_head
    return (
        _CACHE_TYPES.get(kv_layer.dtype, 0),
        kv_layer.data_ptr(),
        block,
        value * has_values,
        head,
        slot,
        kv_layer.shape[3],
        *scale_fields,
    )


# The fields of `Batch` in src/commands.h, cached by the metadata that they were made from.
_batches: "WeakKeyDictionary[AttentionMetadata, np.ndarray]" = WeakKeyDictionary()


def pack_batch(meta: AttentionMetadata) -> np.ndarray:
    """Returns the fields of `Batch`, which keep their address as long as `meta` lives."""
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
    if meta.num_unkept is not None:
        assert is_vector(meta.num_unkept, len(meta.context_lens), torch.int32)
    return np.array(
        [
            meta.block_tables.data_ptr(),
            meta.block_tables.stride(0),
            meta.query_starts.data_ptr(),
            meta.context_lens.data_ptr(),
            meta.slot_mapping.data_ptr(),
            len(meta.context_lens),
            len(meta.slot_mapping),
            0 if meta.num_unkept is None else meta.num_unkept.data_ptr(),
        ],
        np.int64,
    )
