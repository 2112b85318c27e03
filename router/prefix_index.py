"""`PrefixIndex`: which replica was sent which prefix, by block key. Pure.

An estimate of the replicas' prefix caches, kept from the router's own
decisions: nothing is asked of a replica. It may be wrong in both directions,
which costs time and never correctness.
"""

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """One least-recently-used table of block keys per replica.

    A table per replica mirrors the replica's own cache: it is bounded like
    that, and forgetting a replica is one deletion.

    Args:
        max_blocks_per_replica: the most keys remembered of one replica.
    """

    def __init__(self, max_blocks_per_replica: int) -> None:
        self._max_blocks = max_blocks_per_replica
        self._tables: dict[str, OrderedDict[bytes, None]] = {}

    def record(self, replica_id: str, keys: Sequence[bytes]) -> None:
        """Notes that the replica now holds the blocks of this prefix. O(1) per key."""
        table = self._tables.setdefault(replica_id, OrderedDict())
        # Last block first: a prefix is evicted from its end, as its blocks are useless without
        # the ones before them.
        for key in reversed(keys):
            table[key] = None
            table.move_to_end(key)
        while len(table) > self._max_blocks:
            table.popitem(last=False)

    def overlap(self, replica_id: str, keys: Sequence[bytes]) -> int:
        """How many leading blocks of this prefix the replica probably caches."""
        table = self._tables.get(replica_id)
        for index, key in enumerate(keys):
            if table is None or key not in table:
                return index
        return len(keys)

    def forget(self, replica_id: str) -> None:
        """Drops what is known of a replica that restarted or left. Unknown ids are fine."""
        self._tables.pop(replica_id, None)

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables.values())
