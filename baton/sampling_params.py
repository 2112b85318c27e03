"""`SamplingParams`. A public path of `baton.common.request.sampling_params`."""

from baton.common.request.sampling_params import (
    AS_MANY_AS_FIT,
    MAX_CANDIDATES,
    MAX_EXTRA_ARGS_BYTES,
    MAX_LOGPROBS,
    MAX_STOP_BYTES,
    MAX_STOPS,
    RequestOutputKind,
    SamplingParams,
    over_defaults,
    stated_params,
)

__all__ = [
    "AS_MANY_AS_FIT",
    "MAX_CANDIDATES",
    "MAX_EXTRA_ARGS_BYTES",
    "MAX_LOGPROBS",
    "MAX_STOPS",
    "MAX_STOP_BYTES",
    "RequestOutputKind",
    "SamplingParams",
    "over_defaults",
    "stated_params",
]
