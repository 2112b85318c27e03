"""Baton: large language models served by separate prefill and decode tiers.

The public Python API. `Client` and `AsyncClient` connect to a running router; `LLM` runs the
same engine in this process. Importing this package is cheap: torch is imported on the first
use of `LLM`, grpc on the first use of a client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from baton.errors import BatonError
from baton.sampling_params import SamplingParams
from baton.structured_outputs import StructuredOutputs
from baton.version import __version__

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client
    from baton.llm import LLM

__all__ = [
    "LLM",
    "AsyncClient",
    "BatonError",
    "Client",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_LAZY_MODULES = {"LLM": "baton.llm", "Client": "baton.client", "AsyncClient": "baton.client"}


def __getattr__(name: str) -> Any:
    """Imports a public name with heavy dependencies on its first use (PEP 562)."""
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    return getattr(import_module(_LAZY_MODULES[name]), name)
