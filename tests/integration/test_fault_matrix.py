"""Each backend with each fault under 50 streams: right tokens or typed errors, no lost blocks."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from baton.common.errors import AbortedError
from engine.request import EngineRequest
from kvstore import faults
from kvstore.faults import FAULTS
from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.kv_urls import fresh_shm_name, kv_urls, with_faults
from tests.support.real_engines import SplitRun, build_core, run_all, tokens_of
from tests.support.redis_server import RedisServer
from tests.support.requests import engine_request

# Only tried loads meet faults.
pytestmark = pytest.mark.usefixtures("loads_are_worth_it")

BACKENDS = ("memory", "shm", "file", "redis", "grpc", "nixl", "multi")
# Every backend and every fault runs with both.
POLICIES = ("recompute", "fail")
CELLS = [
    (backend, fault, POLICIES[(row + column) % 2])
    for row, backend in enumerate(BACKENDS)
    for column, fault in enumerate(FAULTS)
]
NUM_STREAMS = 50
NUM_TOKENS = 6
DEADLINE_S = 60.0
ENGINE = {"max_num_seqs": NUM_STREAMS, "max_num_batched_tokens": 128, "block_size": 8}


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, backend: str) -> Iterator[str]:
    redis_url = ""
    if backend == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        redis_url = server.url
    with fresh_shm_name() as name:
        yield kv_urls(tmp_path, name, redis_url, timeout_s=20)[backend]


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the name of each fault, each time that it occurs."""
    names: list[str] = []
    draw = faults._Dice.draw

    def noting_draw(dice, fault, call, key):
        drawn = draw(dice, fault, call, key)
        if drawn is not None:
            names.append(fault)
        return drawn

    monkeypatch.setattr(faults._Dice, "draw", noting_draw)
    return names


def make_requests() -> list[EngineRequest]:
    """Returns requests with prompts of mixed lengths, most of which share a prefix."""
    lots = random.Random(1)
    prefixes = [prompt_of(length, seed=length) for length in (16, 40, 60)]
    requests = []
    for index in range(NUM_STREAMS):
        prefix = prefixes[index % 4] if index % 4 < len(prefixes) else []
        suffix = [lots.randrange(256) for _ in range(lots.choice((1, 7, 8, 9, 30)))]
        requests.append(
            engine_request(
                request_id=str(index),
                prompt_token_ids=(*prefix, *suffix),
                max_tokens=NUM_TOKENS,
                deadline=time.monotonic() + DEADLINE_S,
            )
        )
    return requests


@cache
def expected_tokens() -> dict[str, list[int]]:
    """Returns the tokens that one engine for prefill and decode generates."""
    core = build_core(tiny_checkpoint("llama"), "both", num_gpu_blocks_override=512, **ENGINE)
    outputs = run_all(core, make_requests())
    core.close()
    return {request_id: tokens_of(answer) for request_id, answer in outputs.items()}


def run_split(url: str, policy: str) -> SplitRun:
    """Runs the requests on two engines, and checks that all blocks are free in the end."""
    flags = {"kv_connector": url, "kv_load_failure_policy": policy, **ENGINE}
    # The blocks do not suffice for all requests at once: failed ones must free theirs.
    cores = [
        build_core(tiny_checkpoint("llama"), role, num_gpu_blocks_override=160, **flags)
        for role in ("prefill", "decode")
    ]
    try:
        split = SplitRun(*cores)
        split.run(make_requests())
    finally:
        for core in cores:
            core.close()
    return split


def check_outcomes(split: SplitRun, policy: str) -> int:
    """Checks that each request is right or failed by policy; returns how many failed."""
    num_failed = 0
    for request_id, expected in expected_tokens().items():
        outputs = split.outputs[request_id]
        assert outputs[-1].is_last
        first = (
            split.handed[request_id].progress[0].output_token_ids
            if (request_id in split.handed)
            else ()
        )
        tokens = [*first, *tokens_of(outputs)]
        assert tokens == expected[: len(tokens)]
        if outputs[-1].error is None:
            assert tokens == expected
        else:
            assert policy == "fail"
            assert isinstance(outputs[-1].error, AbortedError)
            num_failed += 1
    return num_failed


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_faults_at_once_change_no_token(url: str, struck: list[str], backend: str) -> None:
    rates = ",".join(f"{fault}:0.05" for fault in FAULTS)
    faults_of_all = f"faults={rates}&fault_delay_s=0.02&fault_seed=3"
    split = run_split(with_faults(url, faults_of_all), "recompute")
    assert check_outcomes(split, "recompute") == 0
    assert len(Counter(struck)) >= 4, "too few kinds of faults occurred"


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "fault", "policy"), CELLS)
def test_requests_under_one_fault_are_right_or_fail_by_policy(
    url: str, struck: list[str], backend: str, fault: str, policy: str
) -> None:
    options = f"faults={fault}:0.2&fault_delay_s=0.05&fault_seed=3"
    split = run_split(with_faults(url, options), policy)
    num_failed = check_outcomes(split, policy)
    assert len(struck) >= 5, "the fault occurred too rarely"
    if fault == "delay":
        assert num_failed == 0, "a delay fails no request"
