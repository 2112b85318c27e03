"""Ranks: processes that compute one model together, each with a part of its weights and KV.

    EngineRanks   all ranks of an engine: rank 0 sends batches and tokens, stages send hidden states
    RankGroup     the ranks that divide each layer: they add up and join what each has computed

All ranks of a group call the same operations in the same order; each waits for the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from typing_extensions import override

if TYPE_CHECKING:
    import torch

__all__ = [
    "Cut",
    "DeviceRankGroup",
    "EngineRanks",
    "GroupEndedError",
    "RankGroup",
    "RanksLostError",
]


class RanksLostError(RuntimeError):
    """Another rank has failed, was lost, or has not answered in time.

    The ranks of a group depend on each other, so none of them can go on.
    """


class GroupEndedError(RuntimeError):
    """Rank 0 has closed the group."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The range of an axis that one rank has.

    Attributes:
        total: size of the whole axis.
        start: first index of the range.
        end: end of the range, excluded.
    """

    total: int
    start: int
    end: int

    @classmethod
    def whole(cls, total: int) -> Self:
        """The range that is the whole axis."""
        return cls(total, 0, total)

    @property
    def size(self) -> int:
        """Size of the range."""
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole axis."""
        return self.size == self.total

    @property
    def slice(self) -> slice:
        """The range as an index."""
        return slice(self.start, self.end)

    def times(self, width: int) -> "Cut":
        """Returns the range of an axis on which each index stands for `width` elements."""
        return Cut(self.total * width, self.start * width, self.end * width)


class EngineRanks(ABC):
    """One rank's access to all ranks of its engine.

    Attributes:
        rank: number of this rank, from 0. Rank 0 schedules, and draws tokens.
        size: number of ranks.
        num_local: number of them that share this machine.
        local_rank: number of this rank among those of its machine, which have a GPU each.
        stage: number of the pipeline stage that this rank computes, from 0; rank 0 computes the
            last one.
        num_stages: number of pipeline stages.
    """

    rank: int
    size: int
    num_local: int
    local_rank: int = 0
    stage: int = 0
    num_stages: int = 1

    def stage_of(self, rank: int) -> int:
        """Returns the number of the stage that a rank computes."""
        return self.num_stages - 1 - rank * self.num_stages // self.size

    @property
    @abstractmethod
    def group(self) -> "RankGroup | None":
        """The ranks that compute the same stage; None if there is no other."""

    @property
    def device_group(self) -> "DeviceRankGroup | None":
        """`group`, if its ranks have a GPU each."""
        group = self.group
        return group if isinstance(group, DeviceRankGroup) else None

    @abstractmethod
    def limit_waits(self, timeout_s: float) -> None:
        """Sets the longest wait for another rank. At first waits do not end: ranks may take long
        to load.
        """

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Sends bytes to all other ranks, which `receive`.

        Raises:
            RanksLostError: another rank is lost, or too late. So do all methods that wait.
        """

    @abstractmethod
    def receive(self, *, waits_forever: bool = False) -> bytes:
        """Waits for what rank 0 sends, as long as it takes if `waits_forever`."""

    @abstractmethod
    def send_tokens(self, data: bytes) -> None:
        """Sends the tokens of a step to the other ranks of the first stage."""

    @abstractmethod
    def receive_tokens(self, *, waits: bool = True) -> bytes | None:
        """Returns the next step's tokens, on another rank of the first stage; None if they have
        not arrived and `waits` is False.
        """

    @abstractmethod
    def send_hidden(self, hidden: "torch.Tensor") -> None:
        """Sends hidden states, on the host, to the next stage. They may change afterwards."""

    @abstractmethod
    def receive_hidden(self, hidden: "torch.Tensor") -> None:
        """Fills a contiguous tensor on the host with the hidden states of the stage before."""

    @abstractmethod
    def abort(self) -> None:
        """Makes all operations that wait for another rank fail. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Releases the ranks; nothing else may be called any more. Idempotent."""


class RankGroup(EngineRanks):
    """One rank's access to the ranks that divide each layer among them."""

    @property
    @override
    def group(self) -> "RankGroup":
        return self

    @override
    def send_tokens(self, data: bytes) -> None:
        self.send(data)

    @override
    def receive_tokens(self, *, waits: bool = True) -> bytes:
        return self.receive()

    @override
    def send_hidden(self, hidden: "torch.Tensor") -> None:
        raise AssertionError("there is one stage")

    @override
    def receive_hidden(self, hidden: "torch.Tensor") -> None:
        raise AssertionError("there is one stage")

    def cut(self, total: int) -> Cut:
        """Returns this rank's range of an axis; the ranks' sizes differ by one at most."""
        start, end = (rank * total // self.size for rank in (self.rank, self.rank + 1))
        return Cut(total, start, end)

    @abstractmethod
    def all_reduce(self, partial: "torch.Tensor") -> "torch.Tensor":
        """Adds up the ranks' tensors.

        Args:
            partial: `[rows, columns]` float32, contiguous.

        Returns:
            The sum, equal to the bit on all ranks.
        """

    @abstractmethod
    def gather_columns(self, part: "torch.Tensor", num_columns: int) -> "torch.Tensor":
        """Joins the ranks' columns on rank 0.

        Args:
            part: `[rows, cut(num_columns).size]` float32, contiguous.
            num_columns: number of columns over all ranks.

        Returns:
            `[rows, num_columns]` on rank 0; `part` on the others.
        """


class DeviceRankGroup(RankGroup):
    """A group whose ranks have a GPU each. Sums and joins are launched on its current stream."""

    @abstractmethod
    def broadcast(self, values: "torch.Tensor") -> None:
        """Overwrites a contiguous int64 tensor with that of rank 0."""

    @abstractmethod
    def wait(self, is_done: Callable[[], bool]) -> None:
        """Waits for what was launched.

        Args:
            is_done: whether the device has completed it.

        Raises:
            RanksLostError: another rank is lost, or it takes too long.
        """
