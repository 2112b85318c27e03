"""State machine over a prefill, a decode and an undivided engine with a shared store.

Tiny pools, a vocabulary of two, transfers that end late, fail, or lose their
store, steps that raise, deadlines, aborts, ids used again: whatever happens,
tokens are right, blocks are conserved, and every request ends.
"""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.errors import AbortedError, BatonError, DeadlineExceededError, InternalError
from engine.batch import DrawParams
from engine.core import EngineCore
from engine.request import EngineRequest, FinishReason, RequestOutput
from kvstore.store_connector import StoreConnectorScheduler
from tests.support.fake_connector import FakeWorker
from tests.support.fake_runner import FakeRunner, expected_tokens, fake_config, fake_info

GREEDY = DrawParams(temperature=0, top_k=0, top_p=1, seed=0)
MAX_MODEL_LEN = 24
NAMES = tuple("abcdefgh")
ENGINES = st.integers(0, 2)
MANY = st.integers(0, 50)


class Engine:
    """One core, and the requests that run on it."""

    def __init__(self, machine: "Cluster", config: dict[str, object], num_blocks: int) -> None:
        self.runner = FakeRunner(fake_info(config["block_size"], MAX_MODEL_LEN), num_blocks)
        self.worker = FakeWorker(machine.store)
        connector = (StoreConnectorScheduler("fake", ttl_s=1), self.worker)
        config = fake_config(kv_connector="fake://", **config)
        self.core = EngineCore(config, self.runner, connector, clock=lambda: machine.now)
        self.requests: dict[str, EngineRequest] = {}

    def add(self, request: EngineRequest) -> None:
        self.core.check(request)
        self.core.add_request(request)
        self.requests[request.request_id] = request


class Cluster(RuleBasedStateMachine):
    """Requests go to prefill and with their handoff to decode, or to one engine alone."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4]),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 4),
        caching=st.booleans(),
        spare_blocks=st.integers(0, 6),
        policy=st.sampled_from(["recompute", "fail"]),
    )
    def start(
        self,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        caching: bool,
        spare_blocks: int,
        policy: str,
    ) -> None:
        self.store: dict = {}
        self.now = 0.0
        self.budget = budget
        self.is_ending = False
        config = {
            "block_size": block_size,
            "max_num_batched_tokens": budget,
            "max_num_seqs": max_num_seqs,
            "enable_prefix_caching": caching,
            "kv_load_failure_policy": policy,
        }
        num_blocks = -(-MAX_MODEL_LEN // block_size) + spare_blocks
        self.engines = tuple(
            Engine(self, {"role": role, **config}, num_blocks)
            for role in ("prefill", "decode", "both")
        )
        self.prefill, self.decode, _ = self.engines
        self.tokens: dict[str, list[int]] = {}
        self.handoff_ids: list[str] = []

    @rule(
        engine=ENGINES,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "tenant"]),
        timeout_s=st.none() | st.integers(1, 5),
    )
    def add(
        self,
        engine: int,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        salt: str,
        timeout_s: int | None,
    ) -> None:
        live = {name for each in self.engines for name in each.requests}
        free = [name for name in NAMES if name not in live]
        if not free:
            return
        self.tokens[free[0]] = []
        request = EngineRequest(
            request_id=free[0],
            prompt_token_ids=tuple(prompt),
            draw=GREEDY,
            max_tokens=min(max_tokens, MAX_MODEL_LEN - len(prompt)),
            priority=priority,
            cache_salt=salt,
            deadline=None if timeout_s is None else self.now + timeout_s,
        )
        self.engines[engine].add(request)

    @rule(engine=ENGINES, count=st.integers(1, 8))
    def step(self, engine: int, count: int) -> None:
        for _ in range(count):
            self._step(self.engines[engine])

    @rule(engine=ENGINES)
    def end_transfers(self, engine: int) -> None:
        worker = self.engines[engine].worker
        while worker.pending:
            worker.end(0, fails=False)
        self._step(self.engines[engine])

    @rule(engine=ENGINES, index=MANY, fails=st.booleans())
    def end_transfer(self, engine: int, index: int, fails: bool) -> None:
        worker = self.engines[engine].worker
        if worker.pending:
            worker.end(index % len(worker.pending), fails=fails)

    @rule(index=MANY)
    def lose_object(self, index: int) -> None:
        if self.store:
            del self.store[sorted(self.store)[index % len(self.store)]]

    @rule(index=MANY)
    def release_handoff(self, index: int) -> None:
        if self.handoff_ids:
            self.prefill.core.release_handoff(self.handoff_ids[index % len(self.handoff_ids)])

    @rule(engine=ENGINES, index=MANY)
    def abort(self, engine: int, index: int) -> None:
        live = sorted(self.engines[engine].requests)
        if live:
            request_id = live[index % len(live)]
            outputs = self.engines[engine].core.abort([request_id, "unknown"])
            assert [output.finish_reason for output in outputs] == [FinishReason.ABORTED]
            del self.engines[engine].requests[request_id]

    @rule(engine=ENGINES, fault=st.sampled_from(["raise", "not finite"]))
    def break_next_step(self, engine: int, fault: str) -> None:
        runner = self.engines[engine].runner
        if runner.num_raised_in_row == 0:
            runner.fault = fault

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    def _step(self, engine: Engine) -> None:
        for output in engine.core.step():
            self._take(engine, output)
        assert not engine.runner.failures
        assert all(batch.num_tokens <= self.budget for batch in engine.runner.batches)
        engine.runner.batches.clear()

    def _take(self, engine: Engine, output: RequestOutput) -> None:
        request = engine.requests[output.request_id]
        tokens = self.tokens[output.request_id]
        tokens += output.token_ids
        assert tokens == expected_tokens(request.prompt_token_ids, len(tokens))
        if output.finish_reason is None:
            return
        del engine.requests[output.request_id]
        match output.finish_reason:
            case FinishReason.HANDOFF:
                self._hand_over(engine, request, output)
            case FinishReason.LENGTH:
                assert len(tokens) == request.max_tokens
            case FinishReason.ERROR:
                self._check_error(request, output.error)
            case unexpected:
                raise AssertionError(unexpected)

    def _hand_over(self, engine: Engine, request: EngineRequest, output: RequestOutput) -> None:
        assert engine is self.prefill
        if output.handoff is not None:
            self.handoff_ids.append(output.handoff.handoff_id)
        tokens = tuple(self.tokens[request.request_id])
        self.decode.add(replace(request, output_token_ids=tokens, handoff=output.handoff))

    def _check_error(self, request: EngineRequest, error: BatonError | None) -> None:
        match error:
            case DeadlineExceededError():
                assert request.deadline is not None
                assert request.deadline <= self.now
            case AbortedError():
                assert "could not be loaded" in error.message
            case _:
                assert isinstance(error, InternalError)
                assert not self.is_ending, "no step was broken"

    @invariant()
    def blocks_are_conserved(self) -> None:
        for engine in getattr(self, "engines", ()):
            engine.core.scheduler.check()

    def teardown(self) -> None:
        """With nothing broken any more, every request ends and every block is free."""
        self.is_ending = True
        engines = getattr(self, "engines", ())
        for engine in engines:
            engine.runner.fault = None
        for _ in range(2000):
            busy = [engine for engine in engines if engine.core.has_work]
            if not busy:
                break
            for engine in busy:
                while engine.worker.pending:
                    engine.worker.end(0, fails=False)
                self._step(engine)
        for engine in engines:
            assert not engine.requests, "a request starved"
            engine.core.scheduler.check()
            assert engine.core.load().num_free_blocks == engine.core.num_blocks


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
