"""Variants of the operations between matrix products, by which model families differ.

The values are the codes of `kernels/native/src/commands.h`, and constants of Triton kernels.
"""

from enum import Enum

__all__ = ["Activation", "NormKind"]


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
