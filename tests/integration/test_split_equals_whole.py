"""Invariant 1: split equals whole equals `transformers`, for every connector and family.

Two real engines with pools of their own, joined by a real store, beside one
undivided engine. Greedy, float32: the tokens must be identical.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.batch import DrawParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineRequest, FinishReason, RequestOutput
from tests.support.checkpoints import FAMILIES, VARIANTS, reference_greedy, tiny_checkpoint
from tests.support.redis_server import RedisServer

GREEDY = DrawParams(temperature=0, top_k=0, top_p=1, seed=0)
NUM_TOKENS = 12
CHUNK_TOKENS = 16  # smaller than the longest prompts, so that those are chunked
CONNECTORS = ("memory", "shm", "file", "redis")


@pytest.fixture
def connector_url(
    request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer
) -> Iterator[str]:
    urls = {
        "memory": f"memory://{tmp_path.name}",
        "shm": f"shm://test-{tmp_path.name}?max_bytes=64MiB",
        "file": f"file://{tmp_path}/kv",
        "redis": redis_server.url,
    }
    yield urls[request.param]
    if request.param == "shm":
        shutil.rmtree(f"/dev/shm/baton-test-{tmp_path.name}", ignore_errors=True)


def build_core(path: Path, role: str, **overrides: object) -> EngineCore:
    settings = {
        "model": str(path),
        "role": role,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "num_gpu_blocks_override": 64,
    }
    return EngineCore.build(EngineConfig(**(settings | overrides)))


def run_all(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, list[RequestOutput]]:
    """Runs requests to their ends; checks that every block came back."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.check(request)
        core.add_request(request)
    while core.has_work:
        core.wait()
        for output in core.step():
            outputs[output.request_id].append(output)
    core.scheduler.check()
    assert core.load().num_free_blocks == core.num_blocks
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def make_requests(block_size: int) -> list[EngineRequest]:
    lengths = (1, block_size - 1, block_size, block_size + 1, 5 * block_size + 3)
    return [
        EngineRequest(
            request_id=f"{length} tokens",
            prompt_token_ids=tuple((7 * length + 31 * index) % 256 for index in range(length)),
            draw=GREEDY,
            max_tokens=NUM_TOKENS,
        )
        for length in lengths
    ]


def hand_over(request: EngineRequest, outputs: Sequence[RequestOutput]) -> EngineRequest:
    """What the router makes of a prefill answer."""
    assert outputs[-1].finish_reason is FinishReason.HANDOFF
    assert outputs[-1].handoff is not None
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=tuple(tokens_of(outputs)),
        draw=request.draw,
        max_tokens=request.max_tokens,
        handoff=outputs[-1].handoff,
    )


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("connector_url", CONNECTORS, indirect=True)
@pytest.mark.parametrize("variant", FAMILIES)
def test_split_equals_transformers(variant: str, connector_url: str, block_size: int) -> None:
    check_split(variant, connector_url, block_size)


@pytest.mark.parametrize("connector_url", ["memory"], indirect=True)
@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - set(FAMILIES)))
def test_split_equals_transformers_for_variants(variant: str, connector_url: str) -> None:
    check_split(variant, connector_url, 8)


def check_split(variant: str, connector_url: str, block_size: int) -> None:
    path = tiny_checkpoint(variant)
    flags = {"block_size": block_size, "kv_connector": connector_url}
    prefill = build_core(path, "prefill", **flags)
    decode = build_core(path, "decode", **flags)
    requests = make_requests(block_size)

    prefilled = run_all(prefill, requests)
    handed = [hand_over(request, prefilled[request.request_id]) for request in requests]
    decoded = run_all(decode, handed)
    prefill.close()
    decode.close()

    for request in handed:
        outputs = decoded[request.request_id]
        tokens = [*request.output_token_ids, *tokens_of(outputs)]
        assert tokens == reference_greedy(path, request.prompt_token_ids, NUM_TOKENS)
        # Nothing is recomputed: the whole prompt came through the store.
        assert outputs[0].cached_tokens == len(request.prompt_token_ids)
        assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("variant", FAMILIES)
def test_whole_equals_transformers(variant: str, caching: bool, block_size: int) -> None:
    path = tiny_checkpoint(variant)
    core = build_core(path, "both", block_size=block_size, enable_prefix_caching=caching)
    requests = make_requests(block_size)

    for _ in range(2):  # the second time from the prefix cache
        outputs = run_all(core, requests)
        for request in requests:
            tokens = tokens_of(outputs[request.request_id])
            assert tokens == reference_greedy(path, request.prompt_token_ids, NUM_TOKENS)


def test_preemption_changes_no_token() -> None:
    path = tiny_checkpoint("llama")
    core = build_core(path, "both", block_size=8, max_model_len=64, num_gpu_blocks_override=9)
    requests = [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=tuple((index + 3 * i) % 256 for i in range(10 + index)),
            draw=GREEDY,
            max_tokens=40,
        )
        for index in range(5)
    ]

    outputs = run_all(core, requests)

    for request in requests:
        tokens = tokens_of(outputs[request.request_id])
        assert tokens == reference_greedy(path, request.prompt_token_ids, 40)
