"""Measures the kernels, one by one, on the shapes of a model."""

from benchmarks.gpu.attention_cases import attention_cases, rotation_cases
from benchmarks.gpu.kernel_case import measure_case
from benchmarks.gpu.plan import MODELS, Plan
from benchmarks.gpu.record import Record
from benchmarks.gpu.small_cases import (
    block_cases,
    pointwise_cases,
    product_cases,
    sampling_cases,
)
from benchmarks.kernels.case import DecoderShape
from benchmarks.model_cost import Ceilings

__all__ = ["measure"]

_KINDS = (
    attention_cases,
    rotation_cases,
    block_cases,
    sampling_cases,
    pointwise_cases,
    product_cases,
)


def measure(plan: Plan, ceilings: Ceilings | None, record: Record) -> None:
    """Measures all cases. Kernels that have aims come first."""
    shape = DecoderShape.of_config(MODELS[plan.kernels_of])
    for make_cases in _KINDS:
        for case in make_cases(shape, plan):
            measure_case(case, plan, ceilings, record)
