"""`CacheIndex`: which replicas hold which leading blocks of a prompt. Pure.

The replicas' events say what they hold (`router.fleet.kv_events` follows them). Blocks of prompts
that were just sent are expected at once, so that requests with the same beginning meet; events
confirm them, or they expire. The index may be wrong for a short time, which costs time and never
correctness.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType

from router.routing.cache_form import CacheForm
from router.routing.replica_cache import ReplicaCache, SharedTables, SlotBlocks, Upkeep
from router.routing.stored_keys import StoredKeys

__all__ = ["CacheIndex", "CacheMatch", "LastMatch"]

_DISCARDED_AT_ONCE = 2000
"""Blocks that are removed in about a millisecond."""
_MAX_MATCH_AGE_S = 0.05
"""Decisions on one request share a look-up for so long. Events of replicas come with the end of
their steps, so what a look-up finds is as old in any case."""


class CacheMatch:
    """How much of one prompt each replica can use, when the prompt was looked up.

    Args:
        blocks: by replica id, its leading blocks.
        stored_blocks: returns the leading blocks that some stores have.
        kv_blocks: of replicas whose models have states, the same without the rule for states.
        made_at: when the prompt was looked up, on the index's clock.
        num_sent: how many prompts the index had noted as sent by then.

    Attributes:
        blocks_by_replica: by replica id, the leading blocks of the prompt that it can use; without
            those that can use none.
        kv_by_replica: by replica id, the leading blocks of the prompt whose KV it has. It can use
            them if a handoff brings the states at the prompt's end.
        made_at: when the prompt was looked up, on the index's clock.
        num_sent: how many prompts the index had noted as sent by then.
    """

    __slots__ = (
        *("_stored", "_stored_blocks"),
        *("blocks_by_replica", "kv_by_replica", "made_at", "num_sent"),
    )

    def __init__(
        self,
        blocks: Mapping[str, int],
        stored_blocks: Callable[[Iterable[str]], int],
        kv_blocks: Mapping[str, int] = MappingProxyType({}),
        *,
        made_at: float = 0.0,
        num_sent: int = 0,
    ) -> None:
        self.blocks_by_replica = blocks
        self.kv_by_replica = {**blocks, **kv_blocks} if kv_blocks else blocks
        self.made_at = made_at
        self.num_sent = num_sent
        self._stored_blocks = stored_blocks
        self._stored: dict[tuple[str, ...], int] = {}

    def blocks(self, replica_id: str) -> int:
        """Returns the number of leading blocks of the prompt that a replica can use."""
        return self.blocks_by_replica.get(replica_id, 0)

    def kv_blocks(self, replica_id: str) -> int:
        """Returns the number of leading blocks of the prompt whose KV a replica has."""
        return self.kv_by_replica.get(replica_id, 0)

    def stored_blocks(self, store_ids: tuple[str, ...]) -> int:
        """Returns the number of leading blocks of the prompt that one of some stores probably has.
        Replicas of a tier mostly have the same stores, in which it is looked up once.

        Args:
            store_ids: identities of the stores (`WorkerLoad.kv_store_ids`).
        """
        blocks = self._stored.get(store_ids)
        if blocks is None:
            blocks = self._stored[store_ids] = self._stored_blocks(store_ids)
        return blocks


@dataclass(slots=True)
class LastMatch:
    """The last look-up of a request's prompt, which decisions on the request share.

    Attributes:
        match: None before the first look-up, and after the request was sent.
    """

    match: CacheMatch | None = None


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
        self._num_sent = 0
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

    def match(
        self, keys: Sequence[bytes], num_tokens: int, last: LastMatch | None = None
    ) -> CacheMatch:
        """Looks a prompt up for all replicas at once, unless its last look-up still holds.

        It holds for a short time, and until the next prompt is sent: requests with the same
        beginning must meet.

        Args:
            keys: keys of the prompt's full blocks.
            num_tokens: length of the prompt.
            last: the last look-up of the same prompt, which a new one takes the place of.
        """
        if last is not None and last.match is not None and self._holds(last.match):
            return last.match
        match = self._look_up(keys, num_tokens)
        if last is not None:
            last.match = match
        return match

    def _holds(self, match: CacheMatch) -> bool:
        age_s = self._clock() - match.made_at
        return match.num_sent == self._num_sent and age_s < _MAX_MATCH_AGE_S

    def _look_up(self, keys: Sequence[bytes], num_tokens: int) -> CacheMatch:
        self._expire()
        blocks: dict[str, int] = {}
        kv_blocks: dict[str, int] = {}
        for shared in self._shared.values():
            shared.match(keys, num_tokens, blocks, kv_blocks)
        return CacheMatch(
            blocks,
            lambda store_ids: self.stored.prefix(store_ids, keys),
            kv_blocks,
            made_at=self._clock(),
            num_sent=self._num_sent,
        )

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
            self._num_sent += 1
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
