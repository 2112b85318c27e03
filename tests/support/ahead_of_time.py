"""Compiles launched kernels for a GPU, on a machine that may have none.

Inside `compiling`, a launch runs nothing: its kernel is compiled to machine code for the given
arguments. This works only in a process where `triton` does not interpret.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from kernels.triton import launch

__all__ = ["Compiled", "compiling"]

_HOPPER = GPUTarget("cuda", 90, 32)
_DTYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        name: name of the kernel's function.
        shared_bytes: shared memory of a program.
        ptx: the kernel's PTX code.
        cubin: its machine code, a file.
    """

    name: str
    shared_bytes: int
    ptx: str
    cubin: bytes


@contextmanager
def compiling(device_name: str) -> Iterator[list[Compiled]]:
    """Yields a list of the kernels compiled so far, with the launch parameters of a device."""
    compiled: list[Compiled] = []
    seen = set()

    def compile_launch(function, *args, grid, warmup, **kwargs):
        source, key = _source(function, args, kwargs)
        if key not in seen:
            seen.add(key)
            compiled.append(_compile(source, kwargs, function))

    run = JITFunction.run
    JITFunction.run = compile_launch
    try:
        with launch.replaced_launch_table(launch.load_launch_table(device_name)):
            yield compiled
    finally:
        JITFunction.run = run


def _source(function, args, kwargs):
    """Returns the kernel, specialized for these arguments as by a launch, and its key."""
    values = dict(zip(function.arg_names, args, strict=False))
    values.update({name: kwargs[name] for name in function.arg_names if name in kwargs})
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(function.params):
        name, value = parameter.name, values[parameter.name]
        signature[name] = _type_of(value, parameter)
        if signature[name] == "constexpr":
            constants[(place,)] = value
        elif _is_divisible(value, parameter):
            attributes[(place,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in kwargs.items() if name not in values}
    key = (function.fn.__name__, repr((signature, constants, attributes, options)))
    return ASTSource(function, signature, constants, attributes), key


def _type_of(value, parameter):
    if value is None or parameter.is_constexpr:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + _DTYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value == 1 and not parameter.do_not_specialize:
        return "constexpr"
    return "i32" if abs(value) < 1 << 31 else "i64"


def _is_divisible(value, parameter):
    if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
        return False
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _compile(source, kwargs, function):
    names = set(function.arg_names)
    options = {name: value for name, value in kwargs.items() if name not in names}
    result = triton.compile(source, target=_HOPPER, options=options)
    asm = result.asm
    return Compiled(function.fn.__name__, result.metadata.shared, asm["ptx"], asm["cubin"])
