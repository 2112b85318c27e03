"""State machine of two processes on one arena; either may be killed between any two writes."""

import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.conformance.objects import as_object, blank
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores.shm import arena_space
from kvstore.stores.shm.arena import Arena
from kvstore.stores.shm.extent_table import Extent, ExtentTable, Header, State
from kvstore.stores.shm.mapped_memory import MappedMemory
from kvstore.url import StoreLimits
from tests.support.shm_arena import ArenaContents

MAX_BYTES = 100_000
MAX_SPARE_BYTES = MAX_BYTES // 2  # above the product's share: room for several extents
TTL_S, LEASE_S = 100, 10
KEYS = [bytes([number]) * 32 for number in range(14)]
SIZES = (0, 1, 100, 4096, 5000, 9000, 20_000)
ARENAS = st.integers(0, 1)
SOME_KEYS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)


class DiedError(BaseException):
    """The simulated process was killed."""


class Clock:
    def __init__(self):
        self.now_ns = 10**12

    def monotonic_ns(self):
        self.now_ns += 1  # no two touches at the same time
        return self.now_ns


@contextmanager
def dies_after(num_writes):
    """Raises `DiedError` at the first change of shared state after `num_writes` changes."""
    left = iter(range(num_writes))

    def or_die(call):
        def call_or_die(*args):
            if next(left, None) is None:
                raise DiedError
            return call(*args)

        return call_or_die

    calls = [
        (Header, "__setattr__"),
        (Extent, "__setattr__"),
        (ExtentTable, "note_changes"),
        (MappedMemory, "provide"),
        (MappedMemory, "write"),
        (MappedMemory, "let_go"),
        (MappedMemory, "grow_to"),
    ]
    with ExitStack() as patches:
        for owner, name in calls:
            patch = mock.patch.object(owner, name, or_die(getattr(owner, name)))
            patches.enter_context(patch)
        yield


class ShmArenaMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="baton-test-"))
        self.clock = Clock()
        self.patches = ExitStack()
        for name, value in (("time", self.clock), ("_SPARE_SHARE", 2)):
            self.patches.enter_context(mock.patch.object(arena_space, name, value))
        self.fills = (bytes([number % 251 + 1]) for number in count())
        self.expected = {}  # key: value
        self.has_died = False

    @initialize()
    def begin(self):
        self.arenas = [self.opened(), self.opened()]
        self.contents = ArenaContents(self.folder)

    def teardown(self):
        for opened in (*self.arenas, self.contents):
            opened.close()
        self.patches.close()
        shutil.rmtree(self.folder)

    def opened(self):
        limits = StoreLimits(
            ttl_s=TTL_S,
            lease_s=LEASE_S,
            timeout_s=5,
            max_bytes=MAX_BYTES,
            default_max_bytes=MAX_BYTES,
        )
        return Arena(self.folder, limits)

    def new_value(self, num_bytes):
        return num_bytes * next(self.fills)

    def touched(self):
        return {key: extent.touched_ns for key, extent in self.contents.objects().items()}

    def is_alive(self, touched_ns):
        return self.clock.now_ns - touched_ns <= TTL_S * 10**9

    def alive(self):
        return {key for key, touched_ns in self.touched().items() if self.is_alive(touched_ns)}

    def settle(self, before, called, *, may_lack=frozenset()):
        """Checks which objects a call evicted and added; expects the present ones from now on."""
        now = self.touched()
        gone = before.keys() - now.keys() - set(may_lack)
        for key in gone:
            age_ns = self.clock.now_ns - before[key]
            assert age_ns > LEASE_S * 10**9, "an object was evicted during its lease"
        stayed = [before[key] for key in before.keys() & now.keys() if now[key] == before[key]]
        evicted = [before[key] for key in gone if self.is_alive(before[key])]
        # An object whose writer died may be skipped by evictions until the next listing.
        if evicted and stayed and not self.has_died:
            assert max(evicted) < min(stayed), "a younger object was evicted before an older one"
        for key in now.keys() - before.keys():
            assert key in called
        self.expected = {key: self.expected[key] for key in now}

    @rule(arena=ARENAS, keys=SOME_KEYS, sizes=st.lists(st.sampled_from(SIZES), min_size=6))
    def put(self, arena, keys, sizes):
        before, alive = self.touched(), self.alive()
        values = [self.new_value(num_bytes) for num_bytes in sizes[: len(keys)]]
        objects = [as_object(value) for value in values]
        try:
            self.arenas[arena].put(keys, objects)
            was_refused = False
        except StoreUnavailableError:  # full of leased objects; `settle` checks
            was_refused = True
        self.expect_put(keys, values, alive)
        self.settle(before, keys)
        if not was_refused:
            assert keys[-1] in self.expected

    def expect_put(self, keys, values, alive):
        """Expects the values of a put; of a key given twice, the first value."""
        for key, value in reversed(list(zip(keys, values, strict=True))):
            if key not in alive:
                self.expected[key] = value
        stored = self.contents.objects()
        for key in set(keys) & stored.keys():
            found = self.contents.bytes_at(stored[key])
            if found != self.expected[key]:  # the first was evicted for the second
                assert found in [v for k, v in zip(keys, values, strict=True) if k == key]
                self.expected[key] = found

    @rule(arena=ARENAS, keys=SOME_KEYS, wrong=st.integers(0, 6))
    def get(self, arena, keys, wrong):
        alive, expected = self.alive(), dict(self.expected)
        sizes = [len(expected.get(key, b"")) for key in keys]
        if wrong < len(keys):
            sizes[wrong] += 1
        found = [blank(size) for size in sizes]
        statuses = self.arenas[arena].get_into(keys, found)
        for index, (key, status) in enumerate(zip(keys, statuses, strict=True)):
            if key not in alive:
                assert status is GetStatus.MISSING
            elif index == wrong:
                assert status is GetStatus.WRONG_SIZE
            else:
                assert status is GetStatus.HIT
                assert found[index].to_bytes() == expected[key]

    @rule(arena=ARENAS, keys=SOME_KEYS)
    def look_up(self, arena, keys):
        alive = self.alive()
        first_missing = next((i for i, key in enumerate(keys) if key not in alive), len(keys))
        assert self.arenas[arena].count_prefix(keys) == first_missing

    @rule(arena=ARENAS, keys=SOME_KEYS)
    def delete(self, arena, keys):
        before, alive = self.touched(), self.alive()
        assert self.arenas[arena].remove(keys) == len(alive & set(keys))
        assert not self.touched().keys() & set(keys)
        self.settle(before, (), may_lack=keys)

    @rule(seconds=st.sampled_from([1, 6, 30, 80]))
    def wait(self, seconds):
        self.clock.now_ns += seconds * 10**9
        assert not self.arenas[0].count_prefix([])  # frees memory that was held for readers
        if seconds > 2:
            self.reopen(0)
            taken = self.contents.extents(State.WRITTEN_TO)
            assert not taken, "a dead writer's extents were not freed"

    @rule(arena=ARENAS)
    def reopen(self, arena):
        before = self.touched()
        self.arenas[arena].close()
        self.arenas[arena] = self.opened()
        self.settle(before, ())

    @rule(arena=ARENAS, keys=SOME_KEYS, size=st.sampled_from(SIZES), num_writes=st.integers(0, 60))
    def die_while_putting(self, arena, keys, size, num_writes):
        before, alive = self.touched(), self.alive()
        values = [self.new_value(size) for _ in keys]
        put = self.arenas[arena].put
        self.die(arena, num_writes, put, keys, [as_object(value) for value in values])
        self.expect_put(keys, values, alive)
        self.settle(before, keys)

    @rule(arena=ARENAS, keys=SOME_KEYS, num_writes=st.integers(0, 20))
    def die_while_deleting(self, arena, keys, num_writes):
        before = self.touched()
        self.die(arena, num_writes, self.arenas[arena].remove, keys)
        self.settle(before, (), may_lack=keys)

    @rule(arena=ARENAS)
    def look_at_index(self, arena):
        before = self.touched()
        self.contents.check_index(self.arenas[arena])
        self.settle(before, ())

    def die(self, arena, num_writes, call, *args):
        """Kills a process at the write after `num_writes` of a call, or after the call."""
        with suppress(DiedError, StoreUnavailableError), dies_after(num_writes):
            call(*args)
        self.replace_dead(arena)

    def replace_dead(self, arena):
        dying = self.arenas[arena]
        os.close(dying._writers._fd)
        dying._writers._fd = -1
        dying._opened.close()
        self.has_died = True
        self.arenas[arena] = self.opened()

    @invariant()
    def arena_is_consistent(self):
        if not hasattr(self, "arenas"):
            return
        contents = self.contents
        contents.check()
        objects = contents.objects()
        assert {key: contents.bytes_at(extent) for key, extent in objects.items()} == self.expected
        assert contents.header.object_bytes <= MAX_BYTES
        spare = [extent for extent in contents.extents(State.FREE) if extent.resident_bytes]
        limit_bytes = min(MAX_SPARE_BYTES, MAX_BYTES - contents.header.object_bytes)
        may_be_read = any(self.clock.now_ns - extent.touched_ns < 3 * 10**9 for extent in spare)
        assert contents.header.spare_bytes <= limit_bytes or may_be_read
        resident_bytes = sum(extent.resident_bytes for extent in contents.extents())
        # A killed process may leave memory with an extent, uncounted until its next use.
        assert contents.memory_bytes() >= resident_bytes
        assert self.has_died or contents.memory_bytes() == resident_bytes


TestShmArena = ShmArenaMachine.TestCase
TestShmArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
