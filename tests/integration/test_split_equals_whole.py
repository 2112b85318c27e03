"""Invariant 1: split equals whole equals `transformers`, for every connector and family.

Two real engines with their own pools and a real connector, and one engine for both roles,
generate greedily in float32: the tokens must be identical.
"""

from collections.abc import Sequence

import pytest

from engine.loop.core import EngineCore
from engine.request import EngineRequest, FinishReason
from kvstore.jobs import ConnectorWork
from tests.support.checkpoints import (
    DECODER_VARIANTS,
    FAMILIES,
    VARIANTS,
    reference_greedy,
    tiny_checkpoint,
)
from tests.support.expert_variants import EXPERT_VARIANTS, LATENT_VARIANTS
from tests.support.later_families import HYBRID_FAMILIES, LATER_FAMILIES
from tests.support.pairs import pairs
from tests.support.real_engines import SplitRun, build_core, run_all, tokens_of
from tests.support.requests import engine_request

# On a busy machine the first case of a process, which imports a family of transformers, took 239 s.
pytestmark = pytest.mark.timeout(480)

NUM_TOKENS = 12
_OTHER_VARIANTS = sorted(
    {*VARIANTS, *DECODER_VARIANTS, *EXPERT_VARIANTS, *LATENT_VARIANTS}
    - {*FAMILIES, *LATER_FAMILIES}
)
CONNECTORS = ("memory", "shm", "file", "redis", "grpc", "nixl")
# How the KV of a step's layers is moved.
LAYERS = {
    "at once": {},
    "in slices": {"kv_transfer_layer_slices": 3, "async_scheduling": False},
    "in slices, overlap": {"kv_transfer_layer_slices": 3, "async_scheduling": True},
}


def make_requests(block_size: int) -> list[EngineRequest]:
    return requests_of(1, block_size - 1, block_size, block_size + 1, 5 * block_size + 3)


def requests_of(*lengths: int) -> list[EngineRequest]:
    return [
        engine_request(
            request_id=f"{length} tokens",
            prompt_token_ids=tuple((7 * length + 31 * index) % 256 for index in range(length)),
            max_tokens=NUM_TOKENS,
        )
        for length in lengths
    ]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("variant", "connector_url", "block_size", "layers"),
    pairs(FAMILIES, CONNECTORS, (8, 16), tuple(LAYERS)),
    indirect=["connector_url"],
)
def test_split_equals_transformers(
    variant: str, connector_url: str, block_size: int, layers: str
) -> None:
    steps_saved = check_split(variant, connector_url, block_size, **LAYERS[layers])
    if layers != "at once":
        is_store = not connector_url.startswith(("grpc", "nixl"))
        assert any(steps_saved) == (is_store and layers == "in slices")


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("variant", "connector_url"),
    [
        (variant, CONNECTORS[index % len(CONNECTORS)])
        for index, variant in enumerate(_OTHER_VARIANTS)
    ],
    indirect=["connector_url"],
)
def test_split_equals_transformers_for_variants(variant: str, connector_url: str) -> None:
    check_split(variant, connector_url, 8)


_ALL_LATER = pairs(
    sorted({*LATER_FAMILIES} - {*HYBRID_FAMILIES}), CONNECTORS, (8, 16), (False, True)
)
"""Each family with each connector, which takes too long for each run of the tests."""


@pytest.mark.sampled(one_in=14)
@pytest.mark.parametrize(
    ("variant", "connector_url", "block_size", "overlaps"),
    # Two connectors for each family, in turn.
    [case for index, case in enumerate(_ALL_LATER) if (index // len(CONNECTORS) + index) % 3 == 0],
    indirect=["connector_url"],
)
def test_split_equals_transformers_for_later_families(
    variant: str, connector_url: str, block_size: int, overlaps: bool
) -> None:
    requests = requests_of(block_size - 1, block_size + 1, 3 * block_size + 3)
    check_split(variant, connector_url, block_size, requests, async_scheduling=overlaps)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("variant", "connector_url", "block_size", "overlaps"),
    pairs(HYBRID_FAMILIES, CONNECTORS, (8, 16), (False, True)),
    indirect=["connector_url"],
)
def test_split_equals_transformers_with_states(
    variant: str, connector_url: str, block_size: int, overlaps: bool
) -> None:
    """Prompts end around the ends of blocks, and of the intervals between two states."""
    ends = (1, block_size, 2 * block_size, 5 * block_size + 3)
    flags = {"async_scheduling": overlaps, "state_interval": 2 * block_size}
    lengths = [end + offset for end in ends for offset in (-1, 0, 1) if end + offset]
    check_split(variant, connector_url, block_size, requests_of(*lengths), **flags)


def check_split(
    variant: str,
    connector_url: str,
    block_size: int,
    requests: Sequence[EngineRequest] = (),
    **overrides: object,
) -> list[int]:
    """Returns for each save the step that it was started ahead of; 0 if it was not."""
    path = tiny_checkpoint(variant)
    flags = {
        "block_size": block_size,
        "kv_connector": connector_url,
        "max_num_batched_tokens": 2 * block_size,
        # Computing such prompts takes less time than loading them; with `fail` they are loaded.
        "kv_load_failure_policy": "fail",
        **overrides,
    }
    prefill = build_core(path, "prefill", **flags)
    decode = build_core(path, "decode", **flags)
    requests = requests or make_requests(block_size)

    steps_saved = steps_of_saves(prefill)
    split = SplitRun(prefill, decode)
    try:
        split.run(requests)
    finally:
        prefill.close()
        decode.close()

    assert split.num_reported > 0
    for request in split.handed.values():
        outputs = split.outputs[request.spec.request_id]
        tokens = [*request.progress[0].output_token_ids, *tokens_of(outputs)]
        assert tokens == reference_greedy(path, request.spec.prompt_token_ids, NUM_TOKENS)
        # The whole prompt came through the connector, and nothing was recomputed.
        assert outputs[0].cached_tokens == len(request.spec.prompt_token_ids)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
    return steps_saved


def steps_of_saves(core: EngineCore) -> list[int]:
    """Returns a list that gets the step of each save that the connector starts."""
    worker, steps = core._connector, []
    start = worker.start

    def noting(work: ConnectorWork) -> None:
        steps.extend(save.step for save in work.saves)
        start(work)

    worker.start = noting
    return steps


@pytest.mark.parametrize(
    ("variant", "caching", "block_size"), pairs(FAMILIES, (True, False), (8, 16))
)
def test_whole_equals_transformers(variant: str, caching: bool, block_size: int) -> None:
    path = tiny_checkpoint(variant)
    core = build_core(path, "both", block_size=block_size, enable_prefix_caching=caching)
    requests = make_requests(block_size)

    for _ in range(2):  # the second run uses the prefix cache
        outputs = run_all(core, requests)
        for request in requests:
            tokens = tokens_of(outputs[request.spec.request_id])
            assert tokens == reference_greedy(path, request.spec.prompt_token_ids, NUM_TOKENS)
