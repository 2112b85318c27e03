"""Cases of linear layers: the weight is read from memory, rows and results are in cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.kernels.case import Call, Case, DecoderShape, Numbers, Sizes, rows_in_words
from benchmarks.kernels.cost import product_cost
from kernels import WeightUse

__all__ = ["gated_linear_cases", "linear_cases"]


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
            yield Case(
                "linear",
                f"{layer.what} {layer.num_outputs} x {layer.num_inputs}",
                rows_in_words(num_rows),
                product_cost(num_rows, layer.num_outputs, layer.num_inputs, dtype.itemsize),
                layer.num_inputs,
                partial(_linear_calls, layer, num_rows),
            )


def gated_linear_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """The gated layer, from one row to a chunk of a prompt."""
    num_outputs, num_inputs = 2 * shape.num_gated, shape.width
    for num_rows in sizes.product_rows:
        yield Case(
            "linear_silu_and_mul",
            f"gate, up {num_outputs} x {num_inputs}",
            rows_in_words(num_rows),
            product_cost(num_rows, num_outputs, num_inputs, dtype.itemsize),
            num_inputs,
            partial(_gated_calls, num_outputs, num_inputs, num_rows),
        )


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
        partial(numbers.module.linear_silu_and_mul, hidden, weight)
        for weight in numbers.weights(num_outputs, num_inputs, WeightUse.GATED_LINEAR, num_copies)
    ]
