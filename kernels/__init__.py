"""Tensor primitives. `kernels.linear` and all others are the names of `kernels.dispatch`.

Importing this package is cheap: torch is loaded when one of them is first used. Who only copies
memory, by `kernels.native.memory_runs`, does without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.dispatch import *  # noqa: F403  those of its `__all__`
else:

    def __getattr__(name: str) -> Any:
        """Brings all names at the first use of one (PEP 562)."""
        if not name.startswith("__") or name == "__all__":  # others of these are asked for by tools
            dispatch = import_module("kernels.dispatch")
            public = {"__all__": dispatch.__all__} | {
                each: getattr(dispatch, each) for each in dispatch.__all__
            }
            globals().update(public)
            if name in public:
                return public[name]
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("kernels.dispatch").__all__})
