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
        dispatch = import_module("kernels.dispatch")
        if name not in dispatch.__all__:
            raise AttributeError(f"module 'kernels' has no attribute {name!r}")
        globals().update({public: getattr(dispatch, public) for public in dispatch.__all__})
        return globals()[name]
