"""State machine over a prefill, a decode and an undivided engine with a shared store.

With tiny pools, a vocabulary of two, transfers that end late, fail, never report, or lose their
store, steps that raise, deadlines, aborts, and ids that are used again, tokens are always right,
blocks are conserved, and every request ends.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from baton.common.request.structured_outputs import StructuredOutputs
from engine.kv_cache.spec import StateSpacing
from engine.request import EngineOutput, EngineRequest, PrefixRequest
from engine.runner import ModelInfo
from engine.schedule import step_times
from engine.validation import num_blocks_needed
from kvstore.block_key import BlockKeyChain
from kvstore.handoff import KvHandoff
from tests.support.checked_engine import CheckedEngine, CheckedRequest
from tests.support.engine_work import has_work
from tests.support.fake_model import fake_config, fake_info
from tests.support.reference_decoding import candidates, first_beams, progress_of
from tests.support.requests import changed, engine_request

MAX_MODEL_LEN = 24
MAX_LIVE = 8
ENGINES = st.integers(0, 2)
MANY = st.integers(0, 50)
# Few, so that prefixes are shared.
PROMPTS = st.builds(
    lambda pattern, length: (pattern * MAX_MODEL_LEN)[:length],
    st.sampled_from([(0,), (1, 0), (0, 0, 1), (0, 0, 0, 0, 0, 1)]),
    st.integers(1, MAX_MODEL_LEN - 2),
)
MISHAPS = (
    *("abort", "finish_candidate", "finish_candidate", "break_next_step", "pass_time"),
    *("lose_transfer", "restore_transfers", "lose_object", "release_handoff", "end_lease"),
    *("reset_prefix_cache", "watch", "move", "move", "break_request"),
)
DRAFTS = [
    {"method": method, "num_speculative_tokens": num, "prompt_lookup_min": 1}
    for method, num in (("ngram", 2), ("suffix", 5))
] + [{"model": "fake", "num_speculative_tokens": 3}]
WINDOWS = [(None,), (None,), (3,), (5, None), (None, 2), (2, 6)]
CONFIGS = {
    "max_num_batched_tokens": [1, 3, 7, 12, 20],
    "max_num_seqs": [1, 3, 5, 8, 8],
    "long_prefill_token_threshold": [None, None, 1, 3],
    "max_num_partial_prefills": [1, 2],
    "max_step_ms": [0, 0, 1, 3, "auto"],
    "enable_prefix_caching": [False, True],
    "preemption_mode": ["recompute", "swap", "swap", "auto"],
    "async_scheduling": [False, True],
    "pipeline_parallel_size": [1, 1, 2, 3],  # decodes in lanes
    "speculative_config": [None, *DRAFTS],
    "kv_load_failure_policy": ["recompute", "recompute", "fail"],
    "kv_transfer_timeout_s": [2.0, 20.0],
    "priority_ageing_s": [0.5, 100.0],
    "kv_publish": ["off", "finish", "1", "2"],
    "kv_transfer_layer_slices": [1, 2],
}
SETUP = {
    "transfer_block_size": [1, 3, 4],
    "windows": WINDOWS,
    # Blocks between two states that a sequence keeps, and between two that stay cached, as a
    # multiple of it; None for a model without states.
    "states": [None, None, (1, 1), (1, 2), (2, 1), (3, 1)],
    "num_slots": [1, 2, 3, 5, 8, 50],
    "num_host_slots": [0, 2, 20],
    "num_spare": [0, 1, 2, 4, 8],
    "num_host_blocks": [0, 4, 50, 50],
    "submits": ["now", "late"],
    "lends": [False, True],
    "prefetches": [False, True],
    "ends_in_steps": [False, True],
}


class Cluster(RuleBasedStateMachine):
    """Requests go to prefill and with their handoff to decode, or to one engine alone."""

    @initialize(
        transfer_blocks=st.just((1, 1, 1)) | st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3),
        config=st.fixed_dictionaries(
            {name: st.sampled_from(values) for name, values in CONFIGS.items()}
        ),
        **{name: st.sampled_from(values) for name, values in SETUP.items()},
    )
    def start(
        self,
        transfer_block_size: int,
        transfer_blocks: tuple[int, int, int],
        windows: tuple[int | None, ...],
        states: tuple[int, int] | None,
        num_slots: int,
        num_host_slots: int,
        num_spare: int,
        num_host_blocks: int,
        submits: str,
        lends: bool,
        prefetches: bool,
        ends_in_steps: bool,
        config: dict[str, object],
    ) -> None:
        self.prefetches = prefetches
        self.store: dict = {}
        self.now = 0.0
        self.handoff_ids: list[str] = []
        self._lease_numbers = itertools.count()
        # Requests that may pull their beginning, once the other engine has answered.
        self._answered: list[tuple[CheckedEngine, EngineRequest]] = []
        config["kv_transfer_block_size"] = transfer_block_size
        if "model" in (config["speculative_config"] or {}):
            config["pipeline_parallel_size"] = 1
            if None not in windows:
                config["speculative_config"] = None  # refused by a runner

        has_states = states is not None

        def engine(role: str, num_parts: int) -> CheckedEngine:
            block_size = num_parts * transfer_block_size
            info = fake_info(block_size, MAX_MODEL_LEN, windows=windows, has_states=has_states)
            if states is not None:
                config["state_interval"] = states[0] * block_size
            return CheckedEngine(
                info,
                _blocks_of_largest(info, config) + num_spare,
                store=self.store,
                clock=self.read_clock,
                num_host_blocks=num_host_blocks,
                num_slots=num_slots if has_states else 0,
                num_host_slots=num_host_slots if has_states else 0,
                submits=submits,
                lends=lends,
                ends_in_steps=ends_in_steps,
                role=role,
                **config,
            )

        roles = ("prefill", "decode", "both")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_times, "_MIN_TOKENS", 1)
            if states is not None:  # requests are shorter than the interval of a real engine
                patch.setattr(StateSpacing, "of", lambda n: StateSpacing(n, n * states[1]))
            self.engines = tuple(map(engine, roles, transfer_blocks))
        for each in self.engines:
            each.watch()

    def read_clock(self) -> float:
        """Returns the time, which passes in small steps, so that engine steps take some."""
        self.now += 1e-4
        return self.now

    # Requests.

    @rule(
        engine=ENGINES,
        prompt=PROMPTS,
        num_copies=st.integers(1, 3),
        max_tokens=st.sampled_from([1, 2, 5, 9, 14]),
        stop_token_ids=st.sampled_from([(), (), (1,)]).map(frozenset),
        seed=st.integers(0, 2),
        num_candidates=st.sampled_from([1, 1, 2, 3]),
        num_returned=st.integers(1, 3),
        beam_search=st.none()
        | st.none()
        | st.builds(
            dict,
            length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
            early_stopping=st.sampled_from([True, False, "never"]),
        ),
        num_logprobs=st.tuples(*[st.sampled_from([None, None, 0, 1, 2])] * 2),
        regex=st.sampled_from(["", "", "", "......", "...........", "........................"]),
        num_resumed=st.lists(st.integers(1, 7), max_size=3),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        timeout_s=st.sampled_from([None, None, None, 2, 30]),
        source=st.none() | ENGINES,
    )
    def add(
        self,
        engine: int,
        prompt: tuple[int, ...],
        num_copies: int,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        seed: int,
        num_candidates: int,
        num_returned: int,
        beam_search: dict[str, object] | None,
        num_logprobs: tuple[int | None, int | None],
        regex: str,
        num_resumed: list[int],
        priority: int,
        salt: str,
        timeout_s: int | None,
        source: int | None,
    ) -> None:
        target = self.engines[engine]
        num_candidates = min(num_candidates, target.config.max_running)
        request = engine_request(
            request_id="",
            prompt_token_ids=prompt,
            temperature=1.0 if seed else 0.0,
            seed=seed,
            max_tokens=max_tokens,
            n=min(num_returned, num_candidates),
            **(
                {
                    "best_of": num_candidates,
                    "logprobs": num_logprobs[0],
                    "prompt_logprobs": num_logprobs[1],
                    "structured_outputs": StructuredOutputs(regex=regex) if regex else None,
                }
                if beam_search is None
                else {"beam_width": num_candidates} | beam_search
            ),
            stop_token_ids=stop_token_ids,
            priority=priority,
            cache_salt=salt,
            deadline=None if timeout_s is None else self.now + timeout_s,
        )
        if not target.hands_over:
            request = _resumed(request, num_resumed)
        for _ in range(min(num_copies, MAX_LIVE - len(target.live))):
            if source is None or source == engine or num_logprobs[1] is not None:
                self._add(target, request)
            else:
                self._ask(self.engines[source], target, request)

    def _add(self, target: CheckedEngine, request: EngineRequest) -> None:
        named = changed(request, request_id=self._free_id())
        target.add(CheckedRequest.of(named, target.info))

    def _ask(self, source: CheckedEngine, target: CheckedEngine, request: EngineRequest) -> None:
        """Asks an engine to lend the beginning of a prompt; its answer lets the request begin."""
        if not source.core.lends_prefixes:
            self._add(target, request)
            return
        spec, size = request.spec, target.config.transfer_block_size
        keys = BlockKeyChain(target.core.namespace, size, cache_salt=spec.cache_salt)
        asked = tuple(keys.extend(spec.prompt_token_ids[:-1]))
        lease_id = f"pull {next(self._lease_numbers)}"

        def answer(handoff: KvHandoff | None) -> None:
            if handoff is not None:
                assert handoff.block_keys == asked[: len(handoff.block_keys)]
                self.handoff_ids.append(handoff.handoff_id)
            self._answered.append((target, replace(request, prefix=handoff)))

        source.core.scheduler.lend_prefix(PrefixRequest(lease_id, asked, answer))

    # Steps.

    @rule(engine=ENGINES, count=st.integers(1, 12))
    def step(self, engine: int, count: int) -> None:
        for _ in range(count):
            self._step(self.engines[engine])

    @rule(rounds=st.integers(1, 8))
    def run_all(self, rounds: int) -> None:
        for _ in range(rounds):
            for engine in self.engines:
                engine.worker.end_all()
                self._step(engine)

    @rule(engine=ENGINES, index=MANY, fails=st.booleans())
    def end_transfer(self, engine: int, index: int, fails: bool) -> None:
        worker = self.engines[engine].worker
        if worker.pending:
            worker.end(index % len(worker.pending), fails=fails)

    # Mishaps at any moment. They share one rule, so that they are not chosen too often.

    @rule(engine=ENGINES, index=MANY, what=st.sampled_from(MISHAPS))
    def inject_mishap(self, engine: int, index: int, what: str) -> None:
        getattr(self, f"_{what}")(self.engines[engine], index)
        self._take_moved(self.engines[engine])
        self.engines[engine].check()

    def _abort(self, engine: CheckedEngine, index: int) -> None:
        if engine.live:
            engine.abort(sorted(engine.live)[index % len(engine.live)])

    def _finish_candidate(self, engine: CheckedEngine, index: int) -> None:
        running = [
            (checked.request.spec.request_id, candidate)
            for checked in engine.live.values()
            for candidate in checked.received.keys() - checked.ended
        ]
        if running:
            engine.finish_candidate(*running[index % len(running)])

    def _move(self, engine: CheckedEngine, index: int) -> None:
        if engine.live and not engine.hands_over:
            engine.move(sorted(engine.live)[index % len(engine.live)])

    def _break_next_step(self, engine: CheckedEngine, index: int) -> None:
        engine.break_next_step(("raise", "not finite")[index % 2])

    def _break_request(self, engine: CheckedEngine, index: int) -> None:
        if engine.live:
            engine.break_request(sorted(engine.live)[index % len(engine.live)])

    def _pass_time(self, engine: CheckedEngine, index: int) -> None:
        self.now += (0.5, 1.0, 3.0)[index % 3]

    def _lose_transfer(self, engine: CheckedEngine, index: int) -> None:
        if engine.worker.pending:
            engine.worker.lose(index % len(engine.worker.pending))

    def _restore_transfers(self, engine: CheckedEngine, index: int) -> None:
        engine.worker.restore_lost()

    def _lose_object(self, engine: CheckedEngine, index: int) -> None:
        if self.store:
            del self.store[list(self.store)[index % len(self.store)]]

    def _release_handoff(self, engine: CheckedEngine, index: int) -> None:
        if self.handoff_ids:
            handoff_id = self.handoff_ids[index % len(self.handoff_ids)]
            for each in self.engines:
                each.core.scheduler.release_handoff(handoff_id)

    def _end_lease(self, engine: CheckedEngine, index: int) -> None:
        for each in self.engines:
            if leases := each.worker.leases:
                each.worker.end_lease(leases[index % len(leases)])

    def _reset_prefix_cache(self, engine: CheckedEngine, index: int) -> None:
        engine.core.scheduler.reset_prefix_cache()
        assert engine.core.scheduler.kv.pool.cached_keys() == ()

    def _watch(self, engine: CheckedEngine, index: int) -> None:
        if index % 2:
            engine.unwatch()
        engine.watch()

    # The end.

    def teardown(self) -> None:
        """Checks that without further faults every request ends and every block is free."""
        engines = getattr(self, "engines", ())
        for engine in engines:
            engine.heal()
        self._run_until(lambda: not any(engine.live for engine in engines))
        for engine in engines:
            # A lost job keeps its blocks; a request that needs the whole pool waits for it.
            assert not engine.live or engine.worker.lost, "a request starved"
            engine.worker.restore_lost()
        self._run_until(lambda: not any(has_work(engine.core) for engine in engines))
        self.run_all(1)  # offers the leases of the last handoffs
        self._end_leases()
        for engine in engines:
            self._step(engine)  # with async scheduling, the last step is still to be committed
            engine.check_is_empty()
            self._check_full_load(engine)

    def _end_leases(self) -> None:
        """Ends all leases, as their timeouts would."""
        for engine in getattr(self, "engines", ()):
            for lease_id in engine.worker.leases:
                engine.worker.end_lease(lease_id)

    def _run_until(self, is_over: Callable[[], bool]) -> None:
        """Runs until `is_over`, or until all engines are idle for longer than any time limit."""
        num_idle = 0
        for _ in range(3000):
            if is_over() or num_idle > 100:
                return
            self.now += 0.25
            self._end_leases()
            self.run_all(1)
            is_idle = all(engine.core.is_stalled for engine in self.engines)
            num_idle = num_idle + 1 if is_idle else 0
        raise AssertionError("the engines do not come to rest")

    def _check_full_load(self, engine: CheckedEngine) -> None:
        """Checks that as many sequences run at once as the configuration allows."""
        num_layer_groups = len(engine.info.windows)
        count = min(engine.config.max_running, (engine.core.num_blocks - 1) // num_layer_groups)
        if engine.info.states is not None:
            count = min(count, engine.runner.num_slots)
        if engine.hands_over:
            return
        requests = [
            engine_request(request_id=f"last {i}", prompt_token_ids=(0,), max_tokens=20)
            for i in range(count)
        ]
        for request in requests:
            engine.core.scheduler.add(request)
        engine.core.run_step([].extend)
        assert engine.core.scheduler.load().num_running == count

    def _step(self, engine: CheckedEngine) -> None:
        engine.step()
        for saved in engine.saved:
            if self.prefetches:
                self.engines[1].core.scheduler.prefetch(saved)
        engine.saved.clear()
        for checked, output, handoff in engine.handed_over:
            self._hand_over(checked.request, output, handoff)
        engine.handed_over.clear()
        self._take_moved(engine)
        answered, self._answered = self._answered, []
        for target, request in answered:
            if len(target.live) < MAX_LIVE:
                self._add(target, request)

    def _take_moved(self, engine: CheckedEngine) -> None:
        """Lets requests that have moved off one engine continue on another."""
        others = [each for each in self.engines[1:] if each is not engine]
        moved = list(engine.moved)
        engine.moved.clear()
        for checked, handoff in moved:
            request = checked.request
            if checked.received and not request.spec.params.is_ranked:
                progress = tuple(
                    progress_of(request, index, tuple(token_ids))
                    for index, token_ids in checked.received.items()
                    if index not in checked.ended
                )
                request = replace(request, handoff=handoff, progress=progress)
            taken = changed(request, request_id=self._free_id())
            others[0].add(CheckedRequest.of(taken, others[0].info))

    def _hand_over(
        self, request: EngineRequest, output: EngineOutput, handoff: KvHandoff | None
    ) -> None:
        if handoff is not None:
            self.handoff_ids.append(handoff.handoff_id)
        request = replace(request, handoff=handoff)
        if request.spec.params.beam_width is not None:
            beams = tuple(zip(output.token_ids, output.first_logprobs, strict=True))
            request = replace(request, first_beams=beams)
        else:
            begun = [(index, (token,)) for index, token in enumerate(output.token_ids)]
            progress = tuple(progress_of(request, *each) for each in begun)
            request = replace(request, progress=progress)
        decode = self.engines[1]
        decode.add(CheckedRequest.of(request, decode.info))

    def _free_id(self) -> str:
        """Returns one of few ids, so that ids are used again."""
        live = {request_id for engine in self.engines for request_id in engine.live}
        return next(f"r{i}" for i in range(99) if f"r{i}" not in live)


def _blocks_of_largest(info: ModelInfo, config: dict[str, object]) -> int:
    """Returns how many blocks one candidate needs at most."""
    largest = engine_request(request_id="", prompt_token_ids=(0,), max_tokens=MAX_MODEL_LEN)
    engine_config = fake_config(block_size=info.layout.block_size, **config)
    return num_blocks_needed(largest, engine_config, info)


def _resumed(request: EngineRequest, nums_tokens: list[int]) -> EngineRequest:
    """Returns the request as another replica left it; unchanged if that had no progress."""
    params = request.spec.params
    if not nums_tokens or params.max_tokens == 1:
        return request
    if params.beam_width is not None:
        return replace(request, first_beams=first_beams(request))
    limit = (
        min(request.spec.params.max_tokens, MAX_MODEL_LEN - len(request.spec.prompt_token_ids)) - 1
    )
    every = zip(candidates(request, MAX_MODEL_LEN), nums_tokens * 3, strict=False)
    progress = [
        progress_of(request, index, expected.token_ids[: min(num_tokens, limit)])
        for index, (expected, num_tokens) in enumerate(every)
    ]
    return replace(request, progress=tuple(progress))


def walk(seed: int, num_operations: int, *, has_states: bool) -> None:
    """Runs random operations, of which most make requests run: Hypothesis prefers short runs."""
    draw = random.Random(seed)
    cluster = Cluster()
    setup = {name: draw.choice(values) for name, values in SETUP.items()}
    states = draw.choice([states for states in SETUP["states"] if states])
    setup["states"] = states if has_states else None
    cluster.start(
        transfer_blocks=tuple(draw.choices(range(1, 5), k=3)),
        config={name: draw.choice(values) for name, values in CONFIGS.items()},
        **setup,
    )

    def add() -> None:
        pattern = draw.choice([(0,), (1, 0), (0, 0, 1), (0, 0, 0, 0, 0, 1)])
        beams = {"length_penalty": draw.choice([-1.0, 0.0, 1.0]), "early_stopping": True}
        cluster.add(
            engine=draw.choice([1, 2, 2, 0]),
            prompt=(pattern * MAX_MODEL_LEN)[: draw.randint(1, MAX_MODEL_LEN - 2)],
            num_copies=draw.randint(1, 3),
            max_tokens=draw.choice([1, 2, 5, 9, 14]),
            stop_token_ids=frozenset(draw.choice([(), (), (1,)])),
            seed=draw.randint(0, 2),
            num_candidates=draw.choice([1, 1, 2, 3]),
            num_returned=draw.randint(1, 3),
            beam_search=draw.choice([None, None, None, beams]),
            num_logprobs=(draw.choice([None, None, 1]), draw.choice([None, None, None, 1])),
            regex=draw.choice(["", "", "", "", "......"]),
            num_resumed=draw.choice([[], [], [draw.randint(1, 7)] * draw.randint(1, 3)]),
            priority=draw.randint(0, 2),
            salt=draw.choice(["", "", "", "tenant"]),
            timeout_s=draw.choice([None, None, None, 30]),
            source=draw.choice([None, 0, 1, 2]),
        )

    def mishap() -> None:
        cluster.inject_mishap(draw.randint(0, 2), draw.randint(0, 50), draw.choice(MISHAPS))

    def end_transfer() -> None:
        cluster.end_transfer(draw.randint(0, 2), draw.randint(0, 50), draw.random() < 0.3)

    operations = [
        (4, add),
        (6, lambda: cluster.step(draw.randint(0, 2), draw.randint(1, 12))),
        (2, lambda: cluster.run_all(draw.randint(1, 8))),
        (3, end_transfer),
        (1, mishap),
    ]
    for _, operation in draw.choices(
        operations, [weight for weight, _ in operations], k=num_operations
    ):
        operation()
    cluster.teardown()


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_random_walks_with_states(first: int) -> None:
    for seed in range(first, first + 20):
        walk(seed, 40, has_states=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_walks() -> None:
    for seed in range(1000, 1120):
        walk(seed, 100, has_states=seed % 4 > 0)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
