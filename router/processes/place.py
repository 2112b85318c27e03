"""`ProcessPlace`: which of a router's processes this one is."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["PLACE_VARIABLE", "ProcessPlace"]

PLACE_VARIABLE = "_BATON_ROUTER_PROCESS"


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """The place of a process among those of its router.

    Attributes:
        index: the process's number, from 0.
        count: the number of processes.
        folder: what they share: sockets, and the counts of limits. Other users cannot read it.
    """

    index: int
    count: int
    folder: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "ProcessPlace | None":
        """Returns the place that the parent has given this process; None for a router of one
        process.
        """
        text = environment.get(PLACE_VARIABLE)
        return cls(**json.loads(text)) if text else None

    @property
    def environment(self) -> dict[str, str]:
        """The variable that the process reads its place from."""
        return {PLACE_VARIABLE: json.dumps(asdict(self))}

    @property
    def target(self) -> str:
        """The gRPC target at which this process answers the others and the parent."""
        return f"unix:{self.folder}/{self.index}.sock"

    @property
    def others(self) -> Sequence["ProcessPlace"]:
        """The places of the other processes."""
        numbers = (number for number in range(self.count) if number != self.index)
        return [ProcessPlace(number, self.count, self.folder) for number in numbers]

    @property
    def parent_target(self) -> str:
        """The gRPC target of the process that started them."""
        return self.parent_of(Path(self.folder))

    @staticmethod
    def parent_of(folder: Path) -> str:
        """The same, of all processes that share a folder."""
        return f"unix:{folder}/parent.sock"
