"""`PrefixIndex` against a plain model: a list of keys per replica, newest last."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.fleet.policy import PrefixIndex

CAPACITY = 6
POOLS = {"a": 4, "b": 100}

REPLICAS = st.sampled_from(["a", "b"])
# Prefixes of a few sequences, so that they share their beginnings.
PREFIXES = st.builds(
    lambda branch, length: [bytes([i if i < 2 else branch, i]) for i in range(length)],
    st.integers(2, 4),
    st.integers(0, 9),
)


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = PrefixIndex(CAPACITY)
        self.model: dict[str, list[bytes]] = {}

    @rule(replica=REPLICAS, keys=PREFIXES)
    def record(self, replica, keys):
        self.index.record(replica, keys, POOLS[replica])
        kept = [key for key in self.model.get(replica, []) if key not in keys]
        self.model[replica] = (kept + keys[::-1])[-min(CAPACITY, POOLS[replica]) :]

    @rule(replica=REPLICAS)
    def forget(self, replica):
        self.index.forget(replica)
        self.model.pop(replica, None)

    @rule(replica=REPLICAS, keys=PREFIXES)
    def overlap(self, replica, keys):
        known = self.model.get(replica, [])
        expected = next((i for i, key in enumerate(keys) if key not in known), len(keys))
        assert self.index.overlap(replica, keys) == expected

    @invariant()
    def stays_bounded(self):
        assert len(self.index) == sum(len(keys) for keys in self.model.values())
        assert len(self.index) <= sum(min(CAPACITY, POOLS[name]) for name in self.model)


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_eviction_keeps_the_beginning_of_a_prefix():
    index = PrefixIndex(4)
    keys = [bytes([i]) for i in range(6)]
    index.record("a", keys, 100)
    assert index.overlap("a", keys) == 4
