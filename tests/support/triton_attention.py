"""Checks of Triton's paged attention on the device of the tests."""

import torch

from kernels.triton import attention
from tests.support import attention_cases
from tests.support.attention_cases import AttentionCase
from tests.support.devices import DEVICE, rounding_error

__all__ = ["attend", "check", "make_case"]


def make_case(
    spans,
    *,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    block_size=16,
    dtype=torch.float32,
    **options,
) -> AttentionCase:
    """Returns a small case on the CPU; its default sizes keep interpreting and compiling short."""
    return attention_cases.make_case(
        spans,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        scale=head_dim**-0.5,
        **options,
    )


def attend(case: AttentionCase, sliding_window: int | None = None) -> torch.Tensor:
    """Returns the result of Triton's kernel on the device."""
    return case.on(DEVICE).attend(sliding_window, module=attention)


def check(case: AttentionCase, sliding_window: int | None = None) -> torch.Tensor:
    """Attends like `attend` and compares the result with the oracle."""
    is_widened = case.scales_pool is not None and case.query.dtype == torch.float16
    rounding = rounding_error(torch.bfloat16 if is_widened else case.query.dtype)
    return case.on(DEVICE).check(sliding_window, module=attention, rounding=rounding)
