"""Tensor kernels, each called by its name, such as `kernels.linear`, and the types they take.

Importing this package is cheap: torch is imported when one of the names is first used. Code that
only copies memory, through `kernels.native.memory_runs`, never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.experts import *  # noqa: F403
    from kernels.host import *  # noqa: F403
    from kernels.layer_kinds import *  # noqa: F403
    from kernels.paged_kv import *  # noqa: F403
    from kernels.ranks import *  # noqa: F403
    from kernels.recorded_step import *  # noqa: F403
    from kernels.reference import *  # noqa: F403
    from kernels.row_state import *  # noqa: F403
    from kernels.weights import *  # noqa: F403
else:
    _MODULES = (
        "experts",
        "host",
        "layer_kinds",
        "paged_kv",
        "ranks",
        "recorded_step",
        "row_state",
        "weights",
    )

    def _public_names() -> dict[str, Any]:
        """Returns the exports of these modules, and dispatched kernels in place of references."""
        modules = [import_module(f"kernels.{name}") for name in _MODULES]
        public = {name: getattr(module, name) for module in modules for name in module.__all__}
        reference = vars(import_module("kernels.reference")).items()
        public |= {name: value for name, value in reference if callable(value)}
        kernels = import_module("kernels.dispatch").KERNELS.items()
        return public | {name: kernel.call for name, kernel in kernels}

    def __getattr__(name: str) -> Any:
        """Defines all public names when one is first used (PEP 562)."""
        if not name.startswith("__") or name == "__all__":  # tools look for other such names
            public = _public_names()
            globals().update(public, __all__=sorted(public))
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_public_names()})
