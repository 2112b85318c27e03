"""Cases of norms, look-ups and maxima: their inputs are read from memory."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.kernels.case import Call, Case, DecoderShape, Numbers, Sizes, rows_in_words
from benchmarks.kernels.cost import Cost
from kernels import WeightUse

__all__ = ["embed_cases", "maxima_cases", "norm_cases"]

_EPS = 1e-5


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
