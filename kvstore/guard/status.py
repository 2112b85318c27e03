"""`BackendStatus`: whether blocks can be loaded from a connector's backend and saved to it."""

from dataclasses import dataclass

__all__ = ["BackendStatus"]


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The state of a backend as one process sees it.

    Attributes:
        name: the backend's URL without secrets, or a peer's address.
        identity: of the store: processes that have the same store see the same one. Empty
            while it is unknown, and for peers.
        can_load: whether blocks can be loaded.
        can_save: whether blocks can be saved.
        problem: why not; empty if both are true.
    """

    name: str
    identity: str = ""
    can_load: bool = True
    can_save: bool = True
    problem: str = ""
