"""The native CPU kernels of recurrent layers.

The library trusts the shapes of the tensors whose addresses it gets: they are asserted here.
"""

import torch

from kernels import reference
from kernels.dispatch import NATIVE
from kernels.library import commands
from kernels.native.attention import pack_batch
from kernels.native.ops import is_vector, rows_of, run_command
from kernels.native.packed_weight import ELEMENT_TYPES
from kernels.paged_kv import DeltaGates, LayerState

__all__ = ["conv_silu", "gated_delta", "short_conv"]

_WIDTHS = range(2, 5)  # the library's convolutions; kMaxWidth in src/convolution.cpp


@NATIVE.implements(reference.short_conv)
def short_conv(
    gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: LayerState
) -> torch.Tensor:
    if len(weight) not in _WIDTHS:
        return reference.short_conv(gates, weight, bias, state)
    return _convolve(gates, weight, bias, state, 0, is_gated=True)


@NATIVE.implements(reference.conv_silu)
def conv_silu(
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: LayerState,
    part: int = 0,
) -> torch.Tensor:
    if len(weight) not in _WIDTHS:
        return reference.conv_silu(values, weight, bias, state, part)
    return _convolve(values, weight, bias, state, part, is_gated=False)


@NATIVE.implements(reference.gated_delta)
def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: DeltaGates,
    state: LayerState,
) -> torch.Tensor:
    (num_tokens, num_key_heads, key_dim), (_, num_heads, value_dim) = key.shape, value.shape
    states = state.parts[-1]
    assert num_tokens == len(state.meta.slot_mapping)
    assert query.shape == key.shape
    assert num_heads % num_key_heads == 0
    assert _dense_size(states) == states.shape[2] * key_dim * value_dim
    assert states.shape[1] * states.shape[2] == num_heads
    assert states.dtype == torch.float32
    query, key, value = (_rows_of_heads(part) for part in (query, key, value))
    update, decay = (rows_of(part) for part in (gates.update, gates.decay))
    for part in (query, key, update, decay):
        assert part.dtype == value.dtype
    for part in (gates.log_rates, gates.decay_bias):
        assert is_vector(part, num_heads, value.dtype)
    assert update.shape == decay.shape == (num_tokens, num_heads)
    out = torch.empty(value.shape, dtype=value.dtype)
    run_command(
        commands.GATED_DELTA,
        ELEMENT_TYPES[value.dtype],
        query.data_ptr(),
        query.stride(0),
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        update.data_ptr(),
        update.stride(0),
        decay.data_ptr(),
        decay.stride(0),
        gates.log_rates.data_ptr(),
        gates.decay_bias.data_ptr(),
        num_key_heads,
        num_heads,
        key_dim,
        value_dim,
        states.data_ptr(),
        states.stride(0),
        states.stride(1),
        states.shape[2],
        state.block_size,
        pack_batch(state.meta).ctypes.data,
        out.data_ptr(),
        keep=(query, key, value, update, decay, out),
    )
    return out


def _convolve(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: LayerState,
    part: int,
    *,
    is_gated: bool,
) -> torch.Tensor:
    """Convolves; `inputs` are the arguments of `short_conv` or `conv_silu`."""
    (width, channels), states = weight.shape, state.parts[part]
    assert inputs.shape == (len(state.meta.slot_mapping), channels * (3 if is_gated else 1))
    assert inputs.dtype == weight.dtype == states.dtype
    assert weight.is_contiguous()
    assert bias is None or is_vector(bias, channels, inputs.dtype)
    channels_per_slice = _dense_size(states) // (width - 1)
    assert channels_per_slice * (width - 1) == _dense_size(states)
    assert channels_per_slice * states.shape[1] == channels
    inputs = rows_of(inputs)
    out = torch.empty((len(inputs), channels), dtype=inputs.dtype)
    run_command(
        commands.SHORT_CONV,
        ELEMENT_TYPES[inputs.dtype],
        is_gated,
        inputs.data_ptr(),
        inputs.stride(0),
        channels,
        width,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        states.data_ptr(),
        states.stride(0),
        states.stride(1),
        channels_per_slice,
        state.block_size,
        pack_batch(state.meta).ctypes.data,
        out.data_ptr(),
        keep=(inputs, out),
    )
    return out


def _rows_of_heads(heads: torch.Tensor) -> torch.Tensor:
    """Returns `[tokens, heads, width]`, copied if the heads of a token are not adjacent."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


def _dense_size(states: torch.Tensor) -> int:
    """Returns the elements of one slice of `LayerState.parts`, which must be adjacent."""
    heads, width = states.shape[2:]
    assert states.stride(3) == 1
    assert states.stride(2) == width or heads == 1
    return heads * width
