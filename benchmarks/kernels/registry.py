"""The primitives that are measured: a new one is a function of cases and a line here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from benchmarks.kernels.attention import attention_cases, rotation_cases
from benchmarks.kernels.case import Case
from benchmarks.kernels.pointwise import embed_cases, maxima_cases, norm_cases
from benchmarks.kernels.products import gated_linear_cases, linear_cases
from benchmarks.kernels.shapes import DecoderShape

__all__ = ["PRIMITIVES", "make_cases"]

PRIMITIVES: Mapping[str, Callable[[DecoderShape, torch.dtype], Iterator[Case]]] = MappingProxyType(
    {
        "linear": linear_cases,
        "linear_silu_and_mul": gated_linear_cases,
        "paged_attention": attention_cases,
        "rotate_and_write_kv": rotation_cases,
        "rms_norm": norm_cases,
        "embed": embed_cases,
        "row_maxima": maxima_cases,
    }
)
"""By name: the cases of a model in a type."""


def make_cases(primitives: Sequence[str], shape: DecoderShape, dtype: torch.dtype) -> list[Case]:
    """All cases of some of `PRIMITIVES`."""
    return [case for name in primitives for case in PRIMITIVES[name](shape, dtype)]
