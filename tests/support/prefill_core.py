"""`with_role`: an engine core that gets the requests of a tier."""

from dataclasses import replace
from typing import Any

from engine.loop.core import EngineCore

__all__ = ["with_role"]


def with_role(core: EngineCore, role: str) -> EngineCore:
    """Makes the core of a prefill tier hand every request over, as the prefill service asks.

    Args:
        core: the core, which is changed and returned.
        role: prefill, decode, or both.
    """
    if role == "prefill":
        check, add = core.check, core.scheduler.add
        patched: Any = core
        patched.check = lambda request: check(replace(request, hands_over=True))
        patched.scheduler.add = lambda request: add(replace(request, hands_over=True))
    return core
