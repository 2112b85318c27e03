"""Recurrent layers, in plain torch: kernels that carry a state from token to token."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.dispatch import kernel
from kernels.paged_kv import LayerState

__all__ = ["short_conv"]


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
    return after * _convolve(before * values, weight, bias, state)


def _convolve(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: LayerState
) -> torch.Tensor:
    """Returns the causal convolution of `[num_tokens, channels]` values, rounded to their type."""
    states, num_past = state.parts[0], len(weight) - 1
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
    """Yields the sequences of a step, by the rule of `LayerState`."""
    meta, size = state.meta, state.block_size
    starts, tables = meta.query_starts.tolist(), meta.block_tables.tolist()
    unkept = [0] * len(tables) if meta.num_unkept is None else meta.num_unkept.tolist()
    for index, end in enumerate(meta.context_lens.tolist()):
        table, rows = tables[index], slice(starts[index], starts[index + 1])
        start, kept_end = end - (rows.stop - rows.start), end - unkept[index]
        ends = [*range((start // size + 1) * size, kept_end, size), kept_end]
        targets = [(stop - start, table[(stop - 1) // size]) for stop in ends if stop > start]
        yield _Span(
            rows=rows,
            source=table[(start - 1) // size] if start else None,
            targets=[(count, slot) for count, slot in targets if slot >= 0],
        )
