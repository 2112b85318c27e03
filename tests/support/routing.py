"""Facts for routing policies."""

from collections.abc import Mapping

from router.routing.cache_index import CacheMatch

__all__ = ["cached_blocks"]


def cached_blocks(
    cached: Mapping[str, int], stored: int = 0, kv: Mapping[str, int] | None = None
) -> CacheMatch:
    """Returns the leading blocks of a prompt that replicas cache, that every store has, and that
    replicas could use with states from elsewhere.
    """
    return CacheMatch(cached, lambda store_ids: stored, kv or {})
