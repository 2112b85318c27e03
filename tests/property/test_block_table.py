"""`BlockTable` against sets of keys: prefixes are exact whatever leaves the replicas first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.routing.block_table import BlockTable, members_of

SLOTS = range(5)
# Sequences that branch, so that blocks have several successors.
PROMPTS = st.builds(
    lambda branch, twig, length: [
        bytes([0 if i < 2 else branch, 0 if i < 4 else twig, i]) for i in range(length)
    ],
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 9),
)


class BlockTableMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = BlockTable(has_links=True)
        self.held = {slot: set() for slot in SLOTS}

    @rule(slot=st.sampled_from(SLOTS), keys=PROMPTS, start=st.integers(0, 8))
    def add(self, slot, keys, start):
        start = min(start, len(keys) - 1)
        self.table.add(slot, keys[start:], keys[start - 1] if start else None)
        self.held[slot].update(keys[start:])

    @rule(slot=st.sampled_from(SLOTS), keys=PROMPTS, index=st.integers(0, 8))
    def remove(self, slot, keys, index):
        key = keys[min(index, len(keys) - 1)]
        self.table.remove(slot, [key])
        self.held[slot].discard(key)

    @rule(slot=st.sampled_from(SLOTS))
    def remove_all(self, slot):
        self.table.remove(slot, list(self.held[slot]))
        self.held[slot].clear()

    @rule(keys=PROMPTS, limit=st.integers(0, 9), asked=st.integers(0, 31))
    def match(self, keys, limit, asked):
        limit = min(limit, len(keys))
        lengths = {}
        for replicas, length in self.table.prefixes(keys, limit, asked):
            assert length > 0
            for slot in members_of(replicas, SLOTS):
                assert slot not in lengths
                lengths[slot] = length
        for slot in SLOTS:
            missing = (i for i in range(limit) if keys[i] not in self.held[slot])
            expected = next(missing, limit) if asked >> slot & 1 else 0
            assert lengths.get(slot, 0) == expected

    @invariant()
    def agrees(self):
        self.table.check()
        held = set().union(*self.held.values())
        assert len(self.table) == len(held)
        for key in held:
            assert set(members_of(self.table.holders(key), SLOTS)) == {
                slot for slot in SLOTS if key in self.held[slot]
            }


TestBlockTable = BlockTableMachine.TestCase
TestBlockTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
