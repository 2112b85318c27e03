"""Variants of the operations between matrix products, by which model families differ.

The values are the codes of `kernels/native/src/commands.h`, and constants of Triton kernels.
"""

from enum import Enum

__all__ = ["CLAMP_LIMIT", "CLAMP_SLOPE", "Activation", "NormKind"]

CLAMP_LIMIT, CLAMP_SLOPE = 7.0, 1.702
"""Constants of `Activation.CLAMPED_SILU`."""


class NormKind(Enum):
    """A root-mean-square norm's use of its weight."""

    ROUNDED = 0
    """The normalized value is rounded to the model's type, then multiplied (Llama)."""
    WIDE = 1
    """It is multiplied in float32, and the product is rounded (OLMo 2, gpt-oss)."""
    OFFSET = 2
    """As `WIDE`, but the factor is 1 + weight (Gemma)."""


class Activation(Enum):
    """A function of single numbers, between the products of an MLP or as a gate.

    The code 0 stands for none.
    """

    SILU = 1
    """`x * sigmoid(x)`."""
    GELU = 2
    """`x * (1 + erf(x / sqrt(2))) / 2`."""
    GELU_TANH = 3
    """`x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2`."""
    RELU = 4
    """`max(x, 0)`."""
    SIGMOID = 5
    """`1 / (1 + exp(-x))`."""
    CLAMPED_SILU = 6
    """`y * sigmoid(CLAMP_SLOPE * y)` with `y = min(x, CLAMP_LIMIT)`.

    As the activation of a gate, it also changes the gated value, to
    `clamp(value, -CLAMP_LIMIT, CLAMP_LIMIT) + 1` (gpt-oss, arXiv:2508.10925).
    """
