"""Features of scheduling and memory management never change an output.

Random sets of requests of all kinds get the same outputs from a plain engine with a large pool
as from engines with each feature, with all features together, and when each request runs alone.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.request import EngineRequest
from engine.validation import num_blocks_needed
from tests.support.checked_engine import CheckedEngine, CheckedRequest
from tests.support.fake_model import fake_config, fake_info
from tests.support.requests import engine_request

MAX_MODEL_LEN = 40
PLAIN: dict[str, object] = {"enable_prefix_caching": False, "max_num_seqs": 64}
CROWDED: dict[str, object] = {"preemption_mode": "recompute", "max_num_seqs": 64}
SWAPPING = CROWDED | {"preemption_mode": "swap"}
OVERLAPPED: dict[str, object] = {"async_scheduling": True}
LANES = OVERLAPPED | {"pipeline_parallel_size": 3, "kv_transfer_layer_slices": 1}
DRAFTS = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}}
DRAFTING = DRAFTS | {"max_num_batched_tokens": 20, "max_num_seqs": 4}
CHUNKED: dict[str, object] = {"max_num_batched_tokens": 7, "max_num_partial_prefills": 2}
FEATURES = {
    "prefix caching": {},
    "chunks": PLAIN | CHUNKED,
    "long prompts": PLAIN | {"long_prefill_token_threshold": 3},
    "few at a time": PLAIN | {"max_num_seqs": 3},
    "overlap": PLAIN | OVERLAPPED,
    "lanes": PLAIN | LANES,
    "drafts": PLAIN | DRAFTS,
    "drafts, overlap, few tokens": DRAFTING | OVERLAPPED,
    "drafts, lanes": DRAFTING | LANES,
    "all but preemption": CHUNKED | OVERLAPPED | {"long_prefill_token_threshold": 2},
}
PREEMPTING = {
    "recompute": (CROWDED, 0),
    "swap": (SWAPPING, 200),
    "swap to a small pool": (SWAPPING, 8),
    "auto": (CROWDED | {"preemption_mode": "auto"}, 200),
    "recompute, overlap": (CROWDED | OVERLAPPED, 0),
    "swap, overlap": (SWAPPING | OVERLAPPED, 200),
    "swap, overlap, chunks": (SWAPPING | OVERLAPPED | CHUNKED, 200),
    "recompute, lanes": (CROWDED | LANES, 0),
    "swap, lanes, chunks": (SWAPPING | LANES | CHUNKED, 200),
    "recompute, drafts": (CROWDED | DRAFTS, 0),
    "swap, drafts, overlap": (SWAPPING | DRAFTS | OVERLAPPED, 200),
}
WINDOWS = [(None,), (3,), (5, None), (2, 6, None)]


@st.composite
def requests(draw: st.DrawFn, *, fewest: int = 1) -> list[EngineRequest]:
    """Requests with or without a shared prefix, with candidates or beams."""
    start = tuple(draw(st.lists(st.integers(0, 1), max_size=9)))
    return [draw(_request(str(index), start)) for index in range(draw(st.integers(fewest, 7)))]


@st.composite
def _request(draw: st.DrawFn, request_id: str, start: tuple[int, ...]) -> EngineRequest:
    own = draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
    num_candidates = draw(st.integers(1, 3))
    compared = st.builds(
        dict,
        best_of=st.just(num_candidates),
        repetition_penalty=st.sampled_from([1.0, 2.0]),  # the fake runner checks the history
    )
    searched = st.builds(
        dict,
        beam_width=st.just(num_candidates),
        early_stopping=st.sampled_from([True, False, "never"]),
    )
    seed = draw(st.integers(0, 5))
    return engine_request(
        request_id=request_id,
        prompt_token_ids=(*(start if draw(st.booleans()) else ()), *own),
        temperature=1.0 if seed else 0.0,
        seed=seed,
        max_tokens=draw(st.integers(1, 20) | st.integers(15, 20)),
        n=draw(st.integers(1, num_candidates)),
        **draw(st.one_of(compared, compared, searched)),
        stop_token_ids=draw(st.sampled_from([frozenset(), frozenset(), frozenset({1})])),
        priority=draw(st.integers(0, 1)),
    )


def run(
    batch: list[EngineRequest],
    num_blocks: int,
    config: dict[str, object],
    *,
    windows: tuple[int | None, ...] = (None,),
    num_host_blocks: int = 0,
) -> tuple[list[CheckedRequest], Counter[str]]:
    """Returns what each request received, in their order, and how often each event occurred."""
    info = fake_info(4, MAX_MODEL_LEN, windows=windows)
    engine = CheckedEngine(info, num_blocks, num_host_blocks=num_host_blocks, **config)
    for request in batch:
        engine.add(CheckedRequest.of(request, info))
    engine.finish(3000)
    happened = engine.counts
    happened["preemptions"] = engine.core.scheduler.load().num_preemptions
    happened["hits"] = engine.core.scheduler.load().prefix_cache_hits
    return [engine.finished[request.spec.request_id] for request in batch], happened


def blocks_of_largest(
    batch: list[EngineRequest], config: dict[str, object], windows: tuple[int | None, ...]
) -> int:
    """Returns the fewest blocks with which each request can run alone."""
    info = fake_info(4, MAX_MODEL_LEN, windows=windows)
    return max(num_blocks_needed(request, fake_config(**config), info) for request in batch)


@settings(max_examples=15, deadline=None)
@given(batch=requests())
def test_no_feature_changes_an_output(batch: list[EngineRequest]) -> None:
    plain, _ = run(batch, 500, PLAIN)

    for feature, config in FEATURES.items():
        assert run(batch, 500, config)[0] == plain, feature


@settings(max_examples=15, deadline=None)
@given(batch=requests(), windows=st.sampled_from(WINDOWS), caching=st.booleans())
def test_a_window_changes_no_output(
    batch: list[EngineRequest], windows: tuple[int | None, ...], caching: bool
) -> None:
    """The fake model draws from the whole sequence, whatever attention sees."""
    plain, _ = run(batch, 500, PLAIN)
    config = CHUNKED | {"enable_prefix_caching": caching}

    assert run(batch, 900, config, windows=windows)[0] == plain


@settings(max_examples=30, deadline=None)
@given(batch=requests())
def test_batch_neighbours_change_no_output(batch: list[EngineRequest]) -> None:
    together, _ = run(batch, 500, PLAIN)

    assert [run([request], 500, PLAIN)[0][0] for request in batch] == together


@pytest.mark.parametrize(
    "feature",
    [
        "swap, overlap, chunks",
        *(
            pytest.param(feature, marks=pytest.mark.slow)
            for feature in (
                "recompute",
                "swap",
                "swap to a small pool",
                "auto",
                "recompute, overlap",
                "swap, overlap",
                "recompute, lanes",
                "swap, lanes, chunks",
            )
        ),
    ],
)
def test_preemption_changes_no_output(feature: str) -> None:
    config, num_host_blocks = PREEMPTING[feature]
    happened = Counter[str]()

    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.nested_given, HealthCheck.too_slow],
    )
    @given(batch=requests(fewest=4), windows=st.sampled_from(WINDOWS), caching=st.booleans())
    def compare(batch: list[EngineRequest], windows: tuple[int | None, ...], caching: bool) -> None:
        plain, _ = run(batch, 500, PLAIN)
        crowded, counts = run(
            batch,
            blocks_of_largest(batch, config, windows),
            config | {"enable_prefix_caching": caching},
            windows=windows,
            num_host_blocks=num_host_blocks,
        )
        assert crowded == plain
        happened.update(counts)

    compare()
    assert happened["preemptions"] > 5, "the pool was large enough to run without preemptions"
    assert ("swap" in feature or "auto" in feature) == (happened["swapped blocks"] > 0)
