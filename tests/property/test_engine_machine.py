"""State machine over a prefill and a decode engine with a shared store.

Tiny pools, a vocabulary of two, transfers that end late, fail, or lose their
store: whatever happens, tokens are right, blocks are conserved, and every
request ends.
"""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.batch import DrawParams
from engine.core import EngineCore
from engine.request import EngineRequest, FinishReason, RequestOutput
from kvstore.store_connector import StoreConnectorScheduler
from tests.support.fake_connector import FakeWorker
from tests.support.fake_runner import FakeRunner, expected_tokens, fake_config, fake_info

GREEDY = DrawParams(temperature=0, top_k=0, top_p=1, seed=0)
MAX_MODEL_LEN = 24


class Engine:
    """One core, and what its requests have brought so far."""

    def __init__(self, role: str, store: dict, config: dict, num_blocks: int) -> None:
        block_size = config["block_size"]
        self.runner = FakeRunner(fake_info(block_size, MAX_MODEL_LEN), num_blocks)
        self.worker = FakeWorker(store)
        connector = (StoreConnectorScheduler("fake", ttl_s=1), self.worker)
        config = fake_config(role=role, kv_connector="fake://", **config)
        self.core = EngineCore(config, self.runner, connector)
        self.requests: dict[str, EngineRequest] = {}

    def add(self, request: EngineRequest) -> None:
        self.core.check(request)
        self.core.add_request(request)
        self.requests[request.request_id] = request


class TwoTiers(RuleBasedStateMachine):
    """Requests go to prefill, then with their handoff to decode."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4]),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 4),
        caching=st.booleans(),
        spare_blocks=st.integers(0, 6),
    )
    def start(
        self, block_size: int, budget: int, max_num_seqs: int, caching: bool, spare_blocks: int
    ) -> None:
        self.store: dict = {}
        self.budget = budget
        config = {
            "block_size": block_size,
            "max_num_batched_tokens": budget,
            "max_num_seqs": max_num_seqs,
            "enable_prefix_caching": caching,
        }
        num_blocks = -(-MAX_MODEL_LEN // block_size) + spare_blocks
        self.prefill = Engine("prefill", self.store, config, num_blocks)
        self.decode = Engine("decode", self.store, config, num_blocks)
        self.engines = (self.prefill, self.decode)
        self.tokens: dict[str, list[int]] = {}
        self.num_requests = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "tenant"]),
        remote=st.booleans(),
    )
    def add(
        self, prompt: list[int], max_tokens: int, priority: int, salt: str, remote: bool
    ) -> None:
        self.num_requests += 1
        request = EngineRequest(
            request_id=f"r{self.num_requests}",
            prompt_token_ids=tuple(prompt),
            draw=GREEDY,
            max_tokens=min(max_tokens, MAX_MODEL_LEN - len(prompt)),
            priority=priority,
            cache_salt=salt,
        )
        self.tokens[request.request_id] = []
        (self.prefill if remote else self.decode).add(request)

    @rule(engine=st.integers(0, 1), count=st.integers(1, 8))
    def step(self, engine: int, count: int) -> None:
        for _ in range(count):
            self._step(self.engines[engine])

    @rule(engine=st.integers(0, 1))
    def end_transfers(self, engine: int) -> None:
        worker = self.engines[engine].worker
        while worker.pending:
            worker.end(0, fails=False)
        self._step(self.engines[engine])

    @rule(engine=st.integers(0, 1), index=st.integers(0, 50), fails=st.booleans())
    def end_transfer(self, engine: int, index: int, fails: bool) -> None:
        worker = self.engines[engine].worker
        if worker.pending:
            worker.end(index % len(worker.pending), fails=fails)

    @rule(index=st.integers(0, 50))
    def lose_object(self, index: int) -> None:
        if self.store:
            del self.store[sorted(self.store)[index % len(self.store)]]

    @rule(engine=st.integers(0, 1), index=st.integers(0, 50))
    def abort(self, engine: int, index: int) -> None:
        live = sorted(self.engines[engine].requests)
        if live:
            request_id = live[index % len(live)]
            outputs = self.engines[engine].core.abort([request_id, "unknown"])
            assert [output.finish_reason for output in outputs] == [FinishReason.ABORTED]
            del self.engines[engine].requests[request_id]

    def _step(self, engine: Engine) -> None:
        for output in engine.core.step():
            self._take(engine, output)
        assert all(batch.num_tokens <= self.budget for batch in engine.runner.batches)
        engine.runner.batches.clear()

    def _take(self, engine: Engine, output: RequestOutput) -> None:
        request = engine.requests[output.request_id]
        tokens = self.tokens[output.request_id]
        tokens += output.token_ids
        assert not engine.runner.failures
        assert tokens == expected_tokens(request.prompt_token_ids, len(tokens))
        if output.finish_reason is None:
            return
        del engine.requests[output.request_id]
        if output.finish_reason is FinishReason.HANDOFF:
            assert engine is self.prefill
            handed = replace(request, output_token_ids=tuple(tokens), handoff=output.handoff)
            self.decode.add(handed)
        else:
            assert output.finish_reason is FinishReason.LENGTH, output
            assert len(tokens) == request.max_tokens

    @invariant()
    def blocks_are_conserved(self) -> None:
        for engine in getattr(self, "engines", ()):
            engine.core.scheduler.check()

    def teardown(self) -> None:
        """With transfers ending well again, every request ends and every block is free."""
        for _ in range(2000):
            busy = [engine for engine in getattr(self, "engines", ()) if engine.core.has_work]
            if not busy:
                break
            for engine in busy:
                while engine.worker.pending:
                    engine.worker.end(0, fails=False)
                self._step(engine)
        for engine in getattr(self, "engines", ()):
            assert not engine.requests, "a request starved"
            engine.core.scheduler.check()
            assert engine.core.load().num_free_blocks == engine.core.num_blocks


TestTwoTiers = TwoTiers.TestCase
TestTwoTiers.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
