"""Steps of recurrent layers: slots of states, their tables, and what a step may store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from kernels.paged_kv import LayerState
from tests.support.kernel_checks import assert_within, eps_of, normal
from tests.support.paged_batches import meta_on, step_metadata

__all__ = ["ConvCase", "check_conv", "conv_case", "poisoned_slots", "state_step", "stored_ends"]

Spans = Sequence[tuple[int, int]]


def state_step(
    spans: Spans,
    tables: Sequence[Sequence[int]],
    block_size: int,
    parts: tuple[torch.Tensor, ...],
    unkept: Sequence[int] | None = None,
) -> LayerState:
    """Returns one layer's states in a step; for `spans` and `tables` see `step_metadata`."""
    device = parts[0].device
    meta = meta_on(device, step_metadata(spans, tables, block_size)[1])
    if unkept is not None:
        num_unkept = torch.tensor(unkept, dtype=torch.int32, device=device)
        meta = replace(meta, num_unkept=num_unkept)
    return LayerState(parts, meta, block_size)


def stored_ends(
    spans: Spans,
    tables: Sequence[Sequence[int]],
    block_size: int,
    unkept: Sequence[int] | None = None,
) -> dict[int, tuple[int, int]]:
    """Returns, for each slot that a step stores into, the sequence and its number of tokens."""
    stored = {}
    for index, (start, length) in enumerate(spans):
        kept_end = start + length - (unkept[index] if unkept else 0)
        for num_tokens in range(start + 1, kept_end + 1):
            slot = tables[index][(num_tokens - 1) // block_size]
            if slot >= 0 and (num_tokens % block_size == 0 or num_tokens == kept_end):
                stored[slot] = (index, num_tokens)
    return stored


def poisoned_slots(num_slots: int, slices: int, heads: int, width: int, dtype: torch.dtype):
    """Returns slots of one layer, full of NaN and with memory of other layers between them."""
    return torch.full((num_slots, slices, 3, heads, width), torch.nan, dtype=dtype)[:, :, 1]


@dataclass(frozen=True)
class ConvCase:
    """Sequences that a convolution runs over.

    Attributes:
        gates: per sequence, `[tokens, 3 * channels]`; B, C and x.
        weight: `[width, channels]`.
        bias: `[channels]`, or None.
    """

    gates: list[torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The inputs of the convolution, rounded to their type."""
        thirds = [gates.chunk(3, dim=1) for gates in self.gates]
        return [before * values for before, _, values in thirds]

    def slots(self, num_slots: int, slices: int = 1, heads: int | None = None) -> torch.Tensor:
        """Returns slots for the states, by default with one channel per head."""
        width, channels = self.weight.shape
        heads = heads or channels // slices
        size = channels * (width - 1) // (slices * heads)
        return poisoned_slots(num_slots, slices, heads, size, self.weight.dtype)

    def state_after(self, sequence: int, num_tokens: int) -> torch.Tensor:
        """Returns the state `[channels, width - 1]` after so many tokens of a sequence."""
        num_past = len(self.weight) - 1
        padded = functional.pad(self.inputs[sequence], (0, 0, num_past, 0))
        return padded[num_tokens : num_tokens + num_past].T

    def rows(self, spans: Spans) -> torch.Tensor:
        """Returns the gates of a step's tokens."""
        parts = zip(self.gates, spans, strict=True)
        return torch.cat([gates[start : start + length] for gates, (start, length) in parts])

    def check(self, out: torch.Tensor, spans: Spans, rounding: float | None = None) -> None:
        """Checks a step's results against float64.

        Args:
            out: `[tokens, channels]`.
            spans: (start, length) of each sequence.
            rounding: the relative error of a stored number, by default that of correct rounding.
        """
        rounding = eps_of(out.dtype) / 2 if rounding is None else rounding
        width, channels = self.weight.shape
        weight, num_eps = self.weight.double().T.unsqueeze(1), width * eps_of(torch.float32)
        bias = None if self.bias is None else self.bias.double()
        bounds, results = [], []
        for gates, values, (start, length) in zip(self.gates, self.inputs, spans, strict=True):
            padded = functional.pad(values.double().T, (width - 1, 0))
            sums = functional.conv1d(padded, weight, bias, groups=channels).T
            sizes = functional.conv1d(padded.abs(), weight.abs(), groups=channels).T
            if bias is not None:
                sizes += bias.abs()
            after, rows = gates.double().chunk(3, dim=1)[1], slice(start, start + length)
            results.append((after * sums)[rows])
            # The inputs, their sum and the product are rounded.
            bounds.append((after.abs() * sizes)[rows] * (3.1 * rounding + num_eps))
        assert_within(out, torch.cat(results), torch.cat(bounds))


def conv_case(
    lengths: Sequence[int], channels: int, width: int, dtype: torch.dtype, *, has_bias: bool = False
) -> ConvCase:
    """Returns sequences of these lengths, with normally distributed numbers."""
    return ConvCase(
        gates=[normal(n, 3 * channels, dtype=dtype, seed=n) for n in lengths],
        weight=normal(width, channels, dtype=dtype, seed=1),
        bias=normal(channels, dtype=dtype, seed=2) if has_bias else None,
    )


def check_conv(
    conv: Callable[..., torch.Tensor],
    case: ConvCase,
    states: torch.Tensor,
    spans: Spans,
    tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    unkept: Sequence[int] | None = None,
    rounding: float | None = None,
) -> torch.Tensor:
    """Runs a step whose sources hold the right states; checks results and all slots.

    Args:
        conv: `kernels.short_conv` of some backend.
        case: the sequences.
        states: see `ConvCase.slots`; changed in place.
        spans: (start, length) of each sequence.
        tables: slots of each sequence.
        block_size: tokens per entry of a table.
        unkept: see `AttentionMetadata.num_unkept`.
        rounding: as in `ConvCase.check`.
    """
    for index, ((start, _), table) in enumerate(zip(spans, tables, strict=True)):
        if start:
            past = case.state_after(index, start)
            states[table[(start - 1) // block_size]] = past.reshape(states.shape[1:])
    expected = states.clone()
    device = states.device
    state = state_step(spans, tables, block_size, (states,), unkept)
    bias = None if case.bias is None else case.bias.to(device)
    out = conv(case.rows(spans).to(device), case.weight.to(device), bias, state)
    assert out.dtype == case.weight.dtype
    case.check(out.cpu(), spans, rounding)
    stored = stored_ends(spans, tables, block_size, unkept)
    for slot, (index, num_tokens) in stored.items():
        after = case.state_after(index, num_tokens).reshape(states.shape[1:])
        bound = after.double().abs() * (rounding or 0)  # a product that is cut off, not rounded
        assert_within(states[slot].cpu(), after.double(), bound)
    others = [slot for slot in range(len(states)) if slot not in stored]
    assert torch.equal(*(x[others].contiguous().view(torch.uint8) for x in (states, expected)))
    return out
