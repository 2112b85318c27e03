"""`--kv-cache-dtype fp8_e4m3` and `int8`: equal tokens however a prompt is cut, cached or moved.

Each token's KV is rounded separately, so the tokens equal those of `transformers` with a cache
that rounds each token's K and V in the same way.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from baton.common.errors import AbortedError, ConfigurationError, FailedPreconditionError
from engine.loop.core import EngineCore
from engine.request import EngineRequest, FinishReason
from kvstore.layout import NARROW_DTYPES
from tests.support.checkpoints import (
    logits_with_cache,
    prompt_of,
    reference_model,
    tiny_checkpoint,
)
from tests.support.later_families import HYBRID_FAMILIES, LATER_FAMILIES
from tests.support.paged_session import PagedSession, loaded
from tests.support.real_engines import (
    Outputs,
    SplitRun,
    build_core,
    hand_over,
    run_all,
    tokens_of,
)
from tests.support.requests import engine_request
from tests.support.rounding_cache import RoundingCache
from tests.support.runner_kinds import use_kind

pytestmark = pytest.mark.sampled(one_in=2)

BLOCK_SIZE = 8
NUM_TOKENS = 12
LENGTHS = (1, 7, 8, 9, 43)
FP8, INT8 = NARROW_DTYPES
CASES = (
    ("llama", FP8),
    ("llama", INT8),
    ("qwen3", INT8),
    ("gpt2", FP8),
    ("opt", INT8),
)
MIXED_SHAPES = ("gemma4", "gemma4_moe")
LATER_CASES = tuple(
    (variant, (FP8, FP8, INT8)[index % 3])
    for index, variant in enumerate(sorted({*LATER_FAMILIES} - {*MIXED_SHAPES}))
)
CONNECTORS = ("memory", "shm", "file", "redis", "grpc", "nixl")


@cache
def expected_tokens(variant: str, prompt: tuple[int, ...], kv_dtype: str = FP8) -> list[int]:
    """Returns the tokens that `transformers` draws greedily with a rounded cache."""
    model = reference_model(tiny_checkpoint(variant))
    state = RoundingCache(model.config, getattr(torch, NARROW_DTYPES[kv_dtype]))
    token_ids, drawn = torch.tensor([prompt]), []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = logits_with_cache(model, token_ids, state)
            token_ids = logits[:, -1:].argmax(-1)
            drawn.append(int(token_ids))
    return drawn


def make_requests(lengths: Sequence[int] = LENGTHS) -> list[EngineRequest]:
    return [
        engine_request(
            request_id=f"{length} tokens",
            prompt_token_ids=tuple(prompt_of(length, seed=length)),
            max_tokens=NUM_TOKENS,
        )
        for length in lengths
    ]


def build(variant: str, role: str = "both", **flags: object) -> EngineCore:
    defaults = {"block_size": BLOCK_SIZE, "kv_cache_dtype": FP8, "num_threads": 1}
    return build_core(tiny_checkpoint(variant), role, **(defaults | flags))


def check_tokens(
    variant: str, requests: Sequence[EngineRequest], outputs: Outputs, kv_dtype: str = FP8
) -> None:
    for request in requests:
        tokens = tokens_of(outputs[request.spec.request_id])
        assert tokens == expected_tokens(variant, request.spec.prompt_token_ids, kv_dtype), (
            request.spec.request_id
        )


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(("variant", "kv_dtype"), CASES + LATER_CASES)
def test_tokens_equal_those_of_a_rounded_cache(variant: str, kv_dtype: str) -> None:
    core, requests = build(variant, kv_cache_dtype=kv_dtype), make_requests()
    layout = core.info.layout
    assert layout.dtype == kv_dtype
    for _ in range(2):  # the second run uses the prefix cache
        outputs = run_all(core, requests)
        check_tokens(variant, requests, outputs, kv_dtype)
    cached = outputs["43 tokens"][0].cached_tokens
    if variant not in HYBRID_FAMILIES:  # small pools keep few states
        assert cached == 43 // BLOCK_SIZE * BLOCK_SIZE
    core.close()


@pytest.mark.parametrize("flags", [{"block_size": 16}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize("chunk_size", [5, 200])
def test_block_and_chunk_sizes_change_no_token(chunk_size: int, flags: dict[str, object]) -> None:
    core = build("llama", max_num_batched_tokens=chunk_size, **flags)
    requests = make_requests()
    check_tokens("llama", requests, run_all(core, requests))
    core.close()


def test_swapped_requests_continue_where_they_were() -> None:
    core = build(
        "llama",
        max_model_len=64,
        num_gpu_blocks_override=9,
        preemption_mode="swap",
        swap_space=2**20,
        enable_prefix_caching=False,
    )
    requests = make_requests((14, 15, 16, 22))
    check_tokens("llama", requests, run_all(core, requests))
    assert core.scheduler.load().num_preemptions > 0
    core.close()


@pytest.mark.parametrize("kind", ["device, eager", "device, graphs"])
def test_steps_launched_ahead_change_no_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kind(kind, monkeypatch)
    core = build("llama", async_scheduling=True)
    requests = make_requests()
    check_tokens("llama", requests, run_all(core, requests))
    core.close()


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(
    ("variant", "kv_dtype", "connector_url"),
    [
        (*case, CONNECTORS[index % len(CONNECTORS)])
        for index, case in enumerate(CASES + LATER_CASES)
    ],
    indirect=["connector_url"],
)
def test_split_equals_whole(variant: str, kv_dtype: str, connector_url: str) -> None:
    flags = {"kv_connector": connector_url, "kv_cache_dtype": kv_dtype}
    prefill = build(variant, "prefill", **flags)
    # It waits for the KV, however slowly that comes.
    decode = build(variant, "decode", kv_load_failure_policy="fail", **flags)
    split = SplitRun(prefill, decode)
    split.run(make_requests())
    for core in (prefill, decode):
        core.close()
    for request in split.handed.values():
        outputs = split.outputs[request.spec.request_id]
        tokens = [*request.progress[0].output_token_ids, *tokens_of(outputs)]
        assert tokens == expected_tokens(variant, request.spec.prompt_token_ids, kv_dtype)
        assert outputs[0].cached_tokens == len(request.spec.prompt_token_ids)


@pytest.mark.parametrize("variant", MIXED_SHAPES)
def test_layers_of_different_shapes_are_refused(variant: str) -> None:
    problem = f"--kv-cache-dtype is {FP8}; it works with models whose layers all have K and V"
    with pytest.raises(ConfigurationError, match=problem):
        build(variant)


def test_stored_blocks_with_a_changed_factor_fail_the_request(tmp_path: Path) -> None:
    flags = {"kv_connector": f"file://{tmp_path}/kv"}
    prefill = build("llama", "prefill", **flags)
    decode = build("llama", "decode", kv_load_failure_policy="fail", **flags)
    (request,) = make_requests((43,))
    handed = hand_over(request, run_all(prefill, [request])[request.spec.request_id])
    block_bytes = decode.info.layout.block_bytes
    objects = [path for path in tmp_path.rglob("*") if path.is_file()]
    objects = [path for path in objects if path.stat().st_size >= block_bytes]
    assert len(objects) == 6
    for path in objects:
        content = bytearray(path.read_bytes())
        content[-1] ^= 0x40  # the last factor's exponent
        path.write_bytes(content)
    (output,) = run_all(decode, [handed])[request.spec.request_id]
    assert output.finish_reason is FinishReason.ERROR
    assert isinstance(output.error, AbortedError)
    for core in (prefill, decode):
        core.close()


@pytest.mark.parametrize(("ours", "theirs"), [("auto", FP8), (FP8, "auto"), (INT8, FP8)])
def test_tiers_of_unlike_types_refuse_each_others_handoffs(
    ours: str, theirs: str, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/kv"
    prefill = build("llama", "prefill", kv_cache_dtype=theirs, kv_connector=url)
    decode = build("llama", "decode", kv_cache_dtype=ours, kv_connector=url)
    (request,) = make_requests((20,))
    handed = hand_over(request, run_all(prefill, [request])[request.spec.request_id])
    with pytest.raises(FailedPreconditionError) as caught:
        decode.check(handed)
    assert decode.namespace.hex()[:12] in caught.value.message
    assert prefill.namespace.hex()[:12] in caught.value.message
    for core in (prefill, decode):
        core.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("variant", "narrow_dtype"), CASES)
def test_logits_are_near_those_of_an_unrounded_cache(
    variant: str, narrow_dtype: str, dtype: str
) -> None:
    prompt, rest = prompt_of(43, seed=1), prompt_of(6, seed=2)
    steps = [[(0, prompt)], *([(0, [token])] for token in rest)]
    plain, narrow = (
        PagedSession(loaded(variant, dtype), [49], kv_dtype=kv_dtype)
        for kv_dtype in (None, narrow_dtype)
    )
    for step in steps:
        (exact,), (rounded,) = plain.step(step), narrow.step(step)
        distance = (rounded[-1] - exact[-1]).square().mean().sqrt() / exact[-1].std()
        assert 0 < distance < (0.25 if narrow_dtype == FP8 else 0.06)


@pytest.mark.parametrize("kv_dtype", NARROW_DTYPES)
def test_poisoned_kv_spoils_only_the_sequence_that_reads_it(kv_dtype: str) -> None:
    session = PagedSession(loaded("llama"), [30, 30], kv_dtype=kv_dtype)
    prompt, other = prompt_of(20, seed=1), prompt_of(21, seed=2)
    session.step([(0, prompt), (1, other)])
    block = session.tables[0][1][0]
    session.scales[block, 1, 1, 0, 3] = torch.nan
    good, bad = session.step([(0, [5]), (1, [6])])
    assert good.isfinite().all()
    assert bad.isnan().all()
