"""Cases of a decoder's layers: products, norms, look-ups, maxima, and copies of blocks.

Weights and the inputs of what multiplies no matrix are read from memory; rows and results of
products are in cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.kernels.attention import BLOCK_SIZE
from benchmarks.kernels.case import (
    Call,
    Case,
    Cost,
    DecoderShape,
    Numbers,
    Result,
    Sizes,
    product_cost,
    rows_in_words,
)
from kernels import Activation, WeightUse

__all__ = [
    "embed_cases",
    "gated_linear_cases",
    "gather_cases",
    "linear_cases",
    "maxima_cases",
    "norm_cases",
    "scatter_cases",
]
_EPS = 1e-5
_NUM_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class _ProductLayer:
    """One of a decoder's linear layers.

    Attributes:
        what: its name.
        num_outputs: rows of its weight.
        num_inputs: columns of its weight.
        has_residual: whether a residual is added.
        is_head: whether the result is float32, computed for few rows.
    """

    what: str
    num_outputs: int
    num_inputs: int
    has_residual: bool = False
    is_head: bool = False


def linear_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Every linear layer of the model, from one row to a chunk of a prompt."""
    for layer in _layers(shape):
        for num_rows in sizes.product_rows:
            if layer.is_head and num_rows > max(sizes.sequences):
                continue
            case = Case(
                "linear",
                f"{layer.what} {layer.num_outputs} x {layer.num_inputs}",
                rows_in_words(num_rows),
                product_cost(num_rows, layer.num_outputs, layer.num_inputs, dtype.itemsize),
                layer.num_inputs,
                partial(_linear_calls, layer, num_rows),
            )
            yield case
            if num_rows in sizes.few_rows and not layer.is_head:
                yield _by_library(case)


def gated_linear_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """The gated layer, from one row to a chunk of a prompt."""
    num_outputs, num_inputs = 2 * shape.num_gated, shape.width
    for num_rows in sizes.product_rows:
        case = Case(
            "linear_gated",
            f"gate, up {num_outputs} x {num_inputs}",
            rows_in_words(num_rows),
            product_cost(num_rows, num_outputs, num_inputs, dtype.itemsize),
            num_inputs,
            partial(_gated_calls, num_outputs, num_inputs, num_rows),
        )
        yield case
        if num_rows in sizes.few_rows:
            yield _by_library(case)


def _by_library(case: Case) -> Case:
    """Returns the same case by cuBLAS, whatever the device's launch table says."""
    make_calls = partial(_library_calls, case.make_calls)
    return replace(case, what=f"{case.what}, cuBLAS", make_calls=make_calls)


def _library_calls(
    make_calls: Callable[[Numbers, int], Sequence[Call]], numbers: Numbers, num_copies: int
) -> Sequence[Call]:
    return [partial(_run_library, call, numbers) for call in make_calls(numbers, num_copies)]


def _run_library(call: Call, numbers: Numbers) -> Result:
    # Not on a CPU, which may have no Triton.
    from kernels.triton.launch import launch_table, replaced_launch_table

    table = launch_table(numbers.device)
    mechanisms = replace(table.mechanisms, few_row_products=False)
    with replaced_launch_table(replace(table, mechanisms=mechanisms)):
        return call()


def _layers(shape: DecoderShape) -> tuple[_ProductLayer, ...]:
    num_qkv = shape.num_query_features + 2 * shape.num_kv_features
    return (
        _ProductLayer("qkv", num_qkv, shape.width),
        _ProductLayer("out", shape.width, shape.num_query_features, has_residual=True),
        _ProductLayer("down", shape.width, shape.num_gated, has_residual=True),
        _ProductLayer("head", shape.vocab_size, shape.width, is_head=True),
    )


def _linear_calls(
    layer: _ProductLayer, num_rows: int, numbers: Numbers, num_copies: int
) -> Sequence[Call]:
    hidden = numbers.normal(num_rows, layer.num_inputs)
    residual = numbers.normal(num_rows, layer.num_outputs, seed=2) if layer.has_residual else None
    out_dtype = torch.float32 if layer.is_head else None
    use = WeightUse.LINEAR
    return [
        partial(numbers.module.linear, hidden, weight, None, residual, out_dtype=out_dtype)
        for weight in numbers.weights(layer.num_outputs, layer.num_inputs, use, num_copies)
    ]


def _gated_calls(
    num_outputs: int, num_inputs: int, num_rows: int, numbers: Numbers, num_copies: int
) -> Sequence[Call]:
    hidden = numbers.normal(num_rows, num_inputs)
    return [
        partial(numbers.module.linear_gated, hidden, weight, None, Activation.SILU)
        for weight in numbers.weights(num_outputs, num_inputs, WeightUse.GATED_LINEAR, num_copies)
    ]


def norm_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Norms of hidden states."""
    for num_rows in sizes.hidden_rows:
        yield Case(
            "rms_norm",
            f"width {shape.width}",
            rows_in_words(num_rows),
            Cost(num_rows * shape.width * dtype.itemsize),
            shape.width,
            partial(_norm_calls, shape, num_rows),
        )


def embed_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Look-ups in the embedding; no two calls share a row."""
    layout = "panels of the head" if shape.has_tied_head else "rows"
    for num_rows in sizes.hidden_rows:
        yield Case(
            "embed",
            f"{shape.vocab_size} x {shape.width}, {layout}",
            rows_in_words(num_rows),
            Cost(num_rows * shape.width * dtype.itemsize),
            1,
            partial(_embed_calls, shape, num_rows),
            max_copies=max(1, shape.vocab_size // num_rows),
        )


def maxima_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """The likeliest token of each sequence: float32 logits, whatever the model's type."""
    del dtype
    for num_rows in sizes.sequences:
        yield Case(
            "row_maxima",
            f"{shape.vocab_size} logits",
            rows_in_words(num_rows),
            Cost(num_rows * shape.vocab_size * torch.float32.itemsize),
            1,
            partial(_maxima_calls, shape, num_rows),
        )


def _norm_calls(
    shape: DecoderShape, num_rows: int, numbers: Numbers, num_copies: int
) -> Sequence[Call]:
    hidden, weight = numbers.normal(num_rows, shape.width), numbers.normal(shape.width, seed=1)
    norm = numbers.module.rms_norm
    return [partial(norm, hidden.clone(), weight, _EPS) for _ in range(num_copies)]


def _embed_calls(
    shape: DecoderShape, num_rows: int, numbers: Numbers, num_copies: int
) -> Sequence[Call]:
    use = WeightUse.LINEAR if shape.has_tied_head else WeightUse.LOOKUP
    (weight,) = numbers.weights(shape.vocab_size, shape.width, use, 1)
    ids = torch.randperm(shape.vocab_size, generator=torch.Generator().manual_seed(0))
    parts = torch.split(ids.to(numbers.device), num_rows)[:num_copies]
    return [partial(numbers.module.embed, part, weight) for part in parts]


def _maxima_calls(
    shape: DecoderShape, num_rows: int, numbers: Numbers, num_copies: int
) -> Sequence[Call]:
    logits = numbers.in_float32().normal(num_rows, shape.vocab_size)
    return [partial(numbers.module.row_maxima, logits.clone()) for _ in range(num_copies)]


def gather_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Blocks of a pool into a buffer: each byte is read and written."""
    yield _block_case("gather_blocks", shape, dtype)


def scatter_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Blocks of a buffer into a pool."""
    yield _block_case("scatter_blocks", shape, dtype)


def _block_case(name: str, shape: DecoderShape, dtype: torch.dtype) -> Case:
    num_words = 2 * shape.num_layers * shape.num_kv_features * BLOCK_SIZE
    return Case(
        name,
        f"blocks of {num_words * dtype.itemsize >> 10} KiB",
        f"{_NUM_BLOCKS} blocks",
        Cost(2 * _NUM_BLOCKS * num_words * dtype.itemsize),
        1,
        partial(_block_calls, name, num_words),
        is_recordable=False,
    )


def _block_calls(name: str, num_words: int, numbers: Numbers, num_copies: int) -> Sequence[Call]:
    """Returns calls that share a pool, of which each moves other blocks."""
    pool = numbers.normal(num_copies * _NUM_BLOCKS, num_words, seed=1)
    buffer = numbers.normal(_NUM_BLOCKS, num_words, seed=2)
    ids = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0)).to(numbers.device)
    move = partial(_gather if name == "gather_blocks" else _scatter, numbers, pool, buffer)
    return [partial(move, part) for part in torch.split(ids, _NUM_BLOCKS)]


def _gather(
    numbers: Numbers, pool: torch.Tensor, buffer: torch.Tensor, ids: torch.Tensor
) -> Result:
    numbers.module.gather_blocks(pool, ids, buffer)
    return buffer


def _scatter(
    numbers: Numbers, pool: torch.Tensor, buffer: torch.Tensor, ids: torch.Tensor
) -> Result:
    numbers.module.scatter_blocks(buffer, pool, ids)
    return pool
