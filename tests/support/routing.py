"""Facts for routing policies."""

from collections.abc import Mapping

from router.routing.cache_index import CacheMatch

__all__ = ["cached_blocks"]


def cached_blocks(cached: Mapping[str, int], stored: int = 0) -> CacheMatch:
    """Returns the leading blocks of a prompt that replicas cache and that every store has."""
    return CacheMatch(dict(cached), lambda store_ids: stored)
