"""Jobs of a KV connector, their results, and the messages between its two halves. Pure.

`ConnectorWork` carries jobs from the scheduler half to the worker half, `TransferResults` carries
their results back. `kvstore.connector` describes the contract that they belong to.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Self

from kvstore.handoff import KvHandoff

__all__ = [
    "CORRUPT",
    "MISSING",
    "ConnectorWork",
    "LoadJob",
    "LoadResult",
    "LookupJob",
    "LookupResult",
    "SaveJob",
    "SaveResult",
    "TransferResults",
    "cause_of",
]

MISSING = "missing"
"""The error of a load whose next block is not there."""
CORRUPT = "corrupt"
"""The error of a load whose next object is not what was saved, or of another version's format."""


def cause_of(error: str) -> str:
    """Returns the kind of an error of a result, without its details."""
    return error.partition(":")[0]


@dataclass(frozen=True, slots=True)
class LookupJob:
    """Counts how many of the keys, from the first on without a gap, can be loaded.

    Attributes:
        job_id: unique among all jobs of one connector.
        keys: one per transfer block.
    """

    job_id: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fills blocks of the pool with saved KV, converted to the pool's type.

    Attributes:
        job_id: unique among all jobs of one connector.
        keys: one per block, in the prompt's order.
        block_ids: the transfer blocks of the pool to write to.
        handoff: the terms under which a prefill engine offers the blocks; None if a look-up
            found them.
    """

    job_id: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    handoff: KvHandoff | None = None


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Makes blocks of the pool loadable by other engines.

    Attributes:
        job_id: unique among all jobs of one connector.
        keys: one per block, in the prompt's order.
        block_ids: the transfer blocks of the pool to read.
        num_tail_tokens: valid tokens in the last block if it is a partial tail; 0 if all blocks
            are full. The other slots of a tail may hold another request's KV, so they must not
            leave this process.
        num_found: the number of leading blocks that were found in the engine's cache instead of
            being computed for this job. Another job may have saved them already.
        lease_id: the id of the handoff that the blocks are saved for; empty if there is none.
        step: the number of the step that computes the blocks; it begins after the job. 0 if the
            blocks are computed already. A job with a step has full blocks only.
        tail_group: the layer group whose KV a partial tail has; see `KvLayout.group_shapes`.
    """

    job_id: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    num_tail_tokens: int = 0
    num_found: int = 0
    lease_id: str = ""
    step: int = 0
    tail_group: int = 0


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The answer to a look-up.

    Attributes:
        job_id: the look-up's.
        num_blocks: leading keys whose blocks can be loaded now.
        error: why further ones may be there all the same; empty if a block is missing.
    """

    job_id: int
    num_blocks: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of a load.

    Attributes:
        job_id: the load's.
        num_blocks: leading blocks that hold verified bytes. The other blocks of the job must not
            be read: they may hold anything.
        error: why fewer blocks than asked arrived: `MISSING`, `CORRUPT`, "unavailable",
            "cancelled" or "failed", perhaps with a colon and details; empty if all arrived.
        seconds: how long the bytes took to arrive; 0 if it was not measured. The engine sees the
            result only at its next poll, so its own clock would say more. Results that differ in
            this alone are equal.
    """

    job_id: int
    num_blocks: int
    error: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The end of a save. Results that differ in their times alone are equal.

    Attributes:
        job_id: the save's.
        committed: whether other engines can now load every block of the job.
        is_held: whether others read the blocks in this engine's pool. The blocks must then stay
            as they are until `TransferResults.released` names the job.
        error: why the save is not committed, as in `LoadResult`; empty if that is not known.
        seconds: how long the save took; 0 if it was not measured.
        waited: seconds that the save waited for layers of its step to be computed. They are not
            part of `seconds`.
    """

    job_id: int
    committed: bool
    is_held: bool = False
    error: str = ""
    seconds: float = field(default=0.0, compare=False)
    waited: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class ConnectorWork:
    """Work that the worker half must start now. The scheduler half fills one per step.

    Attributes:
        lookups: look-ups to answer.
        loads: loads to start.
        saves: saves to start.
        cancelled_lookups: ids of look-ups whose answers are not needed any more.
        cancelled_loads: ids of loads whose bytes are not needed any more. Their results must
            come nevertheless.
        deletes: keys of blocks that must not be loaded any more.
        kept: handoffs of other engines, whose leases must be renewed until `dropped` names them.
        dropped: ids of handoffs whose leases need no renewal any more.
        offered: leases on this engine's blocks whose handoffs were sent. Their time begins now.
        ended: leases on this engine's blocks that end now. An ended lease never begins again.
    """

    lookups: list[LookupJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    cancelled_lookups: list[int] = field(default_factory=list)
    cancelled_loads: list[int] = field(default_factory=list)
    deletes: list[bytes] = field(default_factory=list)
    kept: list[KvHandoff] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    offered: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Returns whether there is anything to start. The engine asks twice per step."""
        return any(_lists_of(self))


_lists_of = attrgetter(*ConnectorWork.__slots__)


@dataclass(frozen=True, slots=True)
class TransferResults:
    """Transfers that have ended since the last poll.

    Attributes:
        lookups: answers to look-ups.
        loads: ends of loads.
        saves: ends of saves.
        released: ids of saves that were held, whose blocks are not read any more.
        doubted: ids of loads that have failed, but to whose blocks something may still write.
            Their results come when that is over, however long it takes, so requests should not
            wait for them.
    """

    lookups: tuple[LookupResult, ...] = ()
    loads: tuple[LoadResult, ...] = ()
    saves: tuple[SaveResult, ...] = ()
    released: tuple[int, ...] = ()
    doubted: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        ended: Collection[LookupResult | LoadResult | SaveResult],
        released: Iterable[int] = (),
        doubted: Iterable[int] = (),
    ) -> Self:
        """Sorts the results of jobs that have ended by their kinds."""
        return cls(
            tuple(result for result in ended if isinstance(result, LookupResult)),
            tuple(result for result in ended if isinstance(result, LoadResult)),
            tuple(result for result in ended if isinstance(result, SaveResult)),
            tuple(released),
            tuple(doubted),
        )

    def __bool__(self) -> bool:
        """Returns whether anything has ended."""
        return any(getattr(self, name) for name in self.__slots__)
