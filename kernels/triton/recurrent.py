"""Recurrent layers in Triton: kernels that carry a state from token to token."""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.paged_kv import LayerState
from kernels.triton.launch import launch_table
from kernels.triton.pointwise import with_dense_columns

__all__ = ["short_conv"]

_TILE_TOKENS = 16


@TRITON.implements(reference.short_conv)
def short_conv(
    gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: LayerState
) -> torch.Tensor:
    width, channels = weight.shape
    states, meta = state.parts[0], state.meta
    if state.block_size < width - 2:
        # Storing the first block's end could overwrite what the second block's needs.
        return reference.short_conv(gates, weight, bias, state)
    gates = with_dense_columns(gates)
    out = torch.empty((len(gates), channels), dtype=gates.dtype, device=gates.device)
    launch = launch_table(gates.device).pointwise.for_size(channels)
    tile_tokens = 1 if meta.max_query_len == 1 else _TILE_TOKENS
    num_tiles = triton.cdiv(meta.max_query_len, tile_tokens)
    tile_channels = min(launch.block_size // tile_tokens, triton.next_power_of_2(channels))
    num_seqs, num_ranges = len(meta.context_lens), triton.cdiv(channels, tile_channels)

    def run(num_programs: int, *, computes: bool, stores: bool) -> None:
        _short_conv_kernel[(num_seqs, num_ranges, num_programs)](
            gates,
            gates.stride(0),
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
    gates,
    gates_stride,
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
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COMPUTES: tl.constexpr,
    STORES: tl.constexpr,
):
    """See `reference.short_conv`; program (i, j, k): tile k of sequence i's tokens, and channel
    block j.
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
    columns = gates + first_row * gates_stride + channel
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
                gates_stride,
                past[None, :],
                index,
                (index < num_tokens) & in_range[None, :],
                (index < num_tokens) & has_past[None, :],
                channels,
            )
            factor = tl.load(weight + tap * channels + channel, mask=in_range, other=0.0)
            total += value * factor.to(tl.float32)[None, :]
        if bias is not None:
            total += tl.load(bias + channel, mask=in_range, other=0.0).to(tl.float32)[None, :]
        mask = (token < num_tokens)[:, None] & in_range[None, :]
        rows = columns[None, :] + token[:, None].to(tl.int64) * gates_stride
        after = tl.load(rows + channels, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(out.dtype.element_ty).to(tl.float32)
        place_out = (first_row + token[:, None]) * channels + channel[None, :]
        tl.store(out + place_out, (after * rounded).to(out.dtype.element_ty), mask=mask)

    if STORES:
        kept_end = end
        if num_unkept is not None:
            kept_end -= tl.load(num_unkept + sequence)
        tap = tl.arange(0, _next_power_of_2(WIDTH - 1))
        is_tap = (tap < WIDTH - 1)[:, None]
        for block in range(start // block_size, (kept_end - 1) // block_size + 1):
            slot = tl.load(table + block).to(tl.int64)
            if slot >= 0:
                stop = tl.minimum((block + 1) * block_size, kept_end) - start
                kept = _value(
                    columns[None, :],
                    gates_stride,
                    past[None, :],
                    (stop - (WIDTH - 1) + tap)[:, None],
                    is_tap & in_range[None, :],
                    is_tap & has_past[None, :],
                    channels,
                )
                tl.debug_barrier()  # the slot may be the one that was read
                target = states + slot * slot_stride + place[None, :] + tap[:, None]
                tl.store(target, kept.to(states.dtype.element_ty), mask=is_tap & in_range[None, :])


@triton.jit
def _value(columns, stride, past, index, is_input, is_past, channels):
    """Returns the convolution's input at tokens counted from the sequence's first one of the step:
    the product of B and x, or what the state holds.
    """
    rows = columns + index.to(tl.int64) * stride
    mask = is_input & (index >= 0)
    before = tl.load(rows, mask=mask, other=0.0)
    value = before.to(tl.float32)
    value *= tl.load(rows + 2 * channels, mask=mask, other=0.0).to(tl.float32)
    value = value.to(before.dtype).to(tl.float32)
    old = tl.load(past + index, mask=is_past & (index < 0), other=0.0).to(tl.float32)
    return tl.where(index >= 0, value, old)


@triton.constexpr_function
def _next_power_of_2(number):
    return triton.next_power_of_2(number)
