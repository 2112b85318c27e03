"""Records the versions of kernels that Triton would compile for launches in its interpreter."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from triton.runtime.interpreter import InterpretedFunction

__all__ = ["Version", "kernel_version", "recording_versions"]

Version = tuple[object, ...]


@contextmanager
def recording_versions(seen: set[Version]) -> Iterator[None]:
    """Adds the version that Triton would compile for each launch: (kernel, argument or option...).

    Each argument is (name, type and the properties of its value that are compiled in): whether a
    number is 1 or divisible by 16, and whether a tensor's address is divisible by 16. See
    `specialize_impl` in Triton.
    """
    run = InterpretedFunction.run

    def record(function, *args, grid, warmup, **kwargs):
        seen.add(kernel_version(function, args, kwargs))
        return run(function, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = record
    try:
        yield
    finally:
        InterpretedFunction.run = run


def kernel_version(function, args, kwargs, is_aligned=None) -> Version:
    """Returns the version that Triton would compile for a launch, as `recording_versions` does.

    Args:
        function: the kernel.
        args: arguments of the launch.
        kwargs: likewise.
        is_aligned: whether a tensor's address is divisible by 16; None reads the address.
    """
    parameters = inspect.signature(function.fn).parameters
    values = dict(zip(parameters, args, strict=False)) | kwargs
    unspecialized = function.kwargs.get("do_not_specialize") or ()
    unaligned = function.kwargs.get("do_not_specialize_on_alignment") or ()
    is_aligned = is_aligned or _has_aligned_address
    version = [
        (name, value)
        if name not in parameters or "constexpr" in str(parameters[name].annotation)
        else (name, *_specialization(value, name in unspecialized, name in unaligned, is_aligned))
        for name, value in sorted(values.items())
    ]
    return (function.fn.__name__, *version)


def _has_aligned_address(tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def _specialization(value, is_unspecialized, is_unaligned, is_aligned):
    if isinstance(value, torch.Tensor):
        return value.dtype, is_unspecialized or is_unaligned or is_aligned(value)
    if value is None or isinstance(value, (bool, float)):
        return (type(value),)
    width = 32 if -(1 << 31) <= value < 1 << 31 else 64
    if is_unspecialized:
        return (width,)
    return (1,) if value == 1 else (width, is_unaligned or value % 16 == 0)
