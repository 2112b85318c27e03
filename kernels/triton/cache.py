"""Writes to the KV cache, in Triton: one kernel from projections to attention."""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.layer_kinds import NormKind
from kernels.paged_kv import AttentionMetadata, QkNorms, Rotation
from kernels.triton.launch import launch_table
from kernels.triton.pointwise import times_weight

__all__ = [
    "largest_of",
    "load_parts",
    "narrow_elements",
    "rotate_and_write_kv",
    "rounded",
    "scale_of",
    "store_parts",
    "turn",
    "with_float_bits",
]

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_BITS_OF_16384 = tl.constexpr(0x46800000)  # as float32
_BITS_OF_448 = tl.constexpr(0x7E)  # as float8_e4m3fn
_SHIFTER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer


@TRITON.implements(reference.rotate_and_write_kv)
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
    """Rotates a query with dense heads in place."""
    query, key, value = (_with_dense_heads(states) for states in (query, key, value))
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    assert key.shape == value.shape == (num_tokens, num_kv_heads, head_dim)
    # A head is loaded in two parts; rotation pairs elements of both.
    num_first = (head_dim + 1) // 2 if rotation is None else rotation.cos.shape[1]
    if rotation is not None:
        assert rotation.cos.shape == rotation.sin.shape == (num_tokens, num_first)
        assert 2 * num_first <= head_dim
    launch = launch_table(query.device).rotate_and_write_kv.for_size(head_dim)
    part_block = triton.next_power_of_2(max(num_first, head_dim - num_first))
    heads_block = max(1, launch.block_size // (2 * part_block))
    is_query_changed = rotation is not None or norms is not None
    num_query_parts = triton.cdiv(num_heads, heads_block) if is_query_changed else 0
    num_parts = num_query_parts + triton.cdiv(num_kv_heads, heads_block)
    cache = with_float_bits(kv_layer)
    _rotate_and_write_kv_kernel[(num_tokens, num_parts)](
        query,
        key,
        value,
        cache,
        kv_scales,
        meta.slot_mapping,
        rotation.cos.contiguous() if rotation else None,
        rotation.sin.contiguous() if rotation else None,
        norms.query_weight.contiguous() if norms else None,
        norms.key_weight.contiguous() if norms else None,
        norms.eps if norms else 0.0,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.stride(),
        *(kv_scales.stride() if kv_scales is not None else (0, 0, 0, 0)),
        num_heads,
        num_kv_heads,
        head_dim,
        num_first,
        kv_layer.shape[3],
        num_query_parts,
        NORM_KIND=(norms.kind if norms else NormKind.ROUNDED).value,
        NORMS_VALUES=norms is not None and norms.norms_values,
        HEADS=heads_block,
        PART=part_block,
        num_warps=launch.num_warps,
    )
    return query


# These addresses change from step to step, which must not cause another compilation.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _rotate_and_write_kv_kernel(
    query,
    key,
    value,
    cache,
    scales,
    slot_mapping,
    cos,
    sin,
    query_weight,
    key_weight,
    eps,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cache_block_stride,
    cache_kv_stride,
    cache_head_stride,
    cache_slot_stride,
    cache_dim_stride,
    scale_block_stride,
    scale_kv_stride,
    scale_head_stride,
    scale_slot_stride,
    num_heads,
    num_kv_heads,
    head_dim,
    num_first,
    block_size,
    num_query_parts,
    NORM_KIND: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
):
    """`query = turn(norm(query))`, `cache[slot] = turn(norm(key)), value`.

    Program (i, j) processes token i: for j < num_query_parts the j-th `HEADS` heads of its query,
    otherwise `HEADS` heads of its key and value. It normalizes if there are weights, rotates if
    there are cosines, and writes 8-bit elements if there are scales.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part < num_query_parts:
        heads = (part * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        starts = query + token * query_token_stride + heads * query_head_stride
        is_head = heads < num_heads
        first, second = load_parts(starts, is_head, head_dim, num_first, PART)
        first, second = _norm(
            first, second, query_weight, eps, query, head_dim, num_first, NORM_KIND, PART
        )
        first, second = turn(first, second, cos, sin, token, num_first, PART)
        store_parts(first, second, starts, 1, is_head, head_dim, num_first, PART)
    else:
        heads = ((part - num_query_parts) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        starts = key + token * key_token_stride + heads * key_head_stride
        is_head = heads < num_kv_heads
        first, second = load_parts(starts, is_head, head_dim, num_first, PART)
        first, second = _norm(
            first, second, key_weight, eps, key, head_dim, num_first, NORM_KIND, PART
        )
        first, second = turn(first, second, cos, sin, token, num_first, PART)

        slot = tl.load(slot_mapping + token)
        block, offset = slot // block_size, slot % block_size
        place = block * cache_block_stride + offset * cache_slot_stride
        targets = cache + place + heads * cache_head_stride
        scale_place = block * scale_block_stride + offset * scale_slot_stride
        scale_offsets = scale_place + heads * scale_head_stride
        first, second = rounded(first, key), rounded(second, key)
        _store_scaled(
            first, second, targets, cache_dim_stride, scales, scale_offsets, is_head, head_dim,
            num_first, PART,
        )  # fmt: skip

        starts = value + token * value_token_stride + heads * value_head_stride
        first, second = load_parts(starts, is_head, head_dim, num_first, PART)
        if NORMS_VALUES:
            factors = _norm_factors(first, second, eps, head_dim)
            first, second = rounded(first * factors, value), rounded(second * factors, value)
        targets += cache_kv_stride
        scale_offsets += scale_kv_stride
        _store_scaled(
            first, second, targets, cache_dim_stride, scales, scale_offsets, is_head, head_dim,
            num_first, PART,
        )  # fmt: skip


@triton.jit
def load_parts(starts, is_head, head_dim, num_first, PART: tl.constexpr):
    """Loads heads that begin at `starts` in two parts, `[HEADS, PART]` float32 each.

    The first has `num_first` elements; rotation pairs them with the first of the second part.
    """
    columns = tl.arange(0, PART)
    places = starts[:, None] + columns[None, :]
    first_mask = is_head[:, None] & (columns < num_first)[None, :]
    second_mask = is_head[:, None] & (columns + num_first < head_dim)[None, :]
    first = tl.load(places, mask=first_mask, other=0.0)
    second = tl.load(places + num_first, mask=second_mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_parts(
    first, second, starts, dim_stride, is_head, head_dim, num_first, PART: tl.constexpr
):
    """Stores parts as `load_parts` reads them, in the element type of `starts`."""
    columns = tl.arange(0, PART)
    first_mask = is_head[:, None] & (columns < num_first)[None, :]
    second_mask = is_head[:, None] & (columns + num_first < head_dim)[None, :]
    places = starts[:, None] + columns[None, :] * dim_stride
    dtype = starts.dtype.element_ty
    tl.store(places, first.to(dtype), mask=first_mask)
    tl.store(places + num_first * dim_stride, second.to(dtype), mask=second_mask)


@triton.jit
def _norm(
    first,
    second,
    weight,
    eps,
    like,
    head_dim,
    num_first,
    NORM_KIND: tl.constexpr,
    PART: tl.constexpr,
):
    """Computes `states / sqrt(mean(states^2) + eps) * weight` by head, if there is a weight."""
    if weight is not None:
        columns = tl.arange(0, PART)
        factors = _norm_factors(first, second, eps, head_dim)
        first_weight = tl.load(weight + columns, mask=columns < num_first, other=0.0)
        second_mask = columns + num_first < head_dim
        second_weight = tl.load(weight + num_first + columns, mask=second_mask, other=0.0)
        first_weight = first_weight.to(tl.float32)[None, :]
        second_weight = second_weight.to(tl.float32)[None, :]
        first = times_weight(first * factors, first_weight, like, NORM_KIND)
        second = times_weight(second * factors, second_weight, like, NORM_KIND)
    return first, second


@triton.jit
def _norm_factors(first, second, eps, head_dim):
    """The factor of each head, `[HEADS, 1]`, that makes the mean of its squares 1."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    return tl.rsqrt(squares / head_dim + eps)[:, None]


@triton.jit
def turn(first, second, cos, sin, token, num_first, PART: tl.constexpr):
    """Rotates the pairs of each head by the token's angles, if there are cosines."""
    if cos is not None:
        columns = tl.arange(0, PART)
        place, mask = token * num_first + columns, columns < num_first
        cosines = tl.load(cos + place, mask=mask, other=0.0)[None, :]
        sines = tl.load(sin + place, mask=mask, other=0.0)[None, :]
        turned = first * cosines - second * sines
        second = tl.where(mask[None, :], second * cosines + first * sines, second)
        first = turned
    return first, second


@triton.jit
def _store_scaled(
    first,
    second,
    starts,
    dim_stride,
    scales,
    offsets,
    is_head,
    head_dim,
    num_first,
    PART: tl.constexpr,
):
    """Stores parts; if there are scales, as 8-bit elements and a factor per head, the same as
    `reference.cache.quantize_kv`.
    """
    if scales is None:
        store_parts(first, second, starts, dim_stride, is_head, head_dim, num_first, PART)
    else:
        dtype = starts.dtype.element_ty
        scale = scale_of(tl.maximum(largest_of(first), largest_of(second)), dtype)
        tl.store(scales + offsets, scale, mask=is_head)
        first = narrow_elements(first, scale, dtype)
        second = narrow_elements(second, scale, dtype)
        store_parts(first, second, starts, dim_stride, is_head, head_dim, num_first, PART)


@triton.jit
def largest_of(states):
    """Returns the largest magnitude of each head; infinity for NaN, which a reduction may skip."""
    magnitudes = tl.where(states == states, tl.abs(states), float("inf"))
    return tl.max(magnitudes, axis=1)


@triton.jit
def scale_of(largest, dtype: tl.constexpr):
    """Returns the factors of 8-bit vectors whose elements have these largest magnitudes.

    dtype: of the elements; uint8 for the bits of float8_e4m3fn.
    """
    limit: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, limit, tl.float32)), _TINY)
    return tl.where(scale < float("inf"), scale, float("nan"))


@triton.jit
def narrow_elements(states, scale, dtype: tl.constexpr):
    """Returns `states / scale` as 8-bit elements, rounded to nearest, ties to even; NaN becomes 0.

    dtype: as in `scale_of`.
    """
    quotients = tl.div_rn(states, tl.broadcast_to(scale[:, None], states.shape))
    quotients = tl.where(quotients == quotients, quotients, 0.0)
    if dtype == tl.int8:
        narrow = ((quotients + _SHIFTER) - _SHIFTER).to(tl.int8)
    else:
        narrow = _float8_bits(quotients)
    return narrow


@triton.jit
def _float8_bits(numbers):
    """Returns the bits of finite numbers as float8_e4m3fn.

    Not every GPU has an instruction for it, and the interpreter's conversion is not exact.
    """
    magnitudes = tl.abs(numbers)
    wide = magnitudes.to(tl.int32, bitcast=True)
    # 3 of 23 bits of the mantissa are kept, and the exponent's bias is 7 instead of 127: the
    # rounding addend carries into the last bit kept, and from there into the exponent.
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 numbers lie 2^-9 apart, as those of float32 from 2^14 on: adding rounds.
    subnormal = (magnitudes + 16384.0).to(tl.int32, bitcast=True) - _BITS_OF_16384
    bits = tl.minimum(tl.where(magnitudes < 0.015625, subnormal, normal), _BITS_OF_448)
    sign = (numbers.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (bits | sign).to(tl.uint8)


@triton.jit
def rounded(states, like):
    """`states` rounded to the type that `like` points to."""
    return states.to(like.dtype.element_ty).to(tl.float32)


def _with_dense_heads(states: torch.Tensor) -> torch.Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def with_float_bits(kv_layer: torch.Tensor) -> torch.Tensor:
    """Views 8-bit floats as bytes: kernels compute their bits themselves."""
    return kv_layer.view(torch.uint8) if kv_layer.dtype is torch.float8_e4m3fn else kv_layer
