"""Jobs of a connector over several members, each of which became jobs of members. Pure.

What a handoff says of each member: the `connector_params` of a connector over several. Pure.

    for each member: | lease in ms, uint64 | length, uint32 | its connector_params |

All numbers are little-endian.

What goes between the halves of a connector over several others. Pure.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.connector import ConnectorWork, LoadResult, SaveResult, TransferResults
from kvstore.handoff import KvHandoff

__all__ = [
    "Load",
    "Lookup",
    "MemberParams",
    "MultiResults",
    "MultiWork",
    "Save",
    "pack_params",
    "unpack_params",
]

MemberParams = tuple[int, bytes]
"""A member's lease in milliseconds, and its `connector_params`."""

_HEAD = struct.Struct("<QI")


def pack_params(members: Sequence[MemberParams]) -> bytes:
    """Writes all members' parameters, in order."""
    return b"".join(_HEAD.pack(lease_ms, len(params)) + params for lease_ms, params in members)


def unpack_params(packed: bytes, num_members: int) -> list[MemberParams] | None:
    """Reads what `pack_params` wrote for so many members; None if it is anything else."""
    members: list[MemberParams] = []
    start = 0
    for _ in range(num_members):
        if len(packed) < start + _HEAD.size:
            return None
        lease_ms, length = _HEAD.unpack_from(packed, start)
        start += _HEAD.size + length
        members.append((lease_ms, packed[start - length : start]))
    return members if start == len(packed) else None


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


_MISSING = "missing"
# The member answered, and may have what comes after the block that it could not give.
_ANSWERS = ("", _MISSING, "corrupt")


@dataclass(slots=True)
class Lookup:
    """Members are asked in turn for what those before them lack.

    Attributes:
        members: those to be asked, in this order.
        jobs: of the members asked so far.
        num_found: leading keys found by members that have answered.
    """

    keys: tuple[bytes, ...]
    members: tuple[int, ...]
    jobs: list[int] = field(default_factory=list)
    num_found: int = 0
    is_answered: bool = False


@dataclass(slots=True)
class Load:
    """One member at a time brings what those before it could not.

    Attributes:
        sources: members that may have the blocks, in order of preference.
        member: who is at it.
        member_job: its job.
        num_good: leading blocks that have arrived.
        lacking: members that cannot give the next block.
        given_up: members that did not answer; they are not asked again.
        error: why somebody could not give a block.
        seconds: how long the members took, one after the other.
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
        """Whom to ask for the next block; None if it is no use to ask anybody."""
        if self.is_cancelled or self.num_good == len(self.keys):
            return None
        refused = self.lacking | self.given_up
        return next((member for member in self.sources if member not in refused), None)

    def take(self, result: LoadResult) -> None:
        """Takes in what the member brought that was at it."""
        self.num_good += result.num_blocks
        self.seconds += result.seconds
        if result.num_blocks:
            self.lacking.clear()  # who lacked that block may have the next
        self.lacking.add(self.member)
        if result.error not in _ANSWERS:
            self.given_up.add(self.member)
        if self.error in ("", _MISSING):
            self.error = result.error or self.error

    def result(self, job_id: int) -> LoadResult:
        """What has become of it."""
        error = "cancelled" if self.is_cancelled else self.error or _MISSING
        if self.num_good == len(self.keys):
            error = ""
        return LoadResult(job_id, self.num_good, error, self.seconds)


@dataclass(slots=True)
class Save:
    """All members save the same blocks.

    Attributes:
        open_members: members whose result is not in.
        committed: members that offer all blocks.
        held: those of them that lend the blocks themselves.
        error: why one of the others does not.
        seconds: how long the slowest member took.
        is_reported: whether its result has been made.
    """

    open_members: set[int]
    committed: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    error: str = ""
    seconds: float = 0.0
    is_reported: bool = False

    def take(self, member: int, result: SaveResult) -> None:
        """Takes in a member's result."""
        self.open_members.discard(member)
        self.error = self.error or result.error
        self.seconds = max(self.seconds, result.seconds)
        if result.committed:
            self.committed.add(member)
        if result.is_held:
            self.held.add(member)

    def release(self, member: int) -> None:
        """A member lends the blocks no longer."""
        self.held.discard(member)
        self.committed.discard(member)

    def result(self, job_id: int, carriers: frozenset[int]) -> SaveResult:
        """What has become of it, once all members' results are in.

        Args:
            job_id: its number.
            carriers: members through which a handoff reaches its reader.
        """
        is_committed = bool(self.committed & carriers or self.held)
        error = "" if is_committed else self.error
        return SaveResult(job_id, is_committed, bool(self.held), error, self.seconds)
