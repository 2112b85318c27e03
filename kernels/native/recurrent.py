"""The native CPU kernels of recurrent layers.

The library trusts the shapes of the tensors whose addresses it gets: they are asserted here.
"""

import torch

from kernels import reference
from kernels.dispatch import NATIVE
from kernels.library import commands
from kernels.native.attention import pack_batch
from kernels.native.ops import is_vector, run_command
from kernels.native.packed_weight import ELEMENT_TYPES
from kernels.paged_kv import LayerState

__all__ = ["short_conv"]

_WIDTHS = range(2, 5)  # the library's convolutions; kMaxWidth in src/convolution.cpp


@NATIVE.implements(reference.short_conv)
def short_conv(
    gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: LayerState
) -> torch.Tensor:
    width, channels = weight.shape
    if width not in _WIDTHS:
        return reference.short_conv(gates, weight, bias, state)
    assert gates.shape == (len(state.meta.slot_mapping), 3 * channels)
    assert gates.dtype == weight.dtype == state.parts[0].dtype
    assert weight.is_contiguous()
    assert bias is None or is_vector(bias, channels, gates.dtype)
    if gates.stride(1) != 1:
        gates = gates.contiguous()
    states, channels_per_slice = state.parts[0], _dense_size(state.parts[0]) // (width - 1)
    assert channels_per_slice * (width - 1) == _dense_size(states)
    assert channels_per_slice * states.shape[1] == channels
    out = torch.empty((len(gates), channels), dtype=gates.dtype)
    run_command(
        commands.SHORT_CONV,
        ELEMENT_TYPES[gates.dtype],
        gates.data_ptr(),
        gates.stride(0),
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
        keep=(gates, out),
    )
    return out


def _dense_size(states: torch.Tensor) -> int:
    """Returns the elements of one slice of `LayerState.parts`, which must be adjacent."""
    heads, width = states.shape[2:]
    assert states.stride(3) == 1
    assert states.stride(2) == width or heads == 1
    return heads * width
