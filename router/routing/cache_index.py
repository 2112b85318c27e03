"""`CacheIndex`: which prefixes each replica probably caches, by block key. Pure."""

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["CacheIndex", "CacheMatch"]


class CacheMatch:
    """The leading blocks of one prompt that replicas cache."""

    def __init__(self, index: "CacheIndex", keys: Sequence[bytes]) -> None:
        self._index = index
        self._keys = keys

    def blocks(self, replica_id: str) -> int:
        """Returns how many leading blocks the replica probably caches."""
        return self._index.overlap(replica_id, self._keys)

    def stored_blocks(self, store_ids: Sequence[str]) -> int:
        """Returns how many leading blocks one of the shared stores holds."""
        return 0


class CacheIndex:
    """Remembers where this router sent prompts.

    Args:
        max_blocks_per_replica: the most keys remembered per replica.
    """

    def __init__(self, max_blocks_per_replica: int) -> None:
        self._max_blocks = max_blocks_per_replica
        self._tables: dict[str, OrderedDict[bytes, None]] = {}

    def match(self, keys: Sequence[bytes]) -> CacheMatch:
        """Returns what replicas cache of a prompt."""
        return CacheMatch(self, keys)

    def expect(self, replica_id: str, keys: Sequence[bytes]) -> None:
        """Notes that the replica will hold the blocks of this prefix."""
        table = self._tables.setdefault(replica_id, OrderedDict())
        for key in reversed(keys):
            table[key] = None
            table.move_to_end(key)
        while len(table) > self._max_blocks:
            table.popitem(last=False)

    def overlap(self, replica_id: str, keys: Sequence[bytes]) -> int:
        """Returns how many leading blocks of this prefix the replica probably caches."""
        table = self._tables.get(replica_id)
        for index, key in enumerate(keys):
            if table is None or key not in table:
                return index
        return len(keys)

    def forget(self, replica_id: str) -> None:
        """Drops the table of a replica that restarted or left."""
        self._tables.pop(replica_id, None)
