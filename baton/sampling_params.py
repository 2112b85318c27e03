"""`SamplingParams`. A public path of `baton.common.request.sampling_params`."""

from baton.common.request.sampling_params import *  # noqa: F403
from baton.common.request.sampling_params import __all__  # noqa: F401
