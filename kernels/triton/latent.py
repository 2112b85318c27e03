"""Writes latent vectors to the KV cache, in Triton."""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.layer_kinds import NormKind
from kernels.paged_kv import AttentionMetadata, Rotation
from kernels.triton.cache import (
    largest_of,
    load_parts,
    narrow_elements,
    rounded,
    scale_of,
    store_parts,
    turn,
    with_float_bits,
)
from kernels.triton.launch import launch_table
from kernels.triton.pointwise import times_weight, with_dense_columns

__all__ = ["rotate_and_write_latent"]

_ROUNDED = tl.constexpr(NormKind.ROUNDED.value)


@TRITON.implements(reference.rotate_and_write_latent)
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
    """Rotates a query with dense heads in place."""
    query = query if query.stride(2) == 1 else query.contiguous()
    latent = with_dense_columns(latent)
    num_tokens, num_heads, query_dim = query.shape
    latent_dim, num_pairs = len(norm_weight), rotation.cos.shape[1]
    assert rotation.cos.shape == rotation.sin.shape == (num_tokens, num_pairs)
    assert 2 * num_pairs <= query_dim
    assert latent.shape == (num_tokens, latent_dim + 2 * num_pairs)
    assert kv_layer.shape[1:3] == (1, 1)
    assert kv_layer.shape[4] == latent.shape[1]
    part_block = triton.next_power_of_2(num_pairs)
    launch = launch_table(query.device).rotate_and_write_kv.for_size(2 * num_pairs)
    heads_block = max(1, launch.block_size // (2 * part_block))
    num_query_parts = triton.cdiv(num_heads, heads_block)
    cache = with_float_bits(kv_layer)
    block_stride, _, _, slot_stride, dim_stride = cache.stride()
    scale_strides = (0, 0) if kv_scales is None else (kv_scales.stride(0), kv_scales.stride(3))
    _rotate_and_write_latent_kernel[(num_tokens, num_query_parts + 1)](
        query,
        latent,
        cache,
        kv_scales,
        meta.slot_mapping,
        rotation.cos.contiguous(),
        rotation.sin.contiguous(),
        norm_weight,
        eps,
        *query.stride()[:2],
        latent.stride(0),
        block_stride,
        slot_stride,
        dim_stride,
        *scale_strides,
        num_heads,
        query_dim,
        latent_dim,
        num_pairs,
        kv_layer.shape[3],
        HEADS=heads_block,
        PART=part_block,
        LATENT=triton.next_power_of_2(latent_dim),
        num_warps=launch.num_warps,
    )
    return query


# This address changes from step to step, which must not cause another compilation.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _rotate_and_write_latent_kernel(
    query,
    latent,
    cache,
    scales,
    slot_mapping,
    cos,
    sin,
    norm_weight,
    eps,
    query_token_stride,
    query_head_stride,
    latent_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_dim_stride,
    scale_block_stride,
    scale_slot_stride,
    num_heads,
    query_dim,
    latent_dim,
    num_pairs,
    block_size,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    LATENT: tl.constexpr,
):
    """`query = turn(end of query)`, `cache[slot] = norm(latent), turn(end of latent)`.

    Program (i, 0) writes the vector of token i, as 8-bit elements if there are scales; program
    (i, j) rotates the j-th `HEADS` heads of its query.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part > 0:
        heads = ((part - 1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        is_head = heads < num_heads
        starts = query + token * query_token_stride + heads * query_head_stride
        starts += query_dim - 2 * num_pairs
        first, second = load_parts(starts, is_head, 2 * num_pairs, num_pairs, PART)
        first, second = turn(first, second, cos, sin, token, num_pairs, PART)
        store_parts(first, second, starts, 1, is_head, 2 * num_pairs, num_pairs, PART)
    else:
        columns = tl.arange(0, LATENT)[None, :]
        mask = columns < latent_dim
        start = latent + token * latent_stride
        states = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(states * states, axis=1) / latent_dim + eps)[:, None]
        weight = tl.load(norm_weight + columns, mask=mask, other=0.0).to(tl.float32)
        states = rounded(times_weight(states * factor, weight, latent, _ROUNDED), latent)

        only = tl.arange(0, 1)  # the key's rotated part is one head
        first_key, second_key = load_parts(
            start + latent_dim + only, only == 0, 2 * num_pairs, num_pairs, PART
        )
        first_key, second_key = turn(first_key, second_key, cos, sin, token, num_pairs, PART)
        first_key, second_key = rounded(first_key, latent), rounded(second_key, latent)

        slot = tl.load(slot_mapping + token)
        block, offset = slot // block_size, slot % block_size
        place = cache + block * cache_block_stride + offset * cache_slot_stride
        if scales is not None:
            scale_place = block * scale_block_stride + offset * scale_slot_stride
            largest = tl.maximum(largest_of(first_key), largest_of(second_key))
            scale = scale_of(tl.maximum(largest, largest_of(states)), cache.dtype.element_ty)
            tl.store(scales + scale_place + only, scale)
            states = narrow_elements(states, scale, cache.dtype.element_ty)
            first_key = narrow_elements(first_key, scale, cache.dtype.element_ty)
            second_key = narrow_elements(second_key, scale, cache.dtype.element_ty)
        dtype = cache.dtype.element_ty
        tl.store(place + columns * cache_dim_stride, states.to(dtype), mask=mask)
        targets = place + latent_dim * cache_dim_stride + only
        store_parts(
            first_key,
            second_key,
            targets,
            cache_dim_stride,
            only == 0,
            2 * num_pairs,
            num_pairs,
            PART,
        )
