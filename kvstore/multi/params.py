"""What a handoff says of each member: the `connector_params` of a connector over several. Pure.

    for each member: | lease in ms, uint64 | length, uint32 | its connector_params |

All numbers are little-endian.
"""

import struct
from collections.abc import Sequence

__all__ = ["MemberParams", "pack_params", "unpack_params"]

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
