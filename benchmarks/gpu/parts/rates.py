"""Measures the device's ceilings: bytes copied and matrix operations per second."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Record, summary
from benchmarks.gpu.timing import time_calls
from benchmarks.kernels.cost import Cost
from benchmarks.model_cost import Ceilings

__all__ = ["COPY", "PRODUCT", "ceilings_of", "measure"]

COPY, PRODUCT = "copy", "matrix product"
_NUM_BUFFERS = 3


def measure(plan: Plan, ceilings: Ceilings | None, record: Record) -> None:
    """Measures both rates; `ceilings` are not used."""
    device = torch.device(plan.device)
    record.attempt("rate", COPY, lambda: _copy(plan, device))
    record.attempt("rate", PRODUCT, lambda: _product(plan, device))


def ceilings_of(results: Sequence[Mapping[str, Any]]) -> Ceilings | None:
    """Returns the ceilings among the results, for other parts; None if they are missing."""
    rates = {result["name"]: result for result in results if "median_us" in result}
    if not {COPY, PRODUCT} <= rates.keys():
        return None
    return Ceilings(1e9 * rates[COPY]["gb_per_s"], 1e12 * rates[PRODUCT]["tflop_per_s"])


def _copy(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Measures copies, which read and write each byte. No cache holds the rotating buffers."""
    buffers = [
        torch.randint(256, (plan.copied_bytes,), dtype=torch.uint8, device=device)
        for _ in range(_NUM_BUFFERS)
    ]
    targets = [*buffers[1:], buffers[0]]
    calls = [partial(target.copy_, source) for source, target in zip(buffers, targets, strict=True)]
    samples = time_calls(calls, device, plan.sample_s, captured=False)
    return summary(samples, Cost(2 * plan.copied_bytes)) | {"bytes": 2 * plan.copied_bytes}


def _product(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Measures products of random numbers: zeros take less power, and so run faster."""
    size, dtype = plan.matrix_size, getattr(torch, plan.dtype)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    call = partial(torch.mm, left, right, out=out)
    samples = time_calls([call], device, 4 * plan.sample_s, captured=False)
    cost = Cost(3 * size * size * dtype.itemsize, 2 * size**3)
    return summary(samples, cost) | {"size": size, "dtype": plan.dtype}
