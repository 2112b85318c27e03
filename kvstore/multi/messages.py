"""What goes between the halves of a connector over several others. Pure."""

from dataclasses import dataclass

from kvstore.connector import ConnectorWork, TransferResults

__all__ = ["MultiResults", "MultiWork"]


@dataclass(frozen=True, slots=True)
class MultiWork(ConnectorWork):
    """What each member shall start."""

    members: tuple[ConnectorWork, ...] = ()

    def __bool__(self) -> bool:
        return any(self.members)


@dataclass(frozen=True, slots=True)
class MultiResults(TransferResults):
    """What each member reports, about jobs that the members' scheduler halves numbered."""

    members: tuple[TransferResults, ...] = ()

    def __bool__(self) -> bool:
        return any(self.members)
