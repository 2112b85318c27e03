"""Kernels of recurrent layers: results against float64, and which slots they read and store."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import Arena
from tests.support.kernel_checks import (
    CPU,
    DTYPES,
    filled_weight,
    native_only,
    normal,
    on_threads,
)
from tests.support.state_cases import (
    check_conv,
    check_delta,
    conv_case,
    delta_case,
    poisoned_slots,
    state_step,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = [(1, 2), (5, 3), (16, 4), (33, 3), (2051, 3), (12, 6)]  # channels, width


def check(case, spans, tables, block_size, *, num_slots=20, slices=1, heads=None, unkept=None):
    states = case.slots(num_slots, slices, heads)
    conv = kernels.short_conv if case.is_gated else kernels.conv_silu
    return check_conv(conv, case, states, spans, tables, block_size, unkept=unkept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "width"), SHAPES)
@pytest.mark.parametrize(("has_bias", "is_gated"), [(False, True), (True, True), (True, False)])
def test_convolutions(channels, width, has_bias, is_gated, dtype):
    spans = [(0, 9), (6, 1), (3, 6), (0, 1), (8, 2), (1, 1)]
    case = conv_case(
        [start + n for start, n in spans],
        channels,
        width,
        dtype,
        has_bias=has_bias,
        is_gated=is_gated,
    )
    tables = [[1, -1, 2], [-1, 3], [4, 5, -1], [6], [-1, 7, 8], [9]]
    check(case, spans, tables, block_size=4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_short_conv_of_any_step(data):
    width, block_size = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 9))
    slices, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    channels = slices * heads * data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    case = conv_case(lengths, channels, width, data.draw(st.sampled_from(DTYPES)))
    spans, tables, unkept, slot = [], [], [], 0
    for length in lengths:
        start = data.draw(st.integers(0, length - 1))
        table = []
        for block in range(-(-length // block_size)):
            is_kept = data.draw(st.booleans()) or start - 1 in range(
                block * block_size, (block + 1) * block_size
            )
            table.append(slot if is_kept else -1)
            slot += is_kept
        if start and data.draw(st.booleans()):  # the slot that is read moves to the end
            table[-1] = table[(start - 1) // block_size]
        spans.append((start, length - start))
        tables.append(table)
        unkept.append(data.draw(st.integers(0, length - start - 1)))
    check(
        case, spans, tables, block_size, num_slots=slot + 1, slices=slices, heads=heads,
        unkept=unkept if data.draw(st.booleans()) else None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_share_a_source_that_none_of_them_changes(dtype):
    spans = [(5, 1), (5, 2), (5, 7)]
    case = conv_case([12, 12, 12], 24, 3, dtype)
    check(case, spans, [[7, -1, 1], [7, -1, 2], [7, 3, 4]], block_size=5)


@native_only("torch's sums depend on the size of a batch")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_tokens_bits_depend_neither_on_chunks_nor_on_other_sequences(width, dtype):
    case = conv_case([70, 70], 37, width, dtype, has_bias=True)
    whole = check(case, [(0, 70), (0, 70)], [[0] * 18, [1] * 18], block_size=4)[:70]
    states = case.slots(2)
    for cuts in ([1] * 70, [3, 1, 5, 60, 1], [64, 6], [33, 37]):
        start, parts = 0, []
        for length in cuts:
            state = state_step([(start, length)], [[0] * 18], 4, (states,))
            rows = case.rows_of[0][start : start + length]
            parts.append(kernels.short_conv(rows, case.weight, case.bias, state))
            start += length
        assert torch.equal(torch.cat(parts), whole)


@native_only("torch's sums may depend on threads")
def test_the_number_of_threads_does_not_change_bits():
    case = conv_case([40, 7], 3000, 3, torch.bfloat16)
    spans, tables = [(3, 37), (0, 7)], [[0] * 20, [1] * 20]
    first, *others = on_threads([1, 2, 5], lambda: check(case, spans, tables, block_size=2))
    assert all(torch.equal(other, first) for other in others)


@native_only("other kernels record nothing")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_convolution_runs_for_other_sequences(dtype):
    case = conv_case([30, 30], 40, 3, dtype)
    weight = filled_weight(normal(120, 50, dtype=dtype, seed=5) / 8)
    hidden, states = normal(4, 50, dtype=dtype, seed=6), case.slots(8)
    recorded = state_step([(0, 2), (0, 2)], [[0], [1]], 8, (states,))

    def run(state):
        gates = kernels.linear(hidden, weight)
        return kernels.rms_norm(
            kernels.short_conv(gates, case.weight, case.bias, state), case.weight[0], 1e-6
        )

    _, step = kernels.record_step(CPU, Arena(), lambda: run(recorded))
    assert step is not None
    for spans, unkept in (([(2, 1), (2, 3)], [0, 2]), ([(3, 3), (3, 1)], None)):
        kept = states.clone()
        current = state_step(spans, [[0], [1]], 8, (states,), unkept)
        kernels.point_to(recorded.meta, current.meta)
        hidden.copy_(normal(4, 50, dtype=dtype, seed=spans[0][0]))
        out, stored = step.run().clone(), states.clone()
        states.copy_(kept)
        assert torch.equal(out, run(current))
        assert torch.equal(stored[:2], states[:2])
        assert not torch.equal(stored[:2], kept[:2])


@native_only("other kernels record nothing")
def test_a_recorded_delta_rule_runs_for_other_sequences():
    case = delta_cases([30, 30], (2, 4, 16, 20), torch.bfloat16)
    slots, norm = delta_slots(case, 8), normal(20, dtype=torch.bfloat16)
    recorded = state_step([(0, 2), (0, 2)], [[0], [1]], 8, (slots,))
    *heads, gates = case.arguments([(0, 2), (0, 2)], CPU)

    def run(state):
        return kernels.rms_norm(kernels.gated_delta(*heads, gates, state), norm, 1e-6)

    _, step = kernels.record_step(CPU, Arena(), lambda: run(recorded))
    assert step is not None
    kept, current = slots.clone(), state_step([(2, 1), (2, 3)], [[0], [1]], 8, (slots,), [0, 2])
    kernels.point_to(recorded.meta, current.meta)
    out, stored = step.run().clone(), slots.clone()
    slots.copy_(kept)
    assert torch.equal(out, run(current))
    assert torch.equal(stored[:2], slots[:2])
    assert not torch.equal(stored[:2], kept[:2])


# Key heads, heads, width of keys, width of values.
HEADS = [(1, 1, 1, 1), (2, 6, 17, 5), (3, 3, 8, 33), (1, 2, 128, 128)]


def delta_slots(case, num_slots, slices=1):
    (_, key, value), *_ = case.heads
    heads, width = value.shape[1] // slices, key.shape[2] * value.shape[2]
    return poisoned_slots(num_slots, slices, heads, width, torch.float32)


def delta_cases(lengths, heads, dtype):
    names = ("num_key_heads", "num_heads", "key_dim", "value_dim")
    return delta_case(lengths, **dict(zip(names, heads, strict=True)), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_gated_delta(heads, dtype):
    spans = [(0, 9), (6, 1), (3, 26), (0, 1), (8, 2)]
    case = delta_cases([start + length for start, length in spans], heads, dtype)
    # The third sequence's slot moves from its first block to its last one.
    tables = [[1, -1, 2], [-1, 3], [4, 5, -1, -1, -1, -1, -1, 4], [6], [-1, 7, 8]]
    for unkept in (None, [2, 0, 5, 0, 1]):
        slots = delta_slots(case, 9)
        check_delta(kernels.gated_delta, case, slots, spans, tables, 4, unkept=unkept)


def test_gated_delta_in_head_slices():
    case = delta_cases([20, 11], (2, 4, 6, 5), torch.float32)
    for slices in (2, 4):
        check_delta(
            kernels.gated_delta,
            case,
            delta_slots(case, 5, slices),
            [(5, 15), (9, 2)],
            [[1, -1, 2], [3, 4]],
            8,
        )


@native_only("torch's sums depend on the size of a batch")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 4, 19, 35), (1, 2, 21, 128)])  # copied or not for one token
def test_a_tokens_bits_depend_neither_on_chunks_nor_on_threads(heads, dtype):
    case = delta_cases([70, 70], heads, dtype)

    def whole():
        spans, tables = [(0, 70), (0, 70)], [[0] * 9, [1] * 9]
        return check_delta(kernels.gated_delta, case, delta_slots(case, 2), spans, tables, 8)[:70]

    first, *others = on_threads([1, 3], whole)
    assert all(torch.equal(other, first) for other in others)
    for cuts in ([1] * 70, [3, 1, 5, 60, 1], [64, 6], [33, 37]):
        start, parts, slots = 0, [], delta_slots(case, 2)
        for length in cuts:
            spans = [(start, length), (start, 1)]
            state = state_step(spans[:1], [[0] * 9], 8, (slots,))
            arguments = case.arguments(spans, CPU)
            heads = [part[:length] for part in arguments[:3]]
            gates = replace(
                arguments[3],
                update=arguments[3].update[:length],
                decay=arguments[3].decay[:length],
            )
            parts.append(kernels.gated_delta(*heads, gates, state))
            start += length
        assert torch.equal(torch.cat(parts), first)
