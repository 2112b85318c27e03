"""An engine that pulls the beginning of a prompt from another one's prefix cache draws the same
tokens, computes only the rest, and every block is free afterwards.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.groups.states import new_handoff_id
from engine.loop.core import EngineCore
from engine.request import EngineOutput, EngineRequest, FinishReason, PrefixRequest
from kvstore.block_key import BlockKeyChain
from kvstore.handoff import KvHandoff
from tests.support.checkpoints import FAMILIES, reference_greedy, tiny_checkpoint
from tests.support.engine_work import has_work
from tests.support.later_families import HYBRID_FAMILIES
from tests.support.lending_engine import LendingEngine
from tests.support.pairs import pairs
from tests.support.real_engines import build_core, hand_over, tokens_of
from tests.support.requests import engine_request

pytestmark = pytest.mark.usefixtures("loads_are_worth_it")

PROMPT = tuple((7 + 31 * index) % 256 for index in range(45))
NUM_TOKENS = 8
PEERS = ("grpc", "nixl")
# Tokens per block of the pools: of the lending engine, and of the others.
FORMS = {"equal": (8, 8), "larger": (8, 16), "smaller": (16, 8)}
CASES = [
    *pairs([*FAMILIES, *HYBRID_FAMILIES], PEERS, (False, True), tuple(FORMS)),
    # With windows, larger blocks may need tokens that the other engine has given up.
    ("gemma3", "grpc", False, "equal"),
    ("gemma3", "nixl", True, "smaller"),
]


class Engines:
    """Engines whose steps the test makes, each in turn."""

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        self.cores = cores
        self.outputs: dict[EngineCore, list[EngineOutput]] = {core: [] for core in cores}
        self.frozen: set[EngineCore] = set()
        self._has_results = threading.Event()
        for core in cores:
            core._connector.set_waker(self._has_results.set)

    def run(self, until: Callable[[], object]) -> None:
        """Steps the engines until a condition holds."""
        while not until():
            self._has_results.clear()
            live = [core for core in self.cores if core not in self.frozen]
            for core in live:
                core.run_step(self.outputs[core].extend)
            if all(core.is_stalled for core in live) and not until():
                assert self._has_results.wait(30), "all engines are stalled"

    def complete(self, core: EngineCore, request: EngineRequest) -> list[EngineOutput]:
        """Runs a request to its last output; returns its outputs."""
        outputs = self.outputs[core]
        outputs.clear()
        core.check(request)
        outputs += core.scheduler.add(request)
        self.run(lambda: outputs and outputs[-1].is_last)
        return list(outputs)

    def ask(self, source: EngineCore, keys: Sequence[bytes]) -> KvHandoff | None:
        """Asks an engine to lend a prefix; returns its answer."""
        answers: list[KvHandoff | None] = []
        source.scheduler.lend_prefix(PrefixRequest(new_handoff_id(), keys, answers.append))
        self.run(lambda: answers)
        (handoff,) = answers
        return handoff

    def run_to_the_end(self) -> None:
        """Runs until nothing is left to do; checks that every block is free."""
        cores = [core for core in self.cores if core not in self.frozen]
        self.run(
            lambda: (
                not any(has_work(core) for core in cores)
                and all(core.scheduler.kv.pool.num_free == core.num_blocks for core in cores)
            )
        )
        for core in cores:
            core.scheduler.check()


@contextmanager
def engines(
    variant: str,
    scheme: str = "grpc",
    form: str = "equal",
    num_engines: int = 2,
    timeout_s: float = 20,
    **flags: object,
) -> Iterator[Engines]:
    cores: list[EngineCore] = []
    try:
        for index in range(num_engines):
            settings: dict[str, object] = {
                "kv_connector": f"{scheme}://?timeout_s={timeout_s}",
                "block_size": FORMS[form][min(index, 1)],
                "kv_transfer_block_size": 8,
            }
            cores.append(build_core(tiny_checkpoint(variant), "both", **(settings | flags)))
        yield Engines(cores)
    finally:
        for core in cores:
            core.close()


def prompt_keys(core: EngineCore, prompt: tuple[int, ...] = PROMPT) -> tuple[bytes, ...]:
    keys = BlockKeyChain(core.namespace, core.config.transfer_block_size)
    return tuple(keys.extend(prompt[:-1]))


def num_computed(core: EngineCore) -> int:
    """Tokens that an engine has computed."""
    _, histograms = core.metrics.snapshot()
    return int(histograms["baton_engine_step_tokens",].total)


def num_pulled(core: EngineCore) -> int:
    return int(core.metrics.snapshot().values["baton_engine_cached_prompt_tokens", "pulled"])


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    ("variant", "scheme", "overlaps", "form"),
    CASES,
)
def test_a_pulled_prefix_is_not_computed_and_changes_no_token(
    variant: str, scheme: str, overlaps: bool, form: str
) -> None:
    flags = {"async_scheduling": overlaps}
    if variant in HYBRID_FAMILIES:
        flags |= {"state_interval": 16, "num_state_slots": 8}
    first = engine_request("first", PROMPT, max_tokens=1)
    second = engine_request("second", PROMPT, max_tokens=NUM_TOKENS)
    with engines(variant, scheme, form, **flags) as pair:
        source, target = pair.cores
        pair.complete(source, first)
        handoff = pair.ask(source, prompt_keys(source))
        assert handoff is not None
        before = num_computed(target)
        outputs = pair.complete(target, replace(second, prefix=handoff))
        source.scheduler.release_handoff(handoff.handoff_id)
        pair.run_to_the_end()
        computed, pulled = num_computed(target) - before, num_pulled(target)
    assert tokens_of(outputs) == reference_greedy(tiny_checkpoint(variant), PROMPT, NUM_TOKENS)
    assert 16 <= handoff.num_tokens <= 40
    assert pulled == handoff.num_tokens == outputs[0].cached_tokens
    assert computed == len(PROMPT) - handoff.num_tokens + NUM_TOKENS - 1


@pytest.mark.parametrize("scheme", PEERS)
def test_what_was_pulled_is_handed_over_with_the_rest(scheme: str) -> None:
    first = engine_request("first", PROMPT, max_tokens=1)
    second = engine_request("second", PROMPT, max_tokens=NUM_TOKENS)
    with engines("llama", scheme, num_engines=3) as three:
        source, prefill, decode = three.cores
        three.complete(source, first)
        handoff = three.ask(source, prompt_keys(source))
        assert handoff is not None
        pulling = replace(second, prefix=handoff, hands_over=True)
        prefilled = three.complete(prefill, pulling)
        source.scheduler.release_handoff(handoff.handoff_id)
        assert prefilled[-1].finish_reason is FinishReason.HANDOFF
        handed_over = hand_over(second, prefilled)
        assert handed_over.handoff is not None
        assert handed_over.handoff.num_tokens == len(PROMPT)
        outputs = three.complete(decode, handed_over)
        prefill.scheduler.release_handoff(handed_over.handoff.handoff_id)
        three.run_to_the_end()
        assert num_pulled(prefill) == 40
        assert num_computed(decode) == NUM_TOKENS - 1
    expected = reference_greedy(tiny_checkpoint("llama"), PROMPT, NUM_TOKENS)
    assert [*tokens_of(prefilled), *tokens_of(outputs)] == expected


@pytest.mark.parametrize("scheme", PEERS)
def test_the_next_turn_pulls_the_answer_from_the_engine_that_generated_it(
    scheme: str,
) -> None:
    with engines("llama", scheme) as pair:
        decode, prefill = pair.cores
        answer = tokens_of(pair.complete(decode, engine_request("a", PROMPT, max_tokens=30)))
        next_turn = (*PROMPT, *answer, *range(9))
        handoff = pair.ask(decode, prompt_keys(decode, next_turn))
        assert handoff is not None
        assert handoff.num_tokens == (len(PROMPT) + len(answer) - 1) // 8 * 8
        request = engine_request("b", next_turn, max_tokens=4, prefix=handoff)
        outputs = pair.complete(prefill, request)
        decode.scheduler.release_handoff(handoff.handoff_id)
        pair.run_to_the_end()
        assert num_pulled(prefill) == handoff.num_tokens
    assert tokens_of(outputs) == reference_greedy(tiny_checkpoint("llama"), next_turn, 4)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("mishap", ["lease over", "source gone", "source frozen"])
@pytest.mark.parametrize("scheme", PEERS)
def test_a_pull_that_fails_is_computed_whatever_the_policy_is(
    scheme: str, mishap: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thawed = threading.Event()
    with engines("llama", scheme, timeout_s=1, kv_load_failure_policy=policy) as pair:
        source, target = pair.cores
        pair.complete(source, engine_request("first", PROMPT, max_tokens=1))
        handoff = pair.ask(source, prompt_keys(source))
        assert handoff is not None
        if mishap == "lease over":
            source.scheduler.release_handoff(handoff.handoff_id)
            pair.run(lambda: source.scheduler.kv.pool.num_free == source.num_blocks)
        elif mishap == "source gone":
            pair.frozen.add(source)
            source.close()
        else:
            pair.frozen.add(source)
            servicer = source._connector._lending._servicer
            monkeypatch.setattr(servicer, "_open_for", lambda context: thawed.wait())
        request = engine_request("second", PROMPT, max_tokens=NUM_TOKENS, prefix=handoff)
        outputs = pair.complete(target, request)
        thawed.set()
        assert num_pulled(target) == 0
        pair.run_to_the_end()
    expected = reference_greedy(tiny_checkpoint("llama"), PROMPT, NUM_TOKENS)
    assert tokens_of(outputs) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "number"),
    [("grpc", signal.SIGKILL), ("grpc", signal.SIGSTOP), ("nixl", signal.SIGKILL)],
)
def test_the_process_that_lends_is_killed_or_stopped(scheme: str, number: signal.Signals) -> None:
    """The prompt is computed after a bounded time."""
    url = f"{scheme}://?timeout_s=1"
    with (
        LendingEngine(url, PROMPT) as source,
        engines("llama", scheme, num_engines=1, timeout_s=1) as one,
    ):
        source.send(number)
        request = engine_request("second", PROMPT, max_tokens=NUM_TOKENS, prefix=source.handoff)
        outputs = one.complete(one.cores[0], request)
        one.run_to_the_end()
    assert tokens_of(outputs) == reference_greedy(tiny_checkpoint("llama"), PROMPT, NUM_TOKENS)
    assert outputs[0].cached_tokens == 0


def test_blocks_that_were_evicted_are_not_lent() -> None:
    with engines("llama", num_gpu_blocks_override=10, max_model_len=80) as pair:
        source, target = pair.cores
        pair.complete(source, engine_request("first", PROMPT, max_tokens=1))
        keys = prompt_keys(source)
        other = tuple((3 + 17 * index) % 256 for index in range(57))
        pair.complete(source, engine_request("other", other, max_tokens=1))
        handoff = pair.ask(source, keys)
        assert handoff is None or handoff.num_tokens < 40
        if handoff is not None:
            source.scheduler.release_handoff(handoff.handoff_id)
        source.scheduler.reset_prefix_cache()
        assert pair.ask(source, keys) is None
        assert pair.ask(target, keys) is None
        pair.run_to_the_end()


def test_requests_of_the_lending_engine_get_their_blocks_back() -> None:
    with engines("llama", num_gpu_blocks_override=10, max_model_len=80) as pair:
        source, _ = pair.cores
        pair.complete(source, engine_request("first", PROMPT, max_tokens=1))
        handoff = pair.ask(source, prompt_keys(source))
        assert handoff is not None
        assert source.scheduler.kv.pool.num_free == 5
        other = tuple((3 + 17 * index) % 256 for index in range(57))
        outputs = pair.complete(source, engine_request("other", other, max_tokens=8))
        assert tokens_of(outputs) == reference_greedy(tiny_checkpoint("llama"), other, 8)
        pair.run_to_the_end()
