"""Baton: large language models served by separate prefill and decode tiers.

The public Python API. `Client` and `AsyncClient` connect to a running router; `LLM` and `AsyncLLM`
run the same engine in this process. Importing this package is cheap: torch is imported on the
first use of `LLM` or `AsyncLLM`, grpc on the first use of a client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from baton.beam_search import BeamSearchParams
from baton.errors import BatonError
from baton.prompts import TextPrompt, TokensPrompt
from baton.results import CompletionOutput, RequestOutput
from baton.sampling_params import RequestOutputKind, SamplingParams
from baton.structured_outputs import StructuredOutputs, StructuredOutputsParams
from baton.version import __version__

if TYPE_CHECKING:
    from baton.async_llm import AsyncLLM
    from baton.client import AsyncClient, Client
    from baton.engine_args import AsyncEngineArgs, EngineArgs
    from baton.llm import LLM

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BatonError",
    "BeamSearchParams",
    "Client",
    "CompletionOutput",
    "EngineArgs",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_LAZY_MODULES = {
    "LLM": "baton.llm",
    "AsyncLLM": "baton.async_llm",
    "EngineArgs": "baton.engine_args",
    "AsyncEngineArgs": "baton.engine_args",
    "Client": "baton.client",
    "AsyncClient": "baton.client",
}


def __getattr__(name: str) -> Any:
    """Imports a public name with heavy dependencies on its first use (PEP 562)."""
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    return getattr(import_module(_LAZY_MODULES[name]), name)
