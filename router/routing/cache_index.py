"""`CacheIndex`: which replicas hold which leading blocks of a prompt. Pure.

The replicas' events say what they hold (`router.fleet.kv_events` follows them). Blocks of prompts
that were just sent are expected at once, so that requests with the same beginning meet; events
confirm them, or they expire. The index may be wrong for a short time, which costs time and never
correctness.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType

from router.routing.cache_form import CacheForm
from router.routing.replica_cache import ReplicaCache, SharedTables, SlotBlocks, Upkeep
from router.routing.stored_keys import StoredKeys

__all__ = ["CacheIndex", "CacheMatch"]

_DISCARDED_AT_ONCE = 2000
"""Blocks that are removed in about a millisecond."""


class CacheMatch:
    """How much of one prompt each replica can use, when the prompt was looked up.

    Args:
        blocks: by replica id, its leading blocks.
        stored_blocks: returns the leading blocks that some stores have.
        kv_blocks: of replicas whose models have states, the same without the rule for states.
    """

    __slots__ = ("_blocks", "_kv_blocks", "_stored_blocks")

    def __init__(
        self,
        blocks: Mapping[str, int],
        stored_blocks: Callable[[Iterable[str]], int],
        kv_blocks: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._blocks = blocks
        self._kv_blocks = kv_blocks
        self._stored_blocks = stored_blocks

    def blocks(self, replica_id: str) -> int:
        """Returns the number of leading blocks of the prompt that a replica can use."""
        return self._blocks.get(replica_id, 0)

    def kv_blocks(self, replica_id: str) -> int:
        """Returns the number of leading blocks of the prompt whose KV a replica has. It can use
        them if a handoff brings the states at the prompt's end.
        """
        return self._kv_blocks.get(replica_id, self._blocks.get(replica_id, 0))

    def stored_blocks(self, store_ids: Iterable[str]) -> int:
        """Returns the number of leading blocks of the prompt that one of some stores probably has.

        Args:
            store_ids: identities of the stores (`WorkerLoad.kv_store_ids`).
        """
        return self._stored_blocks(store_ids)


class CacheIndex:
    """The blocks of all replicas of one model.

    Its size is bounded by the replicas' pools, that of `stored` by a constant.

    Args:
        defer: calls a function a little later, for work that would delay others; None to do such
            work at once.
        clock: monotonic seconds.

    Attributes:
        stored: what the shared stores probably have.
    """

    def __init__(
        self,
        defer: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stored = StoredKeys(clock)
        self._defer = defer
        self._clock = clock
        self._caches: dict[str, ReplicaCache] = {}
        self._shared: dict[CacheForm, SharedTables] = {}
        self._discarded: deque[SlotBlocks] = deque()
        self._expiries: list[tuple[float, int, SlotBlocks]] = []  # a heap
        self._numbers = count()
        self._upkeep = Upkeep(clock, self._discard, self._schedule)

    def join(self, replica_id: str, form: CacheForm) -> ReplicaCache:
        """Returns the content of a replica's cache, which is empty for a new replica.

        Args:
            replica_id: the worker's id, which it draws at each start.
            form: the form of its cache.
        """
        cache = self._caches.get(replica_id)
        if cache is None:
            shared = self._shared.get(form.without_sizes)
            if shared is None:
                shared = self._shared[form.without_sizes] = SharedTables(form.without_sizes)
            cache = ReplicaCache(replica_id, form, shared, self._upkeep)
            self._caches[replica_id] = cache
        return cache

    def match(self, keys: Sequence[bytes], num_tokens: int) -> CacheMatch:
        """Looks a prompt up for all replicas at once.

        Args:
            keys: keys of the prompt's full blocks.
            num_tokens: length of the prompt.
        """
        self._expire()
        blocks: dict[str, int] = {}
        kv_blocks: dict[str, int] = {}
        for shared in self._shared.values():
            shared.match(keys, num_tokens, blocks, kv_blocks)
        return CacheMatch(blocks, lambda store_ids: self.stored.prefix(store_ids, keys), kv_blocks)

    def expect(self, replica_id: str, keys: Sequence[bytes]) -> None:
        """Notes that a prompt was just sent to a replica. Unknown replicas are ignored: they were
        lost, and would never be forgotten.

        Args:
            replica_id: the replica.
            keys: keys of the prompt's full blocks.
        """
        self._expire()
        cache = self._caches.get(replica_id)
        if cache is not None:
            cache.expect(keys)

    def forget(self, replica_id: str) -> None:
        """Drops a replica that restarted or left. Unknown ids are no error."""
        cache = self._caches.pop(replica_id, None)
        if cache is not None:
            cache.close()

    def caches(self) -> Iterator[ReplicaCache]:
        """Yields the content of each replica's cache. Any thread may iterate."""
        yield from list(self._caches.values())

    def __len__(self) -> int:
        """Returns the number of different blocks, of all layer groups."""
        return sum(len(table) for shared in self._shared.values() for table in shared.tables)

    def _expire(self) -> None:
        """Removes blocks that were expected and did not come."""
        while self._expiries and self._expiries[0][0] <= (now := self._clock()):
            blocks = heappop(self._expiries)[2]
            blocks.is_scheduled = False
            blocks.expire(now)
            self._schedule(blocks)

    def _schedule(self, blocks: SlotBlocks) -> None:
        """Makes expected blocks expire."""
        if not blocks.is_scheduled and (expires_at := blocks.expires_at) is not None:
            blocks.is_scheduled = True
            heappush(self._expiries, (expires_at, next(self._numbers), blocks))

    def _discard(self, blocks: SlotBlocks) -> None:
        """Removes the blocks of a retired slot."""
        self._discarded.append(blocks)
        if len(self._discarded) == 1:
            self._discard_some()

    def _discard_some(self) -> None:
        """Removes blocks of retired slots, all or a part of them and the others later."""
        while self._discarded:
            blocks = self._discarded[0]
            blocks.discard(_DISCARDED_AT_ONCE)
            if blocks.is_empty:
                self._discarded.popleft()
                if blocks.shared.is_unused:
                    self._shared.pop(blocks.shared.form, None)
            elif self._defer is not None:
                self._defer(self._discard_some)
                return
