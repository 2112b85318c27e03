"""Writes to the KV cache, in plain torch."""

from collections.abc import Sequence

import torch

from kernels.dispatch import kernel
from kernels.paged_kv import AttentionMetadata, QkNorms, Rotation
from kernels.reference.pointwise import apply_rotary, rms_norm

__all__ = ["quantize_kv", "rotate_and_write_kv", "rotate_and_write_latent", "write_kv"]

# The largest elements of the types whose vectors have factors.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@kernel("query.device", "query.dtype")
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
    """Normalizes and rotates Q and K, and writes K and V to their slots in the cache.

    The cache may have no heads, as K and V then do: only Q is prepared.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; its memory may be reused for the result.
        key: `[num_tokens, num_kv_heads, head_dim]`; its contents are undefined afterwards.
        value: `[num_tokens, num_kv_heads, head_dim]`; may be `key`.
        kv_layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, any strides, of the
            type of `query`, or float8_e4m3fn or int8 with `kv_scales`.
        meta: its `slot_mapping` holds the slots that K and V are written to.
        rotation: None for models without rotary positions.
        norms: None for models without norms of heads.
        kv_scales: `[num_blocks, 2, num_kv_heads, block_size]` float32, any strides; receives
            the factors of the written vectors, see `quantize_kv`.

    Returns:
        The query that attends, `[num_tokens, num_heads, head_dim]`.
    """
    if norms is not None:
        query = rms_norm(query, norms.query_weight, norms.eps, kind=norms.kind)
        key = rms_norm(key, norms.key_weight, norms.eps, kind=norms.kind)
        if norms.norms_values:
            value = _normalized(value, norms.eps)
    if rotation is not None:
        cos, sin = rotation.cos.to(query.dtype), rotation.sin.to(query.dtype)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
    write_kv((key, value), kv_layer, meta.slot_mapping, kv_scales)
    return query


@kernel("query.device", "query.dtype")
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
    """Rotates Q, and writes latent vectors to their slots in the cache (arXiv:2405.04434).

    A latent vector begins with what K and V of all heads are computed from, which a
    root-mean-square norm of the kind `NormKind.ROUNDED` normalizes, and ends with a rotated part
    of the key that all heads share. `paged_attention` reads it as key and value of queries that
    `head_linear` has brought into its space.

    Args:
        query: `[num_tokens, num_heads, query_dim]`; its memory may be reused for the result.
        latent: `[num_tokens, head_dim]`, a latent vector before norm and rotation; its contents
            are undefined afterwards.
        kv_layer: `[num_blocks, 1, 1, block_size, head_dim]`, any strides, of the type of
            `query`, or float8_e4m3fn or int8 with `kv_scales`.
        meta: its `slot_mapping` holds the slots that the vectors are written to.
        norm_weight: `[latent_dim]`; the norm is that of the first elements.
        eps: added to the mean of squares.
        rotation: of the last `rotary_dim = head_dim - latent_dim` elements of each head of `query`
            and of the latent vectors.
        kv_scales: `[num_blocks, 1, 1, block_size]` float32, any strides; see `quantize_kv`.

    Returns:
        The query with its rotated parts, `[num_tokens, num_heads, query_dim]`.
    """
    cos, sin = rotation.cos.to(query.dtype), rotation.sin.to(query.dtype)
    rotary_dim = 2 * cos.shape[1]
    plain, rotary = torch.split(query, [query.shape[2] - rotary_dim, rotary_dim], dim=2)
    query = torch.cat((plain, apply_rotary(rotary, cos, sin)), dim=2)
    latent = latent.unsqueeze(1)
    unnormed, rotary = torch.split(latent, [len(norm_weight), rotary_dim], dim=2)
    parts = rms_norm(unnormed, norm_weight, eps), apply_rotary(rotary, cos, sin)
    write_kv((torch.cat(parts, dim=2),), kv_layer, meta.slot_mapping, kv_scales)
    return query


def _normalized(states: torch.Tensor, eps: float) -> torch.Tensor:
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(states.dtype)


def write_kv(
    parts: Sequence[torch.Tensor],
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Writes each token's K and V, or its latent vector, into its slot of one layer's cache.

    Args:
        parts: each `[num_tokens, num_kv_heads, head_dim]`.
        kv_layer: `[num_blocks, num_parts, num_kv_heads, block_size, head_dim]`, any strides, of
            the type of `parts`, or float8_e4m3fn or int8 with `kv_scales`.
        slot_mapping: `[num_tokens]` int64, `block_id * block_size + offset`, all different.
        kv_scales: `[num_blocks, num_parts, num_kv_heads, block_size]` float32, any strides;
            receives the factors of the written vectors, see `quantize_kv`.
    """
    block_size = kv_layer.shape[3]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    for index, states in enumerate(parts):
        if kv_scales is None:
            kv_layer[block_ids, index, :, offsets] = states
            continue
        narrow, scales = quantize_kv(states, kv_layer.dtype)
        # Viewed as bytes, since not every operation supports float8.
        kv_layer.view(torch.uint8)[block_ids, index, :, offsets] = narrow.view(torch.uint8)
        kv_scales[block_ids, index, :, offsets] = scales


def quantize_kv(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts K or V to 8-bit elements with a factor per vector: `states = narrow * scale`.

    Each token and head has its own factor, so the stored bits depend on the token alone, not on
    its block or on how the prompt was divided into chunks.

    Args:
        states: `[..., head_dim]`.
        dtype: float8_e4m3fn or int8.

    Returns:
        `narrow`, of type `dtype`, shaped as `states`; and `scale`, `[...]` float32, above 0 for
        finite vectors. Vectors with NaN or infinity become zeros with a factor of NaN.
    """
    wide = states.float()
    scales = wide.abs().amax(-1) / _LARGEST[dtype]
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    scales = scales.where(scales.isfinite(), torch.nan)
    narrow = (wide / scales.unsqueeze(-1)).nan_to_num_(nan=0.0)
    if not dtype.is_floating_point:
        narrow.round_()
    return narrow.to(dtype), scales
