"""Baton: large language models served by separate prefill and decode tiers.

The public Python API. `Client` and `AsyncClient` connect to a running router; `LLM` and `AsyncLLM`
run the same engine in this process. Importing this package is cheap: torch is imported on the
first use of `LLM` or `AsyncLLM`, grpc on the first use of a client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from baton.common.errors import BatonError
from baton.common.own_packages import add_to_path, check_names
from baton.common.request.prompts import TextPrompt, TokensPrompt
from baton.common.request.results import CompletionOutput, RequestOutput
from baton.common.request.sampling_params import RequestOutputKind, SamplingParams
from baton.common.request.structured_outputs import StructuredOutputs, StructuredOutputsParams
from baton.common.version import __version__
from baton.offline.beam_search import BeamSearchParams

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client
    from baton.offline.async_llm import AsyncLLM
    from baton.offline.engine_args import AsyncEngineArgs, EngineArgs
    from baton.offline.llm import LLM

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

add_to_path()

_LAZY_MODULES = {
    "LLM": "baton.offline.llm",
    "AsyncLLM": "baton.offline.async_llm",
    "EngineArgs": "baton.offline.engine_args",
    "AsyncEngineArgs": "baton.offline.engine_args",
    "Client": "baton.client",
    "AsyncClient": "baton.client",
}


def __getattr__(name: str) -> Any:
    """Imports a public name with heavy dependencies on its first use (PEP 562)."""
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    check_names()
    return getattr(import_module(_LAZY_MODULES[name]), name)
