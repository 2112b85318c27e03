"""Recurrent layers in Triton: kernels that carry a state from token to token."""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.paged_kv import DeltaGates, LayerState
from kernels.triton.launch import launch_table
from kernels.triton.pointwise import with_dense_columns

__all__ = ["conv_silu", "gated_delta", "short_conv"]

_TILE_TOKENS = 16
_DELTA_COLUMNS, _DELTA_WARPS = 32, 4  # of a program's part of a head's state


@TRITON.implements(reference.short_conv)
def short_conv(
    gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: LayerState
) -> torch.Tensor:
    if not _fits(weight, state):
        return reference.short_conv(gates, weight, bias, state)
    return _convolve(gates, weight, bias, state, 0, is_gated=True)


@TRITON.implements(reference.conv_silu)
def conv_silu(
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: LayerState,
    part: int = 0,
) -> torch.Tensor:
    if not _fits(weight, state):
        return reference.conv_silu(values, weight, bias, state, part)
    return _convolve(values, weight, bias, state, part, is_gated=False)


def _fits(weight: torch.Tensor, state: LayerState) -> bool:
    """Whether storing a first block's end cannot overwrite what the second block's needs."""
    return state.block_size >= len(weight) - 2


def _convolve(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: LayerState,
    part: int,
    *,
    is_gated: bool,
) -> torch.Tensor:
    """Convolves; `inputs` are the arguments of `short_conv` or `conv_silu`."""
    (width, channels), states, meta = weight.shape, state.parts[part], state.meta
    inputs = with_dense_columns(inputs)
    out = torch.empty((len(inputs), channels), dtype=inputs.dtype, device=inputs.device)
    launch = launch_table(inputs.device).pointwise.for_size(channels)
    tile_tokens = 1 if meta.max_query_len == 1 else _TILE_TOKENS
    num_tiles = triton.cdiv(meta.max_query_len, tile_tokens)
    tile_channels = min(launch.block_size // tile_tokens, triton.next_power_of_2(channels))
    num_seqs, num_ranges = len(meta.context_lens), triton.cdiv(channels, tile_channels)

    def run(num_programs: int, *, computes: bool, stores: bool) -> None:
        _short_conv_kernel[(num_seqs, num_ranges, num_programs)](
            inputs,
            inputs.stride(0),
            weight.contiguous(),
            bias,
            states,
            states.stride(0),
            states.stride(1),
            states.shape[2] * states.shape[3] // (width - 1),
            meta.block_tables,
            meta.block_tables.stride(0),
            meta.query_starts,
            meta.context_lens,
            meta.num_unkept,
            out,
            channels,
            state.block_size,
            WIDTH=width,
            IS_GATED=is_gated,
            TOKENS=tile_tokens,
            CHANNELS=tile_channels,
            COMPUTES=computes,
            STORES=stores,
            num_warps=launch.num_warps,
        )

    if num_tiles == 1:
        run(1, computes=True, stores=True)
    else:  # all tiles read the old state before the new one is stored
        run(num_tiles, computes=True, stores=False)
        run(1, computes=False, stores=True)
    return out


@triton.jit
def _short_conv_kernel(
    inputs,
    input_stride,
    weight,
    bias,
    states,
    slot_stride,
    slice_stride,
    channels_per_slice,
    block_tables,
    table_stride,
    query_starts,
    context_lens,
    num_unkept,
    out,
    channels,
    block_size,
    WIDTH: tl.constexpr,
    IS_GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COMPUTES: tl.constexpr,
    STORES: tl.constexpr,
):
    """See `reference.short_conv`, and without gates `reference.conv_silu`.

    Program (i, j, k) computes tile k of sequence i's tokens, and channel block j.
    """
    sequence = tl.program_id(0)
    first_row = tl.load(query_starts + sequence).to(tl.int64)
    num_tokens = tl.load(query_starts + sequence + 1) - first_row
    end = tl.load(context_lens + sequence)
    start = end - num_tokens
    table = block_tables + sequence.to(tl.int64) * table_stride
    source = tl.load(table + (start - 1) // block_size, mask=start > 0, other=0).to(tl.int64)

    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_range = channel < channels
    columns = inputs + first_row * input_stride + channel
    place = (channel // channels_per_slice).to(tl.int64) * slice_stride
    place += channel % channels_per_slice * (WIDTH - 1)
    # Element `WIDTH - 1 + i` of a state is the value i tokens after the sequence's first one.
    past = states + source * slot_stride + place + (WIDTH - 1)
    has_past = channel < tl.where(start > 0, channels, 0)

    if COMPUTES:
        token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for tap in tl.static_range(WIDTH):
            index = (token - (WIDTH - 1) + tap)[:, None]
            value = _value(
                columns[None, :],
                input_stride,
                past[None, :],
                index,
                (index < num_tokens) & in_range[None, :],
                (index < num_tokens) & has_past[None, :],
                channels,
                IS_GATED,
            )
            factor = tl.load(weight + tap * channels + channel, mask=in_range, other=0.0)
            total += value * factor.to(tl.float32)[None, :]
        if bias is not None:
            total += tl.load(bias + channel, mask=in_range, other=0.0).to(tl.float32)[None, :]
        mask = (token < num_tokens)[:, None] & in_range[None, :]
        total = total.to(out.dtype.element_ty).to(tl.float32)
        if IS_GATED:
            rows = columns[None, :] + token[:, None].to(tl.int64) * input_stride
            total *= tl.load(rows + channels, mask=mask, other=0.0).to(tl.float32)
        else:
            total *= tl.sigmoid(total)
        place_out = (first_row + token[:, None]) * channels + channel[None, :]
        tl.store(out + place_out, total.to(out.dtype.element_ty), mask=mask)

    if STORES:
        kept_end = end
        if num_unkept is not None:
            kept_end -= tl.load(num_unkept + sequence)
        tap = tl.arange(0, _next_power_of_2(WIDTH - 1))
        is_tap = (tap < WIDTH - 1)[:, None]
        end_block = tl.where(num_tokens > 0, (kept_end - 1) // block_size + 1, 0)
        for block in range(start // block_size, end_block):
            slot = tl.load(table + block).to(tl.int64)
            if slot >= 0:
                stop = tl.minimum((block + 1) * block_size, kept_end) - start
                kept = _value(
                    columns[None, :],
                    input_stride,
                    past[None, :],
                    (stop - (WIDTH - 1) + tap)[:, None],
                    is_tap & in_range[None, :],
                    is_tap & has_past[None, :],
                    channels,
                    IS_GATED,
                )
                tl.debug_barrier()  # the slot may be the one that was read
                target = states + slot * slot_stride + place[None, :] + tap[:, None]
                tl.store(target, kept.to(states.dtype.element_ty), mask=is_tap & in_range[None, :])


@triton.jit
def _value(columns, stride, past, index, is_input, is_past, channels, IS_GATED: tl.constexpr):
    """Returns the convolution's input at tokens counted from the sequence's first one of the step:
    what is given, with gates the product of B and x; or what the state holds.
    """
    rows = columns + index.to(tl.int64) * stride
    mask = is_input & (index >= 0)
    first = tl.load(rows, mask=mask, other=0.0)
    value = first.to(tl.float32)
    if IS_GATED:
        value *= tl.load(rows + 2 * channels, mask=mask, other=0.0).to(tl.float32)
        value = value.to(first.dtype).to(tl.float32)
    old = tl.load(past + index, mask=is_past & (index < 0), other=0.0).to(tl.float32)
    return tl.where(index >= 0, value, old)


@triton.constexpr_function
def _next_power_of_2(number):
    return triton.next_power_of_2(number)


@TRITON.implements(reference.gated_delta)
def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: DeltaGates,
    state: LayerState,
) -> torch.Tensor:
    """Computes a sequence's tokens one after the other."""
    states, meta = state.parts[-1], state.meta
    (_, num_key_heads, key_dim), (_, num_heads, value_dim) = key.shape, value.shape
    query, key, value = (part.flatten(1) for part in (query, key, value))
    query, key, value, update, decay = map(
        with_dense_columns, (query, key, value, gates.update, gates.decay)
    )
    out = torch.empty((len(value), num_heads, value_dim), dtype=value.dtype, device=value.device)
    num_ranges = triton.cdiv(value_dim, _DELTA_COLUMNS)
    _gated_delta_kernel[(len(meta.context_lens), num_heads, num_ranges)](
        query,
        query.stride(0),
        key,
        key.stride(0),
        value,
        value.stride(0),
        update,
        update.stride(0),
        decay,
        decay.stride(0),
        gates.log_rates,
        gates.decay_bias,
        states,
        states.stride(0),
        states.stride(1),
        states.shape[2],
        meta.block_tables,
        meta.block_tables.stride(0),
        meta.query_starts,
        meta.context_lens,
        meta.num_unkept,
        out,
        num_heads // num_key_heads,
        key_dim,
        value_dim,
        key_dim**-0.5,
        state.block_size,
        ROWS=triton.next_power_of_2(key_dim),
        COLUMNS=_DELTA_COLUMNS,
        num_warps=_DELTA_WARPS,
    )
    return out


@triton.jit
def _gated_delta_kernel(
    query,
    query_stride,
    key,
    key_stride,
    value,
    value_stride,
    update,
    update_stride,
    decay,
    decay_stride,
    log_rates,
    decay_bias,
    states,
    slot_stride,
    slice_stride,
    heads_per_slice,
    block_tables,
    table_stride,
    query_starts,
    context_lens,
    num_unkept,
    out,
    heads_per_key,
    key_dim,
    value_dim,
    query_scale,
    block_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """See `reference.gated_delta`; program (i, j, k): sequence i, head j and columns k of its
    state.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(query_starts + sequence).to(tl.int64)
    num_tokens = (tl.load(query_starts + sequence + 1) - first_row).to(tl.int32)
    end = tl.load(context_lens + sequence)
    start = end - num_tokens
    kept_end = end
    if num_unkept is not None:
        kept_end -= tl.load(num_unkept + sequence)
    table = block_tables + sequence.to(tl.int64) * table_stride
    source = tl.load(table + (start - 1) // block_size, mask=start > 0, other=0).to(tl.int64)

    row = tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < key_dim, column < value_dim
    place = (head // heads_per_slice).to(tl.int64) * slice_stride
    place += head % heads_per_slice * key_dim * value_dim
    places = states + place + row[:, None] * value_dim + column[None, :]
    has_source = row < tl.where(start > 0, key_dim, 0)
    memory = tl.load(
        places + source * slot_stride, mask=has_source[:, None] & is_column[None, :], other=0.0
    )
    tl.debug_barrier()  # the slot may be stored into

    key_place = head // heads_per_key * key_dim
    rate = -tl.exp(tl.load(log_rates + head).to(tl.float32))
    bias = tl.load(decay_bias + head).to(tl.float32)
    for token in range(num_tokens):
        number = first_row + token
        k = _unit_head(key + number * key_stride + key_place + row, is_row)
        q = _unit_head(query + number * query_stride + key_place + row, is_row) * query_scale
        wide = value + number * value_stride + head * value_dim + column
        v = tl.load(wide, mask=is_column, other=0.0).to(tl.float32)
        share = tl.load(update + number * update_stride + head)
        share = tl.sigmoid(share.to(tl.float32)).to(out.dtype.element_ty).to(tl.float32)
        given = tl.load(decay + number * decay_stride + head).to(tl.float32)
        memory *= tl.exp(rate * _softplus(given + bias))
        predicted = tl.sum(memory * k[:, None], axis=0)
        change = (v - predicted) * share
        memory += k[:, None] * change[None, :]
        result = tl.sum(memory * q[:, None], axis=0).to(out.dtype.element_ty)
        to = out + (number * tl.num_programs(1) + head) * value_dim + column
        tl.store(to, result, mask=is_column)
        stop = start + token + 1
        if (stop <= kept_end) & ((stop % block_size == 0) | (stop == kept_end)):
            slot = tl.load(table + (stop - 1) // block_size).to(tl.int64)
            limit = tl.where(slot >= 0, key_dim, 0)
            tl.store(
                places + slot * slot_stride,
                memory,
                mask=(row < limit)[:, None] & is_column[None, :],
            )


@triton.jit
def _unit_head(places, mask):
    """Returns one head's query or key, of length 1."""
    head = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    return head * tl.rsqrt(tl.sum(head * head) + 1e-6)


@triton.jit
def _softplus(x):
    """`log(1 + exp(x))`, also where `exp(x)` is small (Kahan's `log1p`) or large."""
    power = tl.exp(x)
    above_one = 1.0 + power
    small = tl.log(above_one) * power / tl.where(above_one == 1.0, 1.0, above_one - 1.0)
    return tl.where(x > 20.0, x, tl.where(above_one == 1.0, power, small))
