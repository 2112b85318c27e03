"""Assertions on tensors whose addresses the native library is given: it trusts their shapes."""

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.rotary import QkNorms, Rotation

__all__ = ["check_heads", "check_preparation", "is_vector"]


def is_vector(values: torch.Tensor, size: int, dtype: torch.dtype) -> bool:
    """Whether it is a contiguous vector of that size and type."""
    return values.dtype == dtype and values.shape == (size,) and values.is_contiguous()


def check_heads(
    states: tuple[torch.Tensor, ...], kv_layer: torch.Tensor, meta: AttentionMetadata
) -> None:
    """Asserts that `[num_tokens, heads, head_dim]` states fit the cache and the step."""
    for tensor in states:
        assert tensor.dtype == kv_layer.dtype
        assert tensor.shape[2] == kv_layer.shape[4]
        assert len(tensor) == len(meta.slot_mapping)
        assert tensor.shape[1] % kv_layer.shape[2] == 0


def check_preparation(
    query: torch.Tensor, rotation: Rotation | None, norms: QkNorms | None
) -> None:
    """Asserts that angles and norms fit a query of `[num_tokens, num_heads, head_dim]`."""
    num_tokens, _, head_dim = query.shape
    if rotation is not None:
        assert head_dim % 2 == 0
        for angles in (rotation.cos, rotation.sin):
            assert angles.dtype == torch.float32
            assert angles.shape == (num_tokens, head_dim // 2)
            assert angles.is_contiguous()
    if norms is not None:
        assert is_vector(norms.query_weight, head_dim, query.dtype)
        assert is_vector(norms.key_weight, head_dim, query.dtype)
