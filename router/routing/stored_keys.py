"""`StoredKeys`: which blocks the shared stores probably have. Pure.

Workers report what they have saved, and what they have looked for in vain. A store may evict
blocks that no worker reports, so the answer is a guess, which a look-up of the worker corrects.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["StoredKeys"]

_MAX_KEYS = 2**18
"""The most blocks that are remembered of one store."""
_MAX_STORES = 16


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
        """Notes that blocks are not there."""
        for store_id in store_ids:
            if (store := self._stores.get(store_id)) is not None:
                for key in keys:
                    store.pop(key, None)

    def prefix(self, store_ids: Iterable[str], keys: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a prompt one of the stores probably has."""
        stores = (self._stores.get(store_id) for store_id in store_ids)
        return max((self._prefix(store, keys) for store in stores if store), default=0)

    def _prefix(self, store: Mapping[bytes, float], keys: Sequence[bytes]) -> int:
        now, low, high = self._clock(), 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if store.get(keys[middle - 1], now) > now:
                low = middle
            else:
                high = middle - 1
        # The search does not see blocks that are missing between others.
        return next((i for i, key in enumerate(keys[:low]) if key not in store), low)

    def __len__(self) -> int:
        return sum(map(len, self._stores.values()))
