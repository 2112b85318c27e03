"""The errors that Baton raises on purpose. A public path of `baton.common.errors`."""

from baton.common.errors import *  # noqa: F403
from baton.common.errors import __all__  # noqa: F401
