"""Triton kernels that read rows of `ScaledWeight`: few rows of products, and numbers."""

import triton
import triton.language as tl

from kernels.triton.attention_kernels import product
from kernels.triton.dependent import wait_for_inputs
from kernels.triton.scaled_weight import CHUNK, CodeKind

__all__ = ["dequantize_kernel", "linear_kernel", "quantized_sums"]

_BITS_4 = tl.constexpr(CodeKind.BITS_4.value)
_FLOATS_4 = tl.constexpr(CodeKind.FLOATS_4.value)
_INT8 = tl.constexpr(CodeKind.INT8.value)
_CHUNK = tl.constexpr(CHUNK)
_HALF = tl.constexpr(CHUNK // 2)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    hidden,
    weight,
    out,
    row_stride,
    num_rows,
    num_outputs,
    num_columns,
    row_bytes,
    scales_at,
    zeros_at,
    offsets_at,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """`out = hidden @ weight.T`; program (i, j) computes block i of the outputs of block j of rows.

    Programs of the same outputs are neighbours, so that their codes come from the cache.
    """
    wait_for_inputs(IS_DEPENDENT)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_output = outputs < num_outputs
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    has_row = rows < num_rows
    inputs = hidden + rows[:, None] * row_stride
    matrix = weight + outputs.to(tl.int64) * row_bytes
    sums = quantized_sums(
        inputs,
        matrix,
        has_row,
        has_output,
        num_columns,
        scales_at,
        zeros_at,
        offsets_at,
        KIND,
        RUN,
        HAS_ZEROS,
        HAS_OFFSETS,
        BLOCK_M,
        BLOCK_N,
    )
    places = out + rows[:, None] * num_outputs + outputs[None, :]
    mask = has_row[:, None] & has_output[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def dequantize_kernel(
    weight,
    row_ids,
    out,
    num_rows,
    num_columns,
    row_bytes,
    scales_at,
    zeros_at,
    offsets_at,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes numbers of rows; program (i, j) writes chunk j of the columns of block i of rows."""
    places = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row = places < num_rows
    rows = places
    if row_ids is not None:
        rows = tl.load(row_ids + places, mask=has_row, other=0)
    matrix = weight + rows * row_bytes
    begin = tl.program_id(1) * _CHUNK
    low, high = _chunk_codes(matrix, begin, has_row, KIND)
    for half in tl.static_range(2):
        first = begin + half * _HALF
        codes = low if half == 0 else high
        numbers = _numbers(
            codes,
            matrix,
            first,
            has_row,
            num_columns,
            scales_at,
            zeros_at,
            offsets_at,
            KIND,
            RUN,
            HAS_ZEROS,
            HAS_OFFSETS,
            BLOCK_N,
        )
        columns = first + tl.arange(0, _HALF)
        mask = (columns < num_columns)[:, None] & has_row[None, :]
        outputs = out + places[None, :] * num_columns + columns[:, None]
        tl.store(outputs, numbers.to(out.dtype.element_ty), mask=mask)


@triton.jit
def quantized_sums(
    inputs,
    matrix,
    has_row,
    has_output,
    num_columns,
    scales_at,
    zeros_at,
    offsets_at,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns the sums of a tile's products, [BLOCK_M, BLOCK_N] float32.

    inputs: [BLOCK_M, 1] pointers to rows of inputs. matrix: [BLOCK_N] pointers to rows of the
    weight. Numbers of the weight are rounded to the type of the inputs, as a dense weight's are.
    """
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, num_columns, _CHUNK):
        low, high = _chunk_codes(matrix, begin, has_output, KIND)
        for half in tl.static_range(2):
            first = begin + half * _HALF
            columns = first + tl.arange(0, _HALF)
            mask = has_row[:, None] & (columns < num_columns)[None, :]
            left = tl.load(inputs + columns[None, :], mask=mask, other=0.0)
            codes = low if half == 0 else high
            right = _numbers(
                codes,
                matrix,
                first,
                has_output,
                num_columns,
                scales_at,
                zeros_at,
                offsets_at,
                KIND,
                RUN,
                HAS_ZEROS,
                HAS_OFFSETS,
                BLOCK_N,
            )
            sums = product(left, right.to(left.dtype), sums)
    return sums


@triton.jit
def _chunk_codes(matrix, begin, has_row, KIND: tl.constexpr):
    """Returns the codes of both halves of a chunk of columns, each [32, BLOCK_N] uint8."""
    places = tl.arange(0, _HALF)[:, None]
    if KIND < _INT8:
        packed = tl.load(matrix[None, :] + (begin // 2 + places), mask=has_row[None, :], other=0)
        low, high = packed & 15, packed >> 4
    else:
        low = tl.load(matrix[None, :] + (begin + places), mask=has_row[None, :], other=0)
        high = tl.load(matrix[None, :] + (begin + _HALF + places), mask=has_row[None, :], other=0)
    return low, high


@triton.jit
def _numbers(
    codes,
    matrix,
    first,
    has_row,
    num_columns,
    scales_at,
    zeros_at,
    offsets_at,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns the numbers of codes, [32, BLOCK_N] float32; zeros behind the last column."""
    if KIND == _BITS_4:
        numbers = codes.to(tl.float32)
    elif KIND == _FLOATS_4:
        numbers = _small_floats(codes)
    elif KIND == _INT8:
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # Runs are at least 16 columns long, so a half has one or two.
    num_runs: tl.constexpr = 2 if RUN == 16 else 1
    runs = tl.arange(0, num_runs)
    if RUN != 0:
        runs += first // RUN
        has_run = (runs < num_columns // RUN)[:, None] & has_row[None, :]
    else:
        has_run = has_row[None, :]
    numbers = tl.reshape(numbers, (num_runs, _HALF // num_runs, BLOCK_N))
    if HAS_ZEROS:
        zeros = _run_numbers(matrix + zeros_at, runs, has_run)
        numbers -= tl.reshape(zeros, (num_runs, 1, BLOCK_N))
    scales = _run_numbers(matrix + scales_at, runs, has_run)
    numbers *= tl.reshape(scales, (num_runs, 1, BLOCK_N))
    if HAS_OFFSETS:
        offsets = _run_numbers(matrix + offsets_at, runs, has_run)
        numbers += tl.reshape(offsets, (num_runs, 1, BLOCK_N))
    return tl.reshape(numbers, (_HALF, BLOCK_N))


@triton.jit
def _run_numbers(pointers, runs, has_run):
    """Loads float32 numbers of runs, [runs, BLOCK_N]."""
    numbers = pointers.to(tl.pointer_type(tl.float32))
    return tl.load(numbers[None, :] + runs[:, None], mask=has_run, other=0.0)


@triton.jit
def _small_floats(codes):
    """Returns twice the numbers of 4-bit floats with two bits of exponent and one of mantissa."""
    bits = (codes & 7).to(tl.int32)
    exponents, mantissas = bits >> 1, bits & 1
    magnitudes = tl.where(exponents > 0, (2 + mantissas) << tl.maximum(exponents - 1, 0), mantissas)
    return tl.where(codes > 7, -magnitudes, magnitudes).to(tl.float32)
