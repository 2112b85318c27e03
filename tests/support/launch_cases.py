"""Every Triton kernel launched as models launch it, compiled ahead of time for a GPU.

`python -m tests.support.launch_cases DEVICE_NAME CASE...` prints a JSON object: case -> the kernels
it compiled, each with its name and the shared memory of a program in bytes. It must not run in a
process where `triton` interprets kernels.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from kernels import (
    DRAW_RECORD,
    Activation,
    Cut,
    DenseWeight,
    DrawTable,
    ExpertScores,
    InputNorm,
    NormKind,
    QuantizedForm,
    RoutingRule,
    RuleTable,
    WeightUse,
    reference,
)
from kernels.formats import FORMATS
from kernels.triton import (
    attention,
    blocks,
    cache,
    experts,
    latent,
    launch,
    linear,
    logit_rules,
    pointwise,
    quantized,
    recurrent,
    routing,
    row_state,
    sampling,
)
from kernels.triton.draw_thresholds import find_thresholds
from tests.support import latent_cases
from tests.support.ahead_of_time import compiling
from tests.support.attention_cases import make_case as attention_case
from tests.support.preparation_cases import make_case as preparation_case
from tests.support.row_cases import RowCase
from tests.support.state_cases import conv_case, delta_case, poisoned_slots, state_step

__all__ = ["CASES"]

CPU = torch.device("cpu")
DECODE, PROMPTS = [(300, 1), (17, 1)], [(300, 1), (0, 70), (33, 40)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def _prepare(dtype=BF16, *, narrow_dtype=None, **options) -> None:
    case = preparation_case(
        num_heads=8, num_kv_heads=2, head_dim=128, block_size=16, dtype=dtype, **options
    )
    pool, scales = case.pool[:, 1], None
    if narrow_dtype is not None:
        pool, scales = pool.to(narrow_dtype), torch.empty(pool.shape[:4])
    cache.rotate_and_write_kv(
        *case.parts(), pool, case.meta, rotation=case.rotation, norms=case.norms, kv_scales=scales
    )


def _attend(spans, dtype=BF16, *, window=None, narrow_dtype=None, head_dim=128, **rule):
    case = attention_case(
        spans,
        num_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
        **rule,
    )
    case = case if narrow_dtype is None else case.quantized(narrow_dtype)
    case.attend(window, module=attention)


def _attend_divided() -> None:
    """Attends with every context divided among as many programs."""
    table = launch.launch_table(CPU)
    rows = tuple(replace(row, shares_evenly=0) for row in table.decode_attention.rows)
    with launch.replaced_launch_table(replace(table, decode_attention=launch.Rows(rows))):
        _attend(DECODE)


def _attend_latent(spans, dtype=BF16, *, narrow_dtype=None, num_heads=16) -> None:
    case = attention_case(
        spans,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=576,
        value_dim=512,
        block_size=16,
        dtype=dtype,
    )
    case = case if narrow_dtype is None else case.quantized(narrow_dtype)
    case.attend(module=attention)


def _write_latent(dtype=BF16, *, narrow_dtype=None) -> None:
    sizes = {"num_heads": 16, "plain_dim": 128, "latent_dim": 512, "rotary_dim": 64}
    case = latent_cases.make_case(block_size=16, dtype=dtype, module=latent, **sizes)
    (case if narrow_dtype is None else latent_cases.quantized(case, narrow_dtype)).run()


def _pointwise(dtype=BF16) -> None:
    pointwise.rms_norm(torch.empty(3, 4096, dtype=dtype), torch.empty(4096, dtype=dtype), 1e-6)
    for kind in NormKind:
        hidden, weight = torch.empty(3, 100, dtype=dtype), torch.empty(100, dtype=dtype)
        pointwise.rms_norm(hidden, weight, 1e-6, kind=kind, residual=hidden)
    hidden, weight = torch.empty(3, 100, dtype=dtype), torch.empty(100, dtype=dtype)
    pointwise.layer_norm(hidden, weight, weight, 1e-6)
    pointwise.layer_norm(hidden, None, None, 1e-6, hidden)
    weight = reference.make_weight(2 * 1024, 16, dtype, CPU, WeightUse.GATED_LINEAR)
    plain = reference.make_weight(1024, 16, dtype, CPU, WeightUse.LINEAR)
    for activation in Activation:
        linear.linear_gated(torch.zeros(3, 16, dtype=dtype), weight, None, activation)
        linear.linear(torch.zeros(3, 16, dtype=dtype), plain, activation=activation)
    linear.linear(torch.zeros(3, 16, dtype=dtype), plain, out_dtype=FP32, cap=30.0)


def _few_rows(dtype=BF16, columns=4096) -> None:
    """Launches the products of a layer, without the memory of its weights."""
    like = torch.empty(0, dtype=dtype)
    hidden = like.new_empty(16, columns)
    norm = InputNorm(like.new_empty(columns), 1e-5, NormKind.ROUNDED)
    plain = DenseWeight(6144, columns, WeightUse.LINEAR, like.new_empty(6144, columns))
    wide = DenseWeight(16384, columns, WeightUse.GATED_LINEAR, like.new_empty(16384, columns))
    linear.linear(hidden, plain, norm=norm)
    linear.linear(hidden[:1], plain, norm=norm)
    linear.linear(hidden, plain, None, like.new_empty(16, 6144))
    linear.linear_gated(hidden, wide, None, Activation.SILU, norm=norm)


def _experts(rows=1, dtype=BF16) -> None:
    hidden = torch.zeros(rows, 64, dtype=dtype)
    rule, cut = RoutingRule(8, normalizes=True), Cut.whole(128)
    routed = routing.route_experts(torch.zeros(rows, 129, dtype=dtype)[:, :128], rule, cut)
    grouped = RoutingRule(
        8, ExpertScores.SIGMOID, normalizes=True, num_groups=8, top_groups=4, group_terms=2
    )
    numbers = torch.zeros(128)
    routing.route_experts(torch.zeros(rows, 128), grouped, cut, numbers, numbers)
    up, down = (
        reference.make_weight_stack(128, *shape, dtype, CPU, use)
        for shape, use in (((64, 64), WeightUse.GATED_LINEAR), ((64, 32), WeightUse.LINEAR))
    )
    wide = experts.expert_linear(hidden, up, routed, gathers=True)
    outputs = experts.expert_linear(wide, down, routed, up.data[:, :, 0], gathers=False)
    shared, gate = torch.zeros(rows, 64), torch.zeros(rows, 1, dtype=dtype)
    experts.combine_experts(
        outputs, routed, shared=shared, shared_gate=gate, residual=hidden, out_dtype=FP32
    )


def _quantized(dtype=BF16) -> None:
    for name in ("Q4_0", "Q4_K", "INT4_128", "MXFP4", "Q6_K", "Q5_1", "INT8", "FP8"):
        form = QuantizedForm(FORMATS[name], is_exact=True)
        for use in (WeightUse.LINEAR, WeightUse.LOOKUP):
            weight = quantized.make_weight(512, 2048, dtype, CPU, use, form)
            if use is WeightUse.LINEAR:
                linear.linear(torch.zeros(1, 2048, dtype=dtype), weight)
                linear.linear(torch.zeros(64, 2048, dtype=dtype), weight, out_dtype=FP32)
            else:
                quantized.embed(torch.zeros(3, dtype=torch.int64), weight)
    up = quantized.make_weight_stack(
        32, 256, 512, dtype, CPU, WeightUse.GATED_LINEAR, QuantizedForm(FORMATS["MXFP4"], True)
    )
    for rows in (1, 1000):
        logits = torch.zeros(rows, 32)
        routed = routing.route_experts(logits, RoutingRule(4), Cut.whole(32))
        hidden = torch.zeros(rows, 512, dtype=dtype)
        experts.expert_linear(hidden, up, routed, gathers=True)


def _angles_and_maxima() -> None:
    pointwise.rotary_angles(torch.arange(7), torch.ones(64), 1.0)
    pointwise.row_maxima(torch.empty(3, 128_256))
    pointwise.row_maxima(torch.empty(60, 3).t())


def _blocks() -> None:
    pool, ids = torch.empty(9, 2, 4096), [5, 3]
    blocks.gather_blocks(pool, ids, torch.empty(2, 8192))
    blocks.scatter_blocks(torch.empty(2, 8192), pool, torch.tensor(ids))
    blocks.copy_blocks(pool, [(1, 2), (3, 4)])
    blocks.gather_blocks(torch.empty(9, 90), ids, torch.empty(2, 4 + 360, dtype=torch.uint8)[:, 4:])


def _draw_table() -> DrawTable:
    return DrawTable.of_words(torch.empty((len(DRAW_RECORD), 16), dtype=torch.int64))


def _draws() -> None:
    logits, ids, draws = torch.empty(3, 128_256), torch.arange(3), _draw_table()
    for rows in (None, ids):
        sampling.draw_tokens(
            logits,
            torch.empty(3),
            ids,
            draws,
            draw_ids=ids,
            positions=ids,
            logit_rows=rows,
        )
        sampling.token_logprobs(logits, torch.empty(3), ids, rows)


def _thresholds() -> None:
    logits, ids, draws = torch.empty(16, 128_256), torch.arange(16), _draw_table()
    for count in (1, 3, 16):
        find_thresholds(logits, torch.empty(16), ids, draws, ids[:count], None)


def _rules() -> None:
    """Launches with lists of several widths, and one after another with more rows."""
    logits, ids = torch.empty(3, 128_256), torch.arange(3)
    for widths in ((0, 0, 0, 0), (8, 16, 8, 8)):
        biases, stops, words, length = widths
        table = RuleTable(
            history=torch.empty(3, 1000, dtype=torch.int32),
            lengths=torch.empty(3, 2, dtype=torch.int64),
            penalties=torch.empty(3, 3),
            bias_ids=torch.empty(3, biases, dtype=torch.int32),
            biases=torch.empty(3, biases),
            stop_ids=torch.empty(3, stops, dtype=torch.int32),
            bad_words=torch.empty(3, words, length, dtype=torch.int32),
            allowed=torch.empty(3, 128_256 // 32, dtype=torch.int32),
        )
        for part in (ids, ids[:1], ids[1:]):
            logit_rules.apply_logit_rules(
                logits,
                torch.empty(3),
                ids,
                table,
                rule_ids=part,
                tokens=part,
                positions=part,
                logit_rows=part,
            )


def _rows() -> None:
    case, ids = RowCase.make(CPU, block_size=16), torch.tensor([2, 0])
    sent = case.sent([(2, None, (None,), 0), (0, 3, (7, 8), 0)])
    row_state.lay_out_sequences(case.rows, sent, 16, case.new_inputs(2, 3))
    for count in (1, 2):
        row_state.keep_drawn(case.rows, ids[:count], ids[:count])


def _convolve(spans, dtype=BF16, **options) -> None:
    case = conv_case([start + length for start, length in spans], 256, 3, dtype, **options)
    tables = [[index] * 20 for index in range(len(spans))]
    state = state_step(spans, tables, 16, (case.slots(len(spans)),), [0] * len(spans))
    conv = recurrent.short_conv if case.is_gated else recurrent.conv_silu
    conv(case.rows(spans), case.weight, case.bias, state)


def _delta(spans, dtype=BF16) -> None:
    lengths = [start + length for start, length in spans]
    case = delta_case(
        lengths, num_key_heads=2, num_heads=4, key_dim=128, value_dim=128, dtype=dtype
    )
    slots = poisoned_slots(len(spans), 1, 4, 128 * 128, FP32)
    tables = [[index] * 20 for index in range(len(spans))]
    state = state_step(spans, tables, 16, (slots,), [0] * len(spans))
    recurrent.gated_delta(*case.arguments(spans, CPU), state)


CASES: Mapping[str, Callable[[], None]] = {
    "pointwise": _pointwise,
    "pointwise, float16": partial(_pointwise, FP16),
    "pointwise, float32": partial(_pointwise, FP32),
    "few rows": _few_rows,
    "few rows, odd sizes, float16": partial(_few_rows, FP16, 4097),
    "angles and maxima": _angles_and_maxima,
    "experts": _experts,
    "experts, prompts, float32": partial(_experts, 1000, FP32),
    "quantized": _quantized,
    "quantized, float16": partial(_quantized, FP16),
    "blocks": _blocks,
    "prepare": _prepare,
    "prepare, norms": partial(_prepare, has_norms=True),
    "prepare, partly rotated": partial(
        _prepare, rotary_dim=96, has_norms=True, norm_kind=NormKind.OFFSET
    ),
    "prepare, no rotation, float16": partial(_prepare, FP16, rotates=False),
    "prepare, 8-bit floats": partial(_prepare, narrow_dtype=FP8, has_norms=True),
    "prepare, 8-bit integers": partial(_prepare, narrow_dtype=INT8),
    "prepare, float32": partial(_prepare, FP32),
    "decode": partial(_attend, DECODE),
    "decode, divided": _attend_divided,
    "decode, window and cap": partial(_attend, DECODE, window=100, soft_cap=30.0),
    "decode, sinks": partial(_attend, DECODE, has_sinks=True),
    "decode, 8-bit floats": partial(_attend, DECODE, narrow_dtype=FP8),
    "decode, 8-bit integers": partial(_attend, DECODE, narrow_dtype=INT8),
    "decode, narrow heads": partial(_attend, DECODE, head_dim=64),
    "drafts of 4": partial(_attend, [(300, 5), (17, 5)]),
    "drafts of 15": partial(_attend, [(300, 16), (17, 16)]),
    "drafts of 15, wide heads": partial(_attend, [(300, 16), (17, 16)], head_dim=256),
    "decode, wide heads": partial(_attend, DECODE, head_dim=256),
    "decode, wide heads, float32": partial(_attend, DECODE, FP32, head_dim=256),
    "decode, odd heads, float16": partial(_attend, DECODE, FP16, head_dim=80),
    "prompts": partial(_attend, PROMPTS),
    "chunk of a shared context": partial(_attend, [(1500, 20)]),
    "prompts, 8-bit floats": partial(_attend, PROMPTS, narrow_dtype=FP8),
    "prompts, wide heads": partial(_attend, PROMPTS, head_dim=256),
    "prompts, float32": partial(_attend, PROMPTS, FP32),
    "decode, latent": partial(_attend_latent, DECODE),
    "drafts of 1, latent": partial(_attend_latent, [(300, 2), (17, 2)]),
    "decode, latent, 8-bit integers": partial(_attend_latent, DECODE, narrow_dtype=INT8),
    "decode, latent, float32": partial(_attend_latent, DECODE, FP32),
    "prompts, latent": partial(_attend_latent, PROMPTS, num_heads=128),
    "write latent": _write_latent,
    "write latent, 8-bit integers, float16": partial(_write_latent, FP16, narrow_dtype=INT8),
    "draws": _draws,
    "thresholds": _thresholds,
    "rules": _rules,
    "rows": _rows,
    "convolution": partial(_convolve, DECODE),
    "convolution without gates": partial(_convolve, DECODE, is_gated=False),
    "gated delta": partial(_delta, [(30, 1), (0, 20)]),
    "convolution of prompts, float32": partial(_convolve, [(30, 1), (0, 70)], FP32, has_bias=True),
}


def main() -> None:
    """Compiles the cases; see the module's docstring."""
    device_name, *names = sys.argv[1:]
    compiled = {}
    for name in names:
        with compiling(device_name) as kernels:
            CASES[name]()
        compiled[name] = [(kernel.name, kernel.shared_bytes) for kernel in kernels]
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
