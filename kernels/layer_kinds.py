"""Variants of the operations between matrix products, by which model families differ.

The values are the codes of `kernels/native/src/commands.h`, and constants of Triton kernels.
"""

from enum import Enum

__all__ = ["NormKind"]


class NormKind(Enum):
    """A root-mean-square norm's use of its weight."""

    ROUNDED = 0
    """The normalized value is rounded to the model's type, then multiplied (Llama)."""
    WIDE = 1
    """It is multiplied in float32, and the product is rounded (OLMo 2, gpt-oss)."""
    OFFSET = 2
    """As `WIDE`, but the factor is 1 + weight (Gemma)."""
