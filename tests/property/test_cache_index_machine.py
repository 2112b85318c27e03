"""The router's index of caches beside real KV cache managers, over streams that lose and repeat.

Whatever happens to the pools and the streams, the index agrees with each pool once the events that
were lost have been noticed, within the stated bound, and keeps nothing of replicas that left.
"""

from collections import deque
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.v1 import worker_pb2
from engine.kv_cache.block_pool import Allocation
from engine.kv_cache.manager import KvCacheManager
from engine.kv_cache.spec import KvCacheSpec, StateSpacing
from engine.wire import cache_groups_to_proto, kv_event_responses
from kvstore.block_key import BlockKeyChain
from router.routing.cache_form import CacheForm
from router.routing.cache_index import CacheIndex
from router.routing.event_reader import MAX_STALENESS_S, KvEventReader
from router.routing.replica_cache import KvEventError

KEY_TOKENS = 2
"""Tokens that a block key stands for."""
MAX_TOKENS = 17
# Prompts that share beginnings and branch.
PROMPTS = st.builds(
    lambda branch, length: ([0] * branch + [1] * MAX_TOKENS)[:length],
    st.sampled_from([4, 8, MAX_TOKENS]),
    st.integers(1, MAX_TOKENS),
)
REPLICAS = st.integers(0, 1)
NUM_REPLICAS = 2
AMOUNTS = st.integers(0, 99)
# Windows in tokens, and spacings of states in tokens, of the models.
MODELS = st.sampled_from(
    [((None,), None), ((None, None), None), ((None, 5), None), ((3,), None), ((None,), 4)]
)


class Sequence:
    """A sequence on a replica, and how many of its tokens are computed."""

    def __init__(self, tokens, chain, table, computed):
        self.tokens, self.chain, self.table, self.computed = tokens, chain, table, computed


class Worker:
    """A KV cache manager with running sequences, and the stream of its events."""

    def __init__(self, name, spec, salt):
        self.name, self.spec, self.salt = name, spec, salt
        self.num_slots = 0 if spec.states is None else 6
        num_blocks = spec.blocks_for(MAX_TOKENS) + 4
        self.kv = KvCacheManager(
            num_blocks, spec, enable_prefix_caching=True, num_slots=self.num_slots
        )
        self.sequences = []
        self.num_steps = 0
        self.stream = deque()
        info = worker_pb2.GetInfoResponse(
            pool_block_size=spec.block_size,
            block_size=KEY_TOKENS,
            cache_groups=cache_groups_to_proto(spec, num_blocks, self.num_slots),
            caches_prefixes=True,
        )
        self.form = CacheForm.from_info(info)

    def chain(self):
        ratio = self.spec.block_size // KEY_TOKENS
        return BlockKeyChain(b"n", KEY_TOKENS, cache_salt=self.salt, blocks_per_pool_block=ratio)

    def open_stream(self):
        """Starts the stream anew, with a snapshot."""
        _, snapshot = self.kv.events.start_recording()
        self.stream = deque(kv_event_responses(snapshot))

    def pump(self):
        """Puts new events on the stream."""
        for response in kv_event_responses(self.kv.events.take_events()):
            self.stream.append(response)

    def begin(self, tokens):
        """Admits a prompt and computes it, if there is room."""
        chain = self.chain()
        keys = chain.extend_pool(tokens)
        match = self.kv.match_prefix(keys, len(tokens))
        alone = not self.sequences
        if self.kv.can_admit(len(tokens), match, alone=alone) is Allocation.OK:
            table = self.kv.admit(len(tokens), match)
            computed = match.num_blocks * self.spec.block_size
            self.sequences.append(Sequence(list(tokens), chain, table, computed))
            self.compute(self.sequences[-1], len(tokens))

    def compute(self, sequence, end):
        """Computes tokens up to `end` in one step; a sequence without room ends."""
        start, kv = sequence.computed, self.kv
        if end <= start:
            return
        if not kv.can_append(sequence.table, start, end):
            self.end(sequence)
            return
        sequence.tokens += [(start + i) % 2 for i in range(end - len(sequence.tokens))]
        kv.append(sequence.table, start, end)
        kv.take_copies()
        self.num_steps += 1
        kv.step_started(self.num_steps)
        sequence.computed = end
        keys = sequence.chain.extend_pool(sequence.tokens)
        kv.step_reported(self.num_steps)
        kv.register(sequence.table, keys, end)
        kv.release_behind(sequence.table, end)

    def end(self, sequence):
        self.sequences.remove(sequence)
        self.kv.free(sequence.table)

    def match(self, tokens):
        """How many keys of a prompt a sequence would find here."""
        keys = self.chain().extend_pool(tokens)
        blocks = self.kv.match_prefix(keys, len(tokens)).num_blocks
        return blocks * self.spec.block_size // KEY_TOKENS

    def match_with_handoff(self, tokens):
        """How many keys of a prompt it would find with a handoff, which brings states."""
        keys = self.chain().extend_pool(tokens)
        limit = min(len(keys), (len(tokens) - 1) // self.spec.block_size)
        blocks = self.kv._prefixes.match(keys, limit, needs_states=False).num_blocks
        return blocks * self.spec.block_size // KEY_TOKENS


class CacheIndexMachine(RuleBasedStateMachine):
    @initialize(model=MODELS, ratios=st.tuples(*[st.sampled_from([1, 1, 2])] * NUM_REPLICAS))
    def start(self, model, ratios):
        windows, interval = model
        self.specs = []
        for ratio in ratios:
            states = interval and StateSpacing(interval * ratio, 2 * interval * ratio)
            self.specs.append(KvCacheSpec(KEY_TOKENS * ratio, windows, MAX_TOKENS, states))
        self.now = 0.0
        self.deferred = deque()
        self.index = CacheIndex(self.deferred.append, clock=lambda: self.now)
        self.names = count()
        self.workers = {}
        self.readers = {}
        self.late = []
        self.seen = [[0]]
        for number in range(NUM_REPLICAS):
            self.connect(number)

    def connect(self, number):
        worker = Worker(f"worker {next(self.names)}", self.specs[number], "")
        self.workers[number] = worker
        self.reopen(number)

    def reopen(self, number):
        """Opens the stream of a worker's events again."""
        worker = self.workers[number]
        if number in self.readers:
            self.readers[number].end()
        worker.open_stream()
        cache = self.index.join(worker.name, worker.form)
        self.readers[number] = KvEventReader(cache, self.index.stored, list)

    # What happens on the workers; each engine step sends its events.

    @rule(number=REPLICAS, tokens=PROMPTS, ends=st.booleans())
    def run(self, number, tokens, ends):
        worker = self.workers[number]
        worker.begin(tokens)
        self.seen.append(tokens)
        if ends and worker.sequences:
            worker.end(worker.sequences[0])
        worker.pump()

    @rule(number=REPLICAS, amount=AMOUNTS)
    def generate(self, number, amount):
        worker = self.workers[number]
        if worker.sequences:
            sequence = worker.sequences[amount % len(worker.sequences)]
            worker.compute(sequence, min(sequence.computed + amount % 4 + 1, MAX_TOKENS))
            self.seen.append(list(sequence.tokens))
            worker.pump()

    @rule(number=REPLICAS, how=st.sampled_from(["evict", "discard", "reset"]), amount=AMOUNTS)
    def shrink(self, number, how, amount):
        """Another owner takes blocks for a moment, a block turns out to be corrupt, which makes a
        hole, or an operator empties the cache.
        """
        kv = self.workers[number].kv
        if how == "evict":
            taken = kv.pool.allocate(min(amount % 16, kv.pool.num_free))
            taken += kv.pool.allocate_slots(min(amount % 3, kv.pool.num_free_slots))
            kv.pool.release(taken)
        elif how == "discard" and (keys := kv.pool.cached_keys()):
            kv.discard([keys[amount % len(keys)]])
        elif how == "reset" and amount % 4 == 0:
            kv.reset_prefix_cache()
        self.workers[number].pump()

    @rule(number=REPLICAS, tokens=PROMPTS, seconds=st.floats(0, 3))
    def expect(self, number, tokens, seconds):
        """The router sends a prompt, which may not arrive; time passes."""
        keys = BlockKeyChain(b"n", KEY_TOKENS).extend(tokens)
        self.index.expect(self.workers[number].name, tuple(keys))
        self.now += seconds
        self.run_deferred()

    # What happens to the streams.

    @rule(number=REPLICAS, how=st.sampled_from(["deliver", "lose", "repeat"]), amount=AMOUNTS)
    def transmit(self, number, how, amount):
        """Messages arrive or are lost, or one comes again, however old it is."""
        worker = self.workers[number]
        late = [message for name, message in self.late if name == worker.name]
        if how == "lose" and len(worker.stream) > 1:  # a stream does not begin with a loss
            del worker.stream[1 + amount % (len(worker.stream) - 1)]
        elif how == "repeat" and late and self.readers[number].has_begun:
            self.take(number, late[amount % len(late)])
        elif how == "deliver":
            for _ in range(min(amount % 4 + 1, len(worker.stream))):
                self.late.append((worker.name, worker.stream[0]))
                if not self.take(number, worker.stream.popleft()):
                    return

    @rule(number=REPLICAS, restarts=st.booleans())
    def reconnect(self, number, restarts):
        """The stream is opened again, or the worker starts again at the same address."""
        if restarts:
            self.index.forget(self.workers[number].name)
            del self.readers[number]
            self.connect(number)
        else:
            self.reopen(number)

    def run_deferred(self):
        while self.deferred:
            self.deferred.popleft()()

    def take(self, number, message):
        try:
            self.readers[number].take(message.events)
        except KvEventError:
            self.reopen(number)
            return False
        return True

    # What must hold.

    @rule()
    def settle(self):
        """Within the bound after the last change the index agrees with every pool."""
        self.report()
        self.now += MAX_STALENESS_S + 0.1
        self.report()
        for number, worker in self.workers.items():
            if self.readers[number].staleness_s(self.now) > MAX_STALENESS_S:
                self.reopen(number)
            while worker.stream:
                assert self.take(number, worker.stream.popleft())
            assert self.readers[number].has_begun
        self.now += MAX_STALENESS_S + 0.1
        self.index.match([b"k"], 1)  # expected blocks that have expired are removed
        for worker in self.workers.values():
            cache = self.index.join(worker.name, worker.form)
            for group, stored in enumerate(cache._blocks.stored):
                assert stored == set(worker.kv.pool.cached_keys(group))
            assert cache.num_expected == 0
        for tokens in self.seen[-20:]:
            for end in (len(tokens), len(tokens) // 2 + 1):
                keys = tuple(BlockKeyChain(b"n", KEY_TOKENS).extend(tokens[:end]))
                match = self.index.match(keys, end)
                for worker in self.workers.values():
                    assert match.blocks(worker.name) == worker.match(tokens[:end])
                    with_handoff = worker.match_with_handoff(tokens[:end])
                    assert match.kv_blocks(worker.name) == with_handoff
        self.run_deferred()
        num_blocks = sum(len(set(keys)) for keys in self.held().values())
        assert len(self.index) == num_blocks
        assert len(self.index._caches) == NUM_REPLICAS

    def report(self):
        """All that is on the streams arrives, and the loads say what the newest events are."""
        for number, worker in self.workers.items():
            worker.pump()
            while worker.stream and self.take(number, worker.stream.popleft()):
                pass
            self.readers[number].report(worker.kv.events.newest, self.now)

    def held(self):
        """The blocks that the pools have, by form and layer group."""
        held = {}
        for worker in self.workers.values():
            for group in range(worker.spec.num_layer_groups):
                keys = held.setdefault((worker.form.without_sizes, group), [])
                keys += worker.kv.pool.cached_keys(group)
        return held

    @invariant()
    def tables_are_sound(self):
        if hasattr(self, "index"):
            for shared in self.index._shared.values():
                for table in shared.tables:
                    table.check()

    def teardown(self):
        if hasattr(self, "index"):
            self.settle()
            for worker in self.workers.values():
                self.index.forget(worker.name)
            self.run_deferred()
            assert len(self.index) == 0
            assert not self.index._shared


TestCacheIndex = CacheIndexMachine.TestCase
TestCacheIndex.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
