"""Drafts change no token: random requests on the fake model, with and without draft tokens, in
small pools, overlapped or not, with stop tokens and ends inside of a row of draft tokens.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.common.request.structured_outputs import StructuredOutputs
from engine.request import EngineRequest
from engine.validation import num_blocks_needed
from tests.support.checked_engine import CheckedEngine, CheckedRequest
from tests.support.fake_model import fake_config, fake_info
from tests.support.requests import engine_request

MAX_MODEL_LEN = 40
PROPOSERS = [
    {"method": "ngram"},
    {"method": "suffix"},
    {"model": "fake"},
    {"method": "eagle", "model": "fake"},
]
PATTERNS = [(0,), (1, 0), (0, 0, 1), (0, 1, 1, 0, 1)]


@st.composite
def requests(draw: st.DrawFn) -> list[EngineRequest]:
    """Requests whose prompts repeat themselves, as their texts do with a vocabulary of two."""
    return [draw(_request(str(index))) for index in range(draw(st.integers(1, 6)))]


@st.composite
def _request(draw: st.DrawFn, request_id: str) -> EngineRequest:
    pattern, seed = draw(st.sampled_from(PATTERNS)), draw(st.integers(0, 9))
    regex = draw(st.sampled_from(["", "", "", "...........", "......................"]))
    return engine_request(
        request_id=request_id,
        prompt_token_ids=(pattern * MAX_MODEL_LEN)[: draw(st.integers(1, 16))],
        temperature=1.0 if seed else 0.0,
        seed=seed,
        max_tokens=draw(st.integers(1, 30)),
        n=draw(st.sampled_from([1, 1, 2])),
        stop_token_ids=draw(st.sampled_from([frozenset(), frozenset({1})])),
        repetition_penalty=draw(st.sampled_from([1.0, 2.0])),  # the fake runner checks the history
        logprobs=draw(st.sampled_from([None, None, 1])),
        structured_outputs=StructuredOutputs(regex=regex) if regex else None,
        cache_salt=draw(st.sampled_from(["", "tenant"])),
        prediction_token_ids=tuple(draw(st.just([]) | st.lists(st.integers(0, 1), max_size=30))),
    )


@st.composite
def configs(draw: st.DrawFn, proposer: dict[str, str]) -> dict[str, object]:
    """Flags of an engine that draft tokens."""
    return {
        "speculative_config": {
            **proposer,
            "num_speculative_tokens": draw(st.integers(1, 6)),
            "prompt_lookup_min": 1,
        },
        "max_num_batched_tokens": draw(st.sampled_from([3, 12, 64])),
        "long_prefill_token_threshold": draw(st.sampled_from([None, 3])),
        "max_num_seqs": draw(st.sampled_from([2, 4])),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
        "enable_prefix_caching": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "pipeline_parallel_size": 1 if "model" in proposer else draw(st.sampled_from([1, 1, 2])),
        "kv_transfer_layer_slices": 1,
    }


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_drafts_change_no_token(proposer: dict[str, str]) -> None:
    happened = Counter[str]()

    @settings(
        max_examples=120,
        deadline=None,
        suppress_health_check=[HealthCheck.nested_given, HealthCheck.too_slow],
    )
    @given(
        batch=requests(),
        config=configs(proposer),
        windows=st.sampled_from([(None,), (5, None)]),
        num_spare=st.sampled_from([0, 0, 0, 1, 2, 100]),
    )
    def compare(
        batch: list[EngineRequest],
        config: dict[str, object],
        windows: tuple[int | None, ...],
        num_spare: int,
    ) -> None:
        info = fake_info(4, MAX_MODEL_LEN, windows=windows)
        blocks = max(num_blocks_needed(each, fake_config(**config), info) for each in batch)
        engine = CheckedEngine(info, blocks + num_spare, num_host_blocks=50, **config)
        engine.runner.reads_states = proposer.get("method") == "eagle"
        for request in batch:
            engine.add(CheckedRequest.of(request, info))  # which knows the right tokens
        engine.finish(2000)
        values = engine.core.metrics.snapshot().values
        for result in ("accepted", "rejected"):
            happened[result] += values["baton_engine_draft_tokens", result]
        happened["preempted"] += engine.core.scheduler.load().num_preemptions

    compare()
    assert min(happened["accepted"], happened["rejected"]) > 60, happened
    assert happened["preempted"], happened
