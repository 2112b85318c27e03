"""Registers kernels, and calls the implementation that serves the arguments' device and type.

A kernel is defined by its reference, a function of plain torch in `kernels.reference` under the
decorator `kernel`: the reference's signature and docstring are the kernel's. A backend's
implementation is registered by `Backend.implements`. Devices and types that have none use the
reference. See docs/adr/0027-kernel-registration.md.
"""

from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pkgutil import iter_modules
from typing import Any, Final, ParamSpec, TypeVar

import torch

from kernels.library import library

__all__ = ["KERNELS", "NATIVE", "TRITON", "Backend", "Kernel", "Key", "kernel"]

P = ParamSpec("P")
R = TypeVar("R")

Key = tuple[str, torch.dtype | None]
"""Device type, such as "cuda", and element type; None for kernels that serve all element types."""

_TRITON_TYPES = (None, torch.float32, torch.bfloat16, torch.float16)
_NATIVE_TYPES = (None, torch.float32, torch.bfloat16)


class Backend:
    """A family of implementations of kernels.

    Args:
        package: its modules, which register the implementations. They are imported at first use.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._registered: dict[str, Callable[..., Any]] = {}

    def implements(self, reference: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Registers the decorated function as this backend's implementation of `reference`."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self._registered[reference.__name__] = function
            return function

        return register

    @cached_property
    def implementations(self) -> dict[str, Callable[..., Any]]:
        """All implementations, by the names of their kernels."""
        package = import_module(self._package)
        for module in iter_modules(package.__path__):
            import_module(f"{self._package}.{module.name}")
        return self._registered


NATIVE: Final = Backend("kernels.native")
"""The C++ library; serves the CPU."""
TRITON: Final = Backend("kernels.triton")
"""Triton; serves NVIDIA GPUs and, in its interpreter, the CPU."""


class Kernel(dict[Key, Callable[..., Any]]):
    """The implementations of one kernel that were called so far.

    Attributes:
        reference: the function that defines the kernel.
        call: the function that users call; it has the reference's signature.

    Args:
        reference: the function that defines the kernel.
        device: see `kernel`.
        dtype: see `kernel`.
    """

    def __init__(self, reference: Callable[..., Any], device: str, dtype: str) -> None:
        self.reference = reference
        self.call = self._make_call(device, dtype)

    def __missing__(self, key: Key) -> Callable[..., Any]:
        """Finds the implementation for a device and type that was not called yet."""
        backend = _backend_for(*key)
        implementation = self.reference
        if backend is not None:
            implementation = backend.implementations.get(implementation.__name__, implementation)
        self[key] = implementation
        return implementation

    def _make_call(self, device: str, dtype: str) -> Callable[..., Any]:
        """Compiles a function that looks up the implementation and calls it.

        One that takes `*args, **kwargs` would cost each call some 0.2 us more.
        """
        parameters = signature(self.reference).parameters.values()
        keywords = [
            parameter.name for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY
        ]
        others = [parameter.name for parameter in parameters if parameter.name not in keywords]
        taken = ", ".join([*others, *(["*", *keywords] if keywords else [])])
        passed = ", ".join([*others, *(f"{name}={name}" for name in keywords)])
        source = f"lambda {taken}: implementations[{device}.type, {dtype}]({passed})"
        code = compile(source, f"<dispatch of {self.reference.__name__}>", "eval")
        call = eval(code, {"implementations": self})  # noqa: S307  the source is ours
        call.__defaults__ = self.reference.__defaults__
        call.__kwdefaults__ = self.reference.__kwdefaults__
        return update_wrapper(call, self.reference)


KERNELS: Final[dict[str, Kernel]] = {}
"""All kernels by name; complete once `kernels.reference` is imported."""


def kernel(device: str, dtype: str = "None") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers the decorated function as a kernel's reference.

    Args:
        device: an expression over the function's parameters: the device whose implementation is
            called.
        dtype: likewise, the element type; "None" if implementations serve all types.

    Returns:
        A decorator that returns the function unchanged. Users call `kernels.NAME`.
    """

    def register(reference: Callable[P, R]) -> Callable[P, R]:
        KERNELS[reference.__name__] = Kernel(reference, device, dtype)
        return reference

    return register


@cache
def _backend_for(device_type: str, dtype: torch.dtype | None) -> Backend | None:
    """Returns the backend for a device and an element type; None for plain torch.

    Raises:
        ConfigurationError: see `kernels.library.library.select`.
    """
    if device_type == "cuda":
        has_triton = dtype in _TRITON_TYPES and find_spec("triton") is not None
        return TRITON if has_triton else None
    if device_type != "cpu":
        return None
    if library.select().variant == library.TRITON:
        return TRITON if dtype in _TRITON_TYPES else None
    return NATIVE if dtype in _NATIVE_TYPES and library.load() is not None else None
