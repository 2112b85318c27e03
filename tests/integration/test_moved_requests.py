"""Requests that move from one decode engine to another keep their tokens, and bring their KV."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from baton.common.errors import AbortedError
from engine.loop.core import EngineCore
from engine.request import CandidateProgress, EngineOutput, EngineRequest, FinishReason
from kvstore import store_connector
from tests.support.checkpoints import FAMILIES, reference_greedy, tiny_checkpoint
from tests.support.engine_work import has_work
from tests.support.later_families import HYBRID_FAMILIES, LATER_FAMILIES
from tests.support.pairs import pairs
from tests.support.real_engines import build_core, tokens_of
from tests.support.requests import engine_request

NUM_TOKENS = 24
PROMPT = tuple((7 + 31 * index) % 256 for index in range(21))
STORES = ("memory", "shm", "file", "redis")
CONNECTORS = (*STORES, "grpc", "nixl")


# Each later family once, in turn with the connectors and the other values.
LATER_CASES = [
    (variant, CONNECTORS[index % 6], index % 4 > 1, (2, 11, 12)[index % 5 % 3])
    for index, variant in enumerate(sorted({*LATER_FAMILIES} - {*HYBRID_FAMILIES}))
]


@pytest.fixture(autouse=True)
def late_lookups_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks prompts up on a busy machine, too, where the thread for that may start late."""
    monkeypatch.setattr(store_connector, "_MAX_LOOKUP_WAIT_S", 20.0)


class Pair:
    """Two decode engines, and one request that moves from the first to the second."""

    def __init__(self, stack: ExitStack, variant: str = "llama", **flags: object) -> None:
        self.path = tiny_checkpoint(variant)
        defaults = {"block_size": 8, "kv_load_failure_policy": "fail"}
        self.old, self.new = (
            build_core(self.path, "decode", **{**defaults, **flags}) for _ in range(2)
        )
        self._has_results = threading.Event()
        for core in (self.old, self.new):
            stack.callback(core.close)
            core._connector.set_waker(self._has_results.set)
        self.outputs: dict[EngineCore, list[EngineOutput]] = {self.old: [], self.new: []}

    def run(self, core: EngineCore, until: Callable[[], object]) -> None:
        """Steps both engines until a condition holds; outputs are those of the given one."""
        while not until():
            self._has_results.clear()
            for each in (self.old, self.new):
                each.run_step(self.outputs[each].extend)
            if self.old.is_stalled and self.new.is_stalled and not until():
                assert self._has_results.wait(30), "both engines are stalled"

    def add(self, core: EngineCore, request: EngineRequest) -> None:
        core.check(request)
        self.outputs[core] += core.scheduler.add(request)

    def move(self, request: EngineRequest) -> EngineRequest:
        """Moves the request off the old engine; returns the one for the new engine."""
        outputs = self.outputs[self.old]
        outputs += self.old.scheduler.move(request.spec.request_id)
        self.run(self.old, lambda: outputs and outputs[-1].is_last)
        assert outputs[-1].finish_reason is FinishReason.HANDOFF
        indices = {output.index for output in outputs if output.token_ids}
        progress = tuple(
            CandidateProgress(index, tuple(tokens_of(outputs, index))) for index in sorted(indices)
        )
        return replace(request, handoff=outputs[-1].handoff, progress=progress)

    def finish(self, moved: EngineRequest) -> None:
        """Runs the moved request to its end; checks that no block is held afterwards."""
        new = self.outputs[self.new]
        self.add(self.new, moved)
        self.run(self.new, lambda: any(output.token_ids or output.is_last for output in new))
        if moved.handoff is not None:
            self.old.scheduler.release_handoff(moved.handoff.handoff_id)
        self.run(self.new, self._is_over)
        for core in (self.old, self.new):
            core.scheduler.check()

    def tokens(self, index: int = 0) -> list[int]:
        both = (*self.outputs[self.old], *self.outputs[self.new])
        return tokens_of(both, index)

    def _is_over(self) -> bool:
        cores = (self.old, self.new)
        is_idle = not any(has_work(core) for core in cores)
        return is_idle and all(core.scheduler.kv.pool.num_free == core.num_blocks for core in cores)


def num_computed(core: EngineCore) -> int:
    """Tokens that an engine has computed."""
    _, histograms = core.metrics.snapshot()
    return int(histograms["baton_engine_step_tokens",].total)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    ("variant", "connector_url", "overlaps", "num_before"),
    pairs(FAMILIES, CONNECTORS, (False, True), (2, 11, 12)) + LATER_CASES,
    indirect=["connector_url"],
)
def test_a_moved_request_keeps_its_tokens_and_brings_its_kv(
    variant: str, connector_url: str, overlaps: bool, num_before: int
) -> None:
    request = engine_request("moved", PROMPT, max_tokens=NUM_TOKENS)
    with ExitStack() as stack:
        flags = {"kv_connector": connector_url, "async_scheduling": overlaps}
        pair = Pair(stack, variant, **flags)
        pair.add(pair.old, request)
        old = pair.outputs[pair.old]
        pair.run(pair.old, lambda: len(tokens_of(old)) >= num_before)
        moved = pair.move(request)
        pair.finish(moved)
        computed = num_computed(pair.new)
    assert pair.tokens() == reference_greedy(pair.path, PROMPT, NUM_TOKENS)
    known, to_draw = known_and_missing(moved)
    is_store = connector_url.partition(":")[0] in STORES
    assert (moved.handoff is None) == is_store
    if is_store:  # blocks of eight tokens; the rest is computed again
        assert computed == (known - 1) % 8 + to_draw
    else:
        assert moved.handoff.num_tokens == known - 1
        assert computed == to_draw


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(
    ("variant", "connector_url", "overlaps", "num_before", "interval"),
    pairs(HYBRID_FAMILIES, CONNECTORS, (False, True), (2, 3, 12), (8, 16)),
    indirect=["connector_url"],
)
def test_a_moved_request_goes_on_at_the_last_states_that_were_kept(
    variant: str, connector_url: str, overlaps: bool, num_before: int, interval: int
) -> None:
    request = engine_request("moved", PROMPT, max_tokens=NUM_TOKENS)
    with ExitStack() as stack:
        flags = {"kv_connector": connector_url, "async_scheduling": overlaps}
        pair = Pair(stack, variant, **flags, state_interval=interval)
        pair.add(pair.old, request)
        old = pair.outputs[pair.old]
        pair.run(pair.old, lambda: len(tokens_of(old)) >= num_before)
        moved = pair.move(request)
        pair.finish(moved)
        computed = num_computed(pair.new)
    assert pair.tokens() == reference_greedy(pair.path, PROMPT, NUM_TOKENS)
    known, to_draw = known_and_missing(moved)
    assert moved.handoff.num_tokens >= (known - 1) // interval * interval
    assert computed == known - 1 - moved.handoff.num_tokens + to_draw


@pytest.mark.parametrize("lost", [0, -1])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_handoff_of_states_that_a_store_has_lost_follows_the_policy(
    policy: str, lost: int, tmp_path: Path
) -> None:
    """Stores keep no other KV in handoffs of moved requests, but look it up."""
    request = engine_request("moved", PROMPT, max_tokens=NUM_TOKENS)
    with ExitStack() as stack:
        flags = {"kv_connector": f"file://{tmp_path}/kv", "state_interval": 8}
        pair = Pair(stack, "lfm2", **flags, kv_load_failure_policy=policy)
        pair.add(pair.old, request)
        old = pair.outputs[pair.old]
        pair.run(pair.old, lambda: len(tokens_of(old)) >= 12)
        moved = pair.move(request)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        objects = [path for path in files if path.stat().st_size >= 4096]
        sorted(objects, key=lambda path: path.stat().st_mtime_ns)[lost].unlink()
        pair.finish(moved)
    last = pair.outputs[pair.new][-1]
    if policy == "fail":
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, AbortedError)
    else:
        assert last.finish_reason is FinishReason.LENGTH
        assert pair.tokens() == reference_greedy(pair.path, PROMPT, NUM_TOKENS)


def known_and_missing(moved: EngineRequest) -> tuple[int, int]:
    """Returns how many tokens are known when a request moves, and how many are still drawn."""
    num_drawn = len(moved.progress[0].output_token_ids)
    return len(PROMPT) + num_drawn, NUM_TOKENS - num_drawn
