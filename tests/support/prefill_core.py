"""`core_of`: the class of engine cores of a tier."""

from dataclasses import replace

from typing_extensions import override

from engine.core import EngineCore
from engine.request import EngineOutput, EngineRequest

__all__ = ["core_of"]


class _PrefillCore(EngineCore):
    """Hands every request over, as the prefill service asks."""

    @override
    def check(self, request: EngineRequest) -> None:
        super().check(replace(request, hands_over=True))

    @override
    def add_request(self, request: EngineRequest) -> list[EngineOutput]:
        return super().add_request(replace(request, hands_over=True))


def core_of(role: str) -> type[EngineCore]:
    """Returns the class of cores of a tier: prefill, decode, or both."""
    return _PrefillCore if role == "prefill" else EngineCore
