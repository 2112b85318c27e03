"""`StoredKeys`: which blocks the shared stores probably have. Pure.

Workers report what they have saved, and what they have looked for in vain. A store may evict
blocks that no worker reports, so the answer is a guess, which a look-up of the worker corrects.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["StoredKeys"]

_MAX_KEYS = 2**18
"""The most blocks that are remembered of one store."""
_MAX_STORES = 16
_MISSED_S = 30.0
"""A block that was looked for in vain counts again after this time. A store that was out of reach
for a moment still has it, and as it is not saved again, no report would say so."""
_MAX_MISSED = 4096
_RESTORED_AT_ONCE = 64


class _Missed(NamedTuple):
    """A block that was looked for in vain.

    Attributes:
        counts_at: when it counts again.
        expires_at: when the store deletes it.
    """

    counts_at: float
    store_id: str
    key: bytes
    expires_at: float


class StoredKeys:
    """The blocks of shared stores, by the stores' identities.

    Args:
        clock: monotonic seconds.
        max_keys: the most blocks that are remembered of one store.
    """

    def __init__(self, clock: Callable[[], float], max_keys: int = _MAX_KEYS) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._stores: OrderedDict[str, OrderedDict[bytes, float]] = OrderedDict()
        self._missed: deque[_Missed] = deque(maxlen=_MAX_MISSED)

    def save(self, store_ids: Iterable[str], keys: Sequence[bytes], ttl_s: float) -> None:
        """Notes that blocks were saved.

        Args:
            store_ids: identities of the stores.
            keys: keys of the blocks, in the order of a prompt.
            ttl_s: how long they stay there at least; 0.0 if that is not known.
        """
        expires_at = self._clock() + (ttl_s or math.inf)
        for store_id in store_ids:
            store = self._stores.setdefault(store_id, OrderedDict())
            self._stores.move_to_end(store_id)
            # In reverse, so that a prompt's end is forgotten before its beginning.
            for key in reversed(keys):
                store[key] = expires_at
                store.move_to_end(key)
            while len(store) > self._max_keys:
                store.popitem(last=False)
        while len(self._stores) > _MAX_STORES:
            self._stores.popitem(last=False)

    def remove(self, store_ids: Iterable[str], keys: Iterable[bytes]) -> None:
        """Notes that blocks were looked for in vain: they do not count for a while."""
        counts_at = self._clock() + _MISSED_S
        for store_id in store_ids:
            if (store := self._stores.get(store_id)) is not None:
                for key in keys:
                    if (expires_at := store.pop(key, None)) is not None:
                        self._missed.append(_Missed(counts_at, store_id, key, expires_at))

    def prefix(self, store_ids: Iterable[str], keys: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a prompt one of the stores probably has."""
        self._restore()
        stores = (self._stores.get(store_id) for store_id in store_ids)
        return max((self._prefix(store, keys) for store in stores if store), default=0)

    def _restore(self) -> None:
        """Lets blocks count again whose time is over, a few at a time."""
        now = self._clock()
        for _ in range(min(_RESTORED_AT_ONCE, len(self._missed))):
            if self._missed[0].counts_at > now:
                return
            missed = self._missed.popleft()
            store = self._stores.get(missed.store_id)
            if store is not None and len(store) < self._max_keys and missed.expires_at > now:
                store.setdefault(missed.key, missed.expires_at)

    def _prefix(self, store: Mapping[bytes, float], keys: Sequence[bytes]) -> int:
        now, low, high = self._clock(), 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if store.get(keys[middle - 1], now) > now:
                low = middle
            else:
                high = middle - 1
        # The search does not see blocks that are missing between others.
        if all(map(store.__contains__, keys[:low])):
            return low
        return next(i for i, key in enumerate(keys) if key not in store)

    def __len__(self) -> int:
        return sum(map(len, self._stores.values()))
