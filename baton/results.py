"""Results of clients and `LLM`. A public path of `baton.common.request.results`."""

from baton.common.request.results import (
    CompletionChunk,
    CompletionOutput,
    Logprob,
    Logprobs,
    ModelDescription,
    RequestMetrics,
    RequestOutput,
    Timings,
    Usage,
    logprobs_of,
)

__all__ = [
    "CompletionChunk",
    "CompletionOutput",
    "Logprob",
    "Logprobs",
    "ModelDescription",
    "RequestMetrics",
    "RequestOutput",
    "Timings",
    "Usage",
    "logprobs_of",
]
