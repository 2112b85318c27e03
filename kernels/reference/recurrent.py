"""Recurrent layers, in plain torch: kernels that carry a state from token to token."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's usual name for it

from kernels.dispatch import kernel
from kernels.paged_kv import DeltaGates, LayerState

__all__ = ["conv_silu", "gated_delta", "short_conv"]

_NORM_EPS = 1e-6


@kernel("gates.device", "gates.dtype")
def short_conv(
    gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: LayerState
) -> torch.Tensor:
    """Computes `C * conv(B * x)`, a gated causal convolution by channel (LFM2, arXiv:2511.23404).

    The products and the convolution are rounded to the type of `gates`, sums are in float32.

    Args:
        gates: `[num_tokens, 3 * channels]`; B, C and x side by side.
        weight: `[width, channels]` with a width of at least 2; the last row multiplies a token's
            own value.
        bias: `[channels]`, or None.
        state: its first part holds the last `width - 1` values of `B * x` of each channel, in
            the type of `gates`: `[num_slots, head_slices, heads_per_slice, part_width]` seen as
            `[num_slots, channels, width - 1]`.

    Returns:
        `[num_tokens, channels]`.
    """
    before, after, values = gates.chunk(3, dim=-1)
    return after * _convolve(before * values, weight, bias, state, 0)


@kernel("values.device", "values.dtype")
def conv_silu(
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: LayerState,
    part: int = 0,
) -> torch.Tensor:
    """Computes `silu(conv(values))`, a causal convolution by channel.

    The convolution is rounded to the type of `values`; sums are in float32.

    Args:
        values: `[num_tokens, channels]`.
        weight: as in `short_conv`.
        bias: `[channels]`, or None.
        state: its part holds the last `width - 1` values of each channel, as in `short_conv`.
        part: index of the part.

    Returns:
        `[num_tokens, channels]`.
    """
    return F.silu(_convolve(values, weight, bias, state, part))


@kernel("value.device", "value.dtype")
def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: DeltaGates,
    state: LayerState,
) -> torch.Tensor:
    """Computes the gated delta rule (arXiv:2412.06464) of each head.

    The state of a head is a matrix that maps keys to values. Each token multiplies it by
    `exp(-exp(log_rates) * softplus(decay + decay_bias))`, then adds, in the direction of its key,
    the share `sigmoid(update)` of what the matrix lacks to map the key to the token's value. The
    result is what the matrix maps the token's query to. Queries and keys are normalized to length
    1, queries are then divided by the square root of their width. All of this is in float32, but
    the share is rounded to the type of `value`.

    Args:
        query: `[num_tokens, num_key_heads, key_dim]`; a token's heads are adjacent.
        key: as `query`.
        value: `[num_tokens, num_heads, value_dim]`; a token's heads are adjacent. Each query and
            key serves `num_heads / num_key_heads` neighbouring heads.
        gates: of all heads, of the type of `value`.
        state: its last part holds `[num_slots, head_slices, heads_per_slice, key_dim * value_dim]`
            float32.

    Returns:
        `[num_tokens, num_heads, value_dim]`.
    """
    states, (key_dim, value_dim) = state.parts[-1], (query.shape[2], value.shape[2])
    per_key = value.shape[1] // key.shape[1]
    query, key = (_unit_heads(part).repeat_interleave(per_key, dim=1) for part in (query, key))
    query, update = query * key_dim**-0.5, gates.update.sigmoid().float()
    steps = F.softplus(gates.decay.float() + gates.decay_bias.float())
    decays = (-gates.log_rates.float().exp() * steps).exp()
    wide, out = value.float(), torch.empty_like(value, memory_format=torch.contiguous_format)
    for span in _spans(state):
        memory = wide.new_zeros(value.shape[1], key_dim, value_dim)
        if span.source is not None:
            memory = states[span.source].reshape(memory.shape).clone()
        slots = dict(span.targets)
        for count, row in enumerate(range(span.rows.start, span.rows.stop), 1):
            memory *= decays[row].view(-1, 1, 1)
            predicted = torch.einsum("hkv,hk->hv", memory, key[row])
            change = (wide[row] - predicted) * update[row].unsqueeze(1)
            memory += key[row].unsqueeze(2) * change.unsqueeze(1)
            out[row] = torch.einsum("hkv,hk->hv", memory, query[row]).to(value.dtype)
            if count in slots:
                states[slots[count]] = memory.reshape(states.shape[1:])
    return out


def _unit_heads(heads: torch.Tensor) -> torch.Tensor:
    """Returns `[num_tokens, num_heads, width]` in float32, each head of length 1."""
    wide = heads.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _NORM_EPS)


def _convolve(
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: LayerState,
    part: int,
) -> torch.Tensor:
    """Returns the causal convolution of `[num_tokens, channels]` values, rounded to their type."""
    states, num_past = state.parts[part], len(weight) - 1
    out = torch.empty_like(values)
    for span in _spans(state):
        past = values.new_zeros(values.shape[1], num_past)
        if span.source is not None:
            past = states[span.source].reshape(past.shape)
        seen = torch.cat((past, values[span.rows].T), dim=1)  # [channels, num_past + tokens]
        windows = seen.float().unfold(1, num_past + 1, 1)
        sums = (windows * weight.T.float().unsqueeze(1)).sum(-1).T
        out[span.rows] = (sums if bias is None else sums + bias.float()).to(values.dtype)
        for num_tokens, slot in span.targets:
            kept = seen[:, num_tokens : num_tokens + num_past]
            states[slot] = kept.reshape(states.shape[1:])
    return out


@dataclass(frozen=True, slots=True)
class _Span:
    """One sequence's tokens of a step.

    Attributes:
        rows: of its tokens.
        source: slot of the state before them; None for zeros.
        targets: (number of tokens, slot that the state after so many is stored into).
    """

    rows: slice
    source: int | None
    targets: list[tuple[int, int]]


def _spans(state: LayerState) -> Iterator[_Span]:
    """Yields the sequences of a step that run tokens, by the rule of `LayerState`."""
    meta, size = state.meta, state.block_size
    starts, tables = meta.query_starts.tolist(), meta.block_tables.tolist()
    unkept = [0] * len(tables) if meta.num_unkept is None else meta.num_unkept.tolist()
    for index, end in enumerate(meta.context_lens.tolist()):
        table, rows = tables[index], slice(starts[index], starts[index + 1])
        if rows.stop == rows.start:
            continue  # it only pads the step
        start, kept_end = end - (rows.stop - rows.start), end - unkept[index]
        ends = [*range((start // size + 1) * size, kept_end, size), kept_end]
        targets = [(stop - start, table[(stop - 1) // size]) for stop in ends if stop > start]
        yield _Span(
            rows=rows,
            source=table[(start - 1) // size] if start else None,
            targets=[(count, slot) for count, slot in targets if slot >= 0],
        )
