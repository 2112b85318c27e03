"""Messages between the halves of a connector over several members, and its jobs. Pure.

`MultiWork` and `MultiResults` go between the halves. `MemberParams` are what a handoff carries
for each member. `SplitLookup`, `SplitLoad` and `SplitSave` are the states of jobs, each of
which becomes jobs of members.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.handoff import KvHandoff
from kvstore.jobs import (
    CORRUPT,
    MISSING,
    ConnectorWork,
    LoadResult,
    SaveResult,
    TransferResults,
    cause_of,
)

__all__ = [
    "MemberParams",
    "MultiResults",
    "MultiWork",
    "SplitLoad",
    "SplitLookup",
    "SplitSave",
    "pack_params",
    "unpack_params",
]


@dataclass(slots=True)
class MultiWork(ConnectorWork):
    """The work of each member, in the members' order. The inherited lists stay empty."""

    members: list[ConnectorWork] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(self.members)


@dataclass(frozen=True, slots=True)
class MultiResults(TransferResults):
    """The results of each member, about jobs that the members' scheduler halves numbered.

    The inherited tuples stay empty.
    """

    members: tuple[TransferResults, ...] = ()

    def __bool__(self) -> bool:
        return any(self.members)


MemberParams = tuple[int, bytes]
"""A member's lease in milliseconds, and its `connector_params`."""

# In front of each member's connector_params: lease in ms, length in bytes; little-endian.
_HEAD = struct.Struct("<QI")


def pack_params(members: Sequence[MemberParams]) -> bytes:
    """Returns the `connector_params` of a handoff that carries these parameters, in order."""
    return b"".join(_HEAD.pack(lease_ms, len(params)) + params for lease_ms, params in members)


def unpack_params(packed: bytes, num_members: int) -> list[MemberParams] | None:
    """Reads the output of `pack_params` for `num_members`; returns None for anything else."""
    members: list[MemberParams] = []
    start = 0
    for _ in range(num_members):
        if len(packed) < start + _HEAD.size:
            return None
        lease_ms, length = _HEAD.unpack_from(packed, start)
        start += _HEAD.size + length
        members.append((lease_ms, packed[start - length : start]))
    return members if start == len(packed) else None


# With these errors the member answered, and may have the blocks after the one that it lacked.
_ANSWERS = ("", MISSING, CORRUPT)


@dataclass(slots=True)
class SplitLookup:
    """A look-up: members are asked in turn for the keys that those before them lack.

    Attributes:
        keys: one per block that is looked up.
        members: indices of the members to ask, in order.
        jobs: look-ups of the members asked so far.
        num_found: leading keys found by members that have answered.
        is_answered: whether `num_found` is final.
        error: that of a member that did not answer; it may have further ones.
    """

    keys: tuple[bytes, ...]
    members: tuple[int, ...]
    jobs: list[int] = field(default_factory=list)
    num_found: int = 0
    is_answered: bool = False
    error: str = ""

    def note_errors(self, member: int, errors: Mapping[int, str]) -> None:
        """Notes that look-ups of a member have failed; errors by their job ids."""
        if self.jobs and self.members[len(self.jobs) - 1] == member:
            self.error = errors.get(self.jobs[-1], self.error)


@dataclass(slots=True)
class SplitLoad:
    """A load: one member at a time loads the blocks that those before it could not.

    Attributes:
        keys: one per block to load.
        block_ids: the blocks to write to.
        handoff: the terms of all members; None for blocks that a look-up found.
        sources: indices of the members that may have the blocks, in order of preference.
        member: index of the member that loads now.
        member_job: its job.
        num_good: leading blocks that have arrived.
        lacking: members that cannot load the next block.
        given_up: members that did not answer; they are not asked again.
        error: why a member could not load a block.
        seconds: how long the members took, one after the other.
        is_cancelled: whether no further member is asked.
    """

    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    handoff: KvHandoff | None
    sources: tuple[int, ...]
    member: int = 0
    member_job: int = 0
    num_good: int = 0
    lacking: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    error: str = ""
    seconds: float = 0.0
    is_cancelled: bool = False

    def next_source(self) -> int | None:
        """Returns the member to ask for the next block; None if the load is over."""
        if self.is_cancelled or self.num_good == len(self.keys):
            return None
        refused = self.lacking | self.given_up
        return next((member for member in self.sources if member not in refused), None)

    def add(self, result: LoadResult) -> None:
        """Adds the result of the member that loads now."""
        self.num_good += result.num_blocks
        self.seconds += result.seconds
        if result.num_blocks:
            self.lacking.clear()  # a member that lacked that block may have the next
        self.lacking.add(self.member)
        if cause_of(result.error) not in _ANSWERS:
            self.given_up.add(self.member)
        if self.error in ("", MISSING):
            self.error = result.error or self.error

    def result(self, job_id: int) -> LoadResult:
        """Returns the load's result, under its own number."""
        error = "cancelled" if self.is_cancelled else self.error or MISSING
        if self.num_good == len(self.keys):
            error = ""
        return LoadResult(job_id, self.num_good, error, self.seconds)


@dataclass(slots=True)
class SplitSave:
    """A save: several members save the same blocks.

    Attributes:
        open_members: members whose result is not in.
        committed: members from which all blocks can be loaded.
        held: committed members that lend the blocks themselves.
        error: why another member's save is not committed.
        seconds: how long the slowest member took.
        is_reported: whether the engine has the save's result.
    """

    open_members: set[int]
    committed: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    error: str = ""
    seconds: float = 0.0
    is_reported: bool = False

    def add(self, member: int, result: SaveResult) -> None:
        """Adds a member's result."""
        self.open_members.discard(member)
        self.error = self.error or result.error
        self.seconds = max(self.seconds, result.seconds)
        if result.committed:
            self.committed.add(member)
        if result.is_held:
            self.held.add(member)

    def release(self, member: int) -> None:
        """Notes that a member does not lend the blocks any more."""
        self.held.discard(member)
        self.committed.discard(member)

    def result(self, job_id: int, carriers: frozenset[int]) -> SaveResult:
        """Returns the save's result. All members' results must be in.

        Args:
            job_id: the save's number.
            carriers: members from which the reader of a handoff can load.
        """
        is_committed = bool(self.committed & carriers or self.held)
        error = "" if is_committed else self.error
        return SaveResult(job_id, is_committed, bool(self.held), error, self.seconds)
