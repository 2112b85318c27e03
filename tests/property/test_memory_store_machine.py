"""State machine of the memory store; its model is a bounded dictionary in order of last use."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.conformance.objects import as_object, blank
from kvstore.store import GetStatus, StoreFullError
from kvstore.stores import memory

_TTL_S = 10
_LEASE_S = 3
_MAX_BYTES = 100
_KEYS = st.integers(0, 7).map(lambda number: bytes([number]) * 32)
_KEY_LISTS = st.lists(_KEYS, max_size=6)
_SIZES = st.integers(15, 60)


class MemoryStoreMachine(RuleBasedStateMachine):
    """The model is `{key: (value, time of last use)}`, the least recently used first."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.original_clock, memory.monotonic = memory.monotonic, lambda: self.now_s
        url = f"memory://machine?ttl_s={_TTL_S}&lease_s={_LEASE_S}&max_bytes={_MAX_BYTES}"
        self.store = memory.MemoryStore.from_url(url)
        self.model = {}
        self.num_evicted = self.num_expired = 0

    def teardown(self):
        self.store.close()
        memory.monotonic = self.original_clock

    def touch(self, key):
        value, _ = self.model.pop(key)
        self.model[key] = (value, self.now_s)
        return value

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds):
        self.now_s += seconds
        alive = {k: v for k, v in self.model.items() if self.now_s - v[1] <= _TTL_S}
        self.num_expired += len(self.model) - len(alive)
        self.model = alive

    def keys_to_evict(self, size):
        """Returns the least recently used keys that leave room for `size` bytes if evicted."""
        excess = sum(len(v) for v, _ in self.model.values()) + size - _MAX_BYTES
        keys = []
        for key, (value, _) in self.model.items():
            if excess <= 0:
                break
            keys.append(key)
            excess -= len(value)
        return keys

    @rule(key=_KEYS, size=_SIZES, byte=st.integers(0, 255))
    def put(self, key, size, byte):
        value = bytes([byte]) * size
        evicted_keys = [] if key in self.model else self.keys_to_evict(size)
        if any(self.now_s - self.model[k][1] < _LEASE_S for k in evicted_keys):
            with pytest.raises(StoreFullError, match="full of leased objects"):
                self.store.put([key], [as_object(value)])
        else:
            self.store.put([key], [as_object(value)])
            self.num_evicted += len(evicted_keys)
            for evicted_key in evicted_keys:
                del self.model[evicted_key]
            kept_value, _ = self.model.pop(key, (value, 0))
            self.model[key] = (kept_value, self.now_s)
        if key not in self.model or self.model[key][0] is value:
            assert len(self.store._objects.entries) == len(self.model), (
                "expired objects take memory"
            )

    @rule(key=_KEYS, size=_SIZES)
    def get(self, key, size):
        found = blank(size)
        (status,) = self.store.get_into([key], [found])
        if key not in self.model:
            assert status is GetStatus.MISSING
        elif len(value := self.touch(key)) != size:
            assert status is GetStatus.WRONG_SIZE
        else:
            assert status is GetStatus.HIT
            assert found.to_bytes() == value

    @rule(keys=_KEY_LISTS)
    def delete(self, keys):
        expected = sum(self.model.pop(key, None) is not None for key in keys)
        assert self.store.delete(keys) == expected

    @rule(keys=_KEY_LISTS)
    def contains_prefix(self, keys):
        expected = next((i for i, key in enumerate(keys) if key not in self.model), len(keys))
        assert self.store.contains_prefix(keys) == expected
        for key in keys[:expected]:
            self.touch(key)

    @invariant()
    def is_bounded(self):
        assert self.store._objects.num_bytes <= _MAX_BYTES

    @rule()
    def stats(self):
        stats = self.store.stats()
        assert stats.num_objects == len(self.model)
        assert stats.num_bytes == sum(len(value) for value, _ in self.model.values())
        assert (stats.evictions, stats.expirations) == (self.num_evicted, self.num_expired)
        oldest_s = min((touched_s for _, touched_s in self.model.values()), default=None)
        assert stats.oldest_age_s == (None if oldest_s is None else self.now_s - oldest_s)


TestMemoryStore = MemoryStoreMachine.TestCase
TestMemoryStore.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
