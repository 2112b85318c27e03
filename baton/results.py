"""Results of clients and `LLM`. A public path of `baton.common.request.results`."""

from baton.common.request.results import *  # noqa: F403
from baton.common.request.results import __all__  # noqa: F401
