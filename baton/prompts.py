"""Prompts as users give them. A public path of `baton.common.request.prompts`."""

from baton.common.request.prompts import *  # noqa: F403
from baton.common.request.prompts import __all__  # noqa: F401
