"""Rotary position embedding: the angles of each position, scaled for long contexts."""

import math

import torch
from torch import nn

import kernels
from engine.models.rope_config import RopeConfig
from kernels import Rotation

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding(nn.Module):
    """Cosines and sines of each position's angles (arXiv:2104.09864).

    Args:
        rope: base and scaling.
    """

    inverse_frequencies: torch.Tensor

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        # On the CPU, even while the parameters are created on the meta device.
        frequencies = _inverse_frequencies(rope)  # [rotary_dim / 2]
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        self.amplitude = _amplitude(rope)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Computes the angles of `[num_tokens]` int64 positions."""
        return kernels.rotary_angles(positions, self.inverse_frequencies, self.amplitude)


def _inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    dim = rope.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    if rope.rope_type == "longrope":  # arXiv:2402.13753
        factors = rope.long_factors if rope.is_long else rope.short_factors
        factors_of_pairs = torch.tensor(factors, dtype=torch.float32, device="cpu")
        return 1.0 / (factors_of_pairs * rope.theta**exponents)
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "proportional":
        turns = torch.arange(len(frequencies), device="cpu") < rope.num_turning
        return frequencies / rope.factor * turns
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: stretches long wavelengths, keeps short ones, and blends between."""
    turns = rope.original_len * frequencies / (2 * math.pi)  # in the original context
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """YaRN (arXiv:2309.00071): like `_llama3`, but the blend is linear in the dimension."""
    num_pairs = len(frequencies)

    def pair_turning(turns: float) -> float:
        wavelengths = rope.original_len / (turns * 2 * math.pi)
        return num_pairs * math.log(wavelengths) / math.log(rope.theta)

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    if low == high:
        high += 0.001  # avoids division by zero
    pairs = torch.arange(num_pairs, dtype=torch.float32, device="cpu")
    slowed = ((pairs - low) / (high - low)).clamp(0, 1)
    return slowed * frequencies / rope.factor + (1 - slowed) * frequencies


def _amplitude(rope: RopeConfig) -> float:
    """Returns the factor of YaRN and LongRoPE on cosines and sines; 1 for other types."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        growth = max(rope.factor, 1.0)
        return math.sqrt(1 + math.log(growth) / math.log(rope.original_len))
    if rope.mscale and rope.mscale_all_dim:
        return rope.temperature(rope.mscale) / rope.temperature(rope.mscale_all_dim)
    return rope.temperature(1.0)
