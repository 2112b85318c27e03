"""Steps of recurrent layers: slots of states, their tables, and what a step may store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from kernels.paged_kv import DeltaGates, LayerState
from tests.support.kernel_checks import assert_within, eps_of, normal
from tests.support.paged_batches import meta_on, step_metadata

__all__ = [
    "ConvCase",
    "DeltaCase",
    "check_conv",
    "check_delta",
    "conv_case",
    "delta_case",
    "poisoned_slots",
    "state_step",
    "stored_ends",
]

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
        rows_of: per sequence, the first arguments of the kernel, by token.
        weight: `[width, channels]`.
        bias: `[channels]`, or None.
        is_gated: whether the kernel is `short_conv`, which multiplies before and after the
            convolution, or `conv_silu`.
    """

    rows_of: list[torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None
    is_gated: bool = True

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The inputs of the convolution, rounded to their type."""
        if not self.is_gated:
            return self.rows_of
        thirds = [rows.chunk(3, dim=1) for rows in self.rows_of]
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
        """Returns the kernel's first argument in a step."""
        parts = zip(self.rows_of, spans, strict=True)
        return torch.cat([rows[start : start + length] for rows, (start, length) in parts])

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
        for given, values, (start, length) in zip(self.rows_of, self.inputs, spans, strict=True):
            if not length:
                continue
            padded = functional.pad(values.double().T, (width - 1, 0))
            sums = functional.conv1d(padded, weight, bias, groups=channels).T
            sizes = functional.conv1d(padded.abs(), weight.abs(), groups=channels).T
            if bias is not None:
                sizes += bias.abs()
            rows = slice(start, start + length)
            after = given.double().chunk(3, dim=1)[1] if self.is_gated else sums.sigmoid()
            results.append((after * sums)[rows])
            # The slope of SiLU is at most 1.1.
            slope = after.abs() if self.is_gated else 1.1
            # The inputs, their sum and the product are rounded.
            bounds.append((slope * sizes)[rows] * (3.1 * rounding + num_eps))
        assert_within(out, torch.cat(results), torch.cat(bounds))


def conv_case(
    lengths: Sequence[int],
    channels: int,
    width: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    is_gated: bool = True,
) -> ConvCase:
    """Returns sequences of these lengths, with normally distributed numbers."""
    columns = channels * (3 if is_gated else 1)
    return ConvCase(
        rows_of=[normal(n, columns, dtype=dtype, seed=n) for n in lengths],
        is_gated=is_gated,
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
        conv: the kernel of some backend.
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


@dataclass(frozen=True)
class DeltaCase:
    """Sequences that the gated delta rule runs over.

    Attributes:
        heads: per sequence, query and key, each `[tokens, num_key_heads, key_dim]`, and value,
            `[tokens, num_heads, value_dim]`.
        gates: per sequence.
    """

    heads: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    gates: list[DeltaGates]

    def arguments(
        self, spans: Spans, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DeltaGates]:
        """Returns the kernel's arguments in a step, but for the states."""
        parts = [slice(start, start + length) for start, length in spans]

        def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            picked = [tensor[part] for tensor, part in zip(tensors, parts, strict=True)]
            # Rows with a stride, as parts of a projection have.
            return torch.cat([torch.cat(picked)] * 2, dim=1).to(device)[:, : picked[0].shape[1]]

        query, key, value = (joined([heads[i] for heads in self.heads]) for i in range(3))
        gates = DeltaGates(
            update=joined([gates.update for gates in self.gates]),
            decay=joined([gates.decay for gates in self.gates]),
            log_rates=self.gates[0].log_rates.to(device),
            decay_bias=self.gates[0].decay_bias.to(device),
        )
        return query, key, value, gates

    def expected(self, sequence: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the results and the state after so many tokens, by `transformers`' loop.

        Returns:
            `[num_tokens, num_heads, value_dim]` and `[num_heads, key_dim, value_dim]`, float32.
        """
        from transformers.models.qwen3_next import modeling_qwen3_next

        gates = self.gates[sequence]
        rates = gates.log_rates.float().exp()
        steps = functional.softplus(gates.decay.float() + gates.decay_bias.float())
        query, key, value = (
            part[:num_tokens].float().unsqueeze(0) for part in self.heads[sequence]
        )
        out, state = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
            query,
            key,
            value,
            g=(-rates * steps)[:num_tokens].unsqueeze(0),
            beta=gates.update.sigmoid().float()[:num_tokens].unsqueeze(0),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0], state[0]


def delta_case(
    lengths: Sequence[int],
    *,
    num_key_heads: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
) -> DeltaCase:
    """Returns sequences of these lengths, with normally distributed numbers."""
    log_rates = normal(num_heads, dtype=dtype, seed=101)
    decay_bias = normal(num_heads, dtype=dtype, seed=102)
    return DeltaCase(
        heads=[
            (
                normal(n, num_key_heads, key_dim, dtype=dtype, seed=3 * n),
                normal(n, num_key_heads, key_dim, dtype=dtype, seed=3 * n + 1),
                normal(n, num_heads, value_dim, dtype=dtype, seed=3 * n + 2),
            )
            for n in lengths
        ],
        gates=[
            DeltaGates(
                update=normal(n, num_heads, dtype=dtype, seed=n),
                decay=normal(n, num_heads, dtype=dtype, seed=n + 50) * 2,
                log_rates=log_rates,
                decay_bias=decay_bias,
            )
            for n in lengths
        ],
    )


def check_delta(
    rule: Callable[..., torch.Tensor],
    case: DeltaCase,
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
        rule: `kernels.gated_delta` of some backend.
        case: the sequences.
        states: `[num_slots, slices, heads_per_slice, key_dim * value_dim]`; changed in place.
        spans: (start, length) of each sequence.
        tables: slots of each sequence.
        block_size: tokens per entry of a table.
        unkept: see `AttentionMetadata.num_unkept`.
        rounding: the relative error of a stored number, by default that of correct rounding.
    """
    for index, ((start, _), table) in enumerate(zip(spans, tables, strict=True)):
        if start:
            past = case.expected(index, start)[1]
            states[table[(start - 1) // block_size]] = past.reshape(states.shape[1:])
    before = states.clone()
    state = state_step(spans, tables, block_size, (states,), unkept)
    out = rule(*case.arguments(spans, states.device), state)
    rounding = eps_of(out.dtype) / 2 if rounding is None else rounding
    expected = torch.cat(
        [case.expected(i, sum(span))[0][span[0] :] for i, span in enumerate(spans)]
    )
    # Rounded shares of updates may differ by a rounding; values are about 1.
    slack = 2e-5 + (0 if out.dtype == torch.float32 else 4 * rounding)
    assert out.shape == expected.shape
    assert_within(out.cpu(), expected.double(), rounding * expected.double().abs() + slack)
    stored = stored_ends(spans, tables, block_size, unkept)
    for slot, (index, num_tokens) in stored.items():
        after = case.expected(index, num_tokens)[1].reshape(states.shape[1:])
        assert_within(states[slot].cpu(), after.double(), torch.tensor(slack))
    others = [slot for slot in range(len(states)) if slot not in stored]
    assert torch.equal(*(x[others].contiguous().view(torch.uint8) for x in (states, before)))
    return out
