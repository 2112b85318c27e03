"""Facts for routing policies."""

from collections.abc import Mapping, Sequence

from router.routing.cache_index import CacheMatch


class Blocks(CacheMatch):
    """Cached blocks of a prompt, by replica, and those that every store holds."""

    def __init__(self, cached: Mapping[str, int], stored: int = 0) -> None:
        self._cached = cached
        self._stored = stored

    def blocks(self, replica_id: str) -> int:
        return self._cached.get(replica_id, 0)

    def stored_blocks(self, store_ids: Sequence[str]) -> int:
        return self._stored
