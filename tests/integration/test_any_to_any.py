"""Prefill and decode whose pools differ in block size, in type or in their share of heads."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from baton.common.errors import ConfigurationError, FailedPreconditionError
from engine.config import EngineConfig
from engine.loop.core import EngineCore
from engine.request import EngineRequest
from engine.runtime.device import with_device_defaults
from engine.runtime.model_runner import ModelRunner
from kernels.reference.cache import quantize_kv
from kvstore.connector import KvConnectorScheduler
from kvstore.mover.pool_objects import view_blocks
from tests.support.checkpoints import (
    logits_with_cache,
    prompt_of,
    reference_greedy,
    reference_model,
    tiny_checkpoint,
)
from tests.support.halved_worker import HalvedWorker
from tests.support.pairs import pairs
from tests.support.prefill_core import with_role
from tests.support.real_engines import (
    SplitRun,
    build_core,
    hand_over,
    run_all,
    tokens_of,
)
from tests.support.requests import engine_request
from tests.support.rounding_cache import RoundingCache, rounded

pytestmark = pytest.mark.sampled(one_in=2)

NUM_TOKENS = 12
LENGTHS = (1, 7, 8, 9, 16, 31, 33, 43)
FP8 = "fp8_e4m3"


def make_requests(lengths: tuple[int, ...] = LENGTHS) -> list[EngineRequest]:
    return [
        engine_request(
            request_id=f"{length} tokens",
            prompt_token_ids=tuple(prompt_of(length, seed=length)),
            max_tokens=NUM_TOKENS,
        )
        for length in lengths
    ]


def build(path: Path, role: str, url: str, **flags: object) -> EngineCore:
    """Builds an engine; a decode engine fails rather than recompute KV that it could load."""
    policy = {"kv_load_failure_policy": "fail"} if role == "decode" else {}
    return build_core(path, role, kv_connector=url, **policy, **flags)


def run_split(prefill: EngineCore, decode: EngineCore, *, announces_saved: bool = True) -> SplitRun:
    split = SplitRun(prefill, decode, prefetches_saved=announces_saved)
    try:
        split.run(make_requests())
    finally:
        prefill.close()
        decode.close()
    return split


def check(split: SplitRun, expected: Callable[[tuple[int, ...]], list[int]]) -> None:
    for request in split.handed.values():
        outputs = split.outputs[request.spec.request_id]
        tokens = [*request.progress[0].output_token_ids, *tokens_of(outputs)]
        assert tokens == expected(request.spec.prompt_token_ids), request.spec.request_id
        # Nothing is recomputed: the whole prompt came through the connector.
        assert outputs[0].cached_tokens == len(request.spec.prompt_token_ids)


# Block sizes.


def mostly_slow(cases: Sequence[tuple[object, ...]], num_fast: int) -> list[object]:
    """Returns a test's parameters, of which all but the first `num_fast` are marked slow."""
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in cases[num_fast:]]
    return [*cases[:num_fast], *slow]


# Tokens per block of prefill and decode, layer slices, head slices.
SLICINGS = (
    *[((8, 32), 1, 1), ((32, 8), 1, 1), ((16, 32), 1, 1), ((32, 16), 1, 1), ((16, 8), 1, 1)],
    *[((8, 32), 3, 1), ((32, 8), 3, 1)],
)


HYBRIDS = (
    ("lfm2", ((8, 32), 1, 1), True),  # a slot is one object
    ("qwen3_5", ((32, 8), 1, 1), True),  # five objects
    ("qwen3_5_four_layers", ((16, 32), 2, 2), False),
    ("lfm2_biased_four_layers", ((16, 8), 2, 2), False),
    ("qwen3_5_four_layers", ((8, 16), 2, 1), True),
)


@pytest.mark.parametrize(
    ("variant", "slicing", "announces_saved"),
    mostly_slow(pairs(("mistral", "llama", "gpt2"), SLICINGS, (True, False)), num_fast=2)
    + mostly_slow(HYBRIDS, num_fast=3),
)
def test_decode_loads_kv_of_another_block_size(
    variant: str, slicing: tuple[tuple[int, int], int, int], announces_saved: bool, tmp_path: Path
) -> None:
    sizes, layer_slices, head_slices = slicing
    path, url = tiny_checkpoint(variant), f"memory://{tmp_path.name}"
    form = {
        "kv_transfer_block_size": 8,
        "kv_transfer_layer_slices": layer_slices,
        "kv_transfer_head_slices": head_slices,
    }
    prefill, decode = (
        build(path, role, url, block_size=size, **form)
        for role, size in zip(("prefill", "decode"), sizes, strict=True)
    )
    assert prefill.namespace == decode.namespace
    split = run_split(prefill, decode, announces_saved=announces_saved)
    check(split, lambda prompt: reference_greedy(path, prompt, NUM_TOKENS))


def test_an_engine_finds_kv_saved_by_one_of_another_block_size(tmp_path: Path) -> None:
    path, url = tiny_checkpoint("llama"), f"memory://{tmp_path.name}"
    # With this policy a slow load, on a busy machine, is not given up for computing.
    flags = {"kv_connector": url, "kv_load_failure_policy": "fail"}
    first, second = (
        build_core(path, "both", block_size=size, kv_transfer_block_size=8, **flags)
        for size in (16, 32)
    )
    requests = make_requests((43, 60))
    for core, found in ((first, 0), (second, 32), (second, 32)):
        outputs = run_all(core, requests)
        for request in requests:
            answer = outputs[request.spec.request_id]
            assert tokens_of(answer) == reference_greedy(
                path, request.spec.prompt_token_ids, NUM_TOKENS
            )
            assert answer[0].cached_tokens >= found
    first.close()
    second.close()


def test_a_handoff_of_another_form_is_refused_with_both_digests(tmp_path: Path) -> None:
    path, url = tiny_checkpoint("llama"), f"memory://{tmp_path.name}"
    prefill = build_core(path, "prefill", block_size=16, kv_connector=url)
    decode = build_core(path, "decode", block_size=32, kv_transfer_dtype=FP8, kv_connector=url)
    (request,) = make_requests((20,))
    handed = hand_over(request, run_all(prefill, [request])[request.spec.request_id])
    with pytest.raises(FailedPreconditionError) as caught:
        decode.check(handed)
    ours, theirs = decode.namespace.hex()[:12], prefill.namespace.hex()[:12]
    assert f"this replica has {ours}, the handoff {theirs}" in caught.value.message
    prefill.close()
    decode.close()


@pytest.mark.parametrize(
    ("variant", "flags", "message"),
    [
        ("llama", {"kv_transfer_head_slices": 3}, "--kv-transfer-head-slices is 3"),
        ("llama", {"kv_transfer_block_size": 5}, "--kv-transfer-block-size is 5"),
        (
            "lfm2",
            {"kv_transfer_layer_slices": 2},
            "--kv-transfer-layer-slices is 2; it must be a divisor of the 3 recurrent layers",
        ),
    ],
)
def test_a_form_that_the_model_does_not_allow_is_refused(
    variant: str, flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_core(tiny_checkpoint(variant), "both", block_size=16, **flags)


# Types.


@cache
def expected_tokens(
    variant: str, prompt: tuple[int, ...], theirs: str, form: str, ours: str
) -> list[int]:
    """Returns what `transformers` draws if the prompt's KV is moved from one cache to another."""
    model = reference_model(tiny_checkpoint(variant))
    computed, state = (
        RoundingCache(model.config) if dtype == FP8 else DynamicCache() for dtype in (theirs, ours)
    )
    is_rounded_in_transfer = theirs != FP8 and FP8 in (form, ours)
    drawn = []
    with torch.inference_mode():
        logits = logits_with_cache(model, torch.tensor([prompt]), computed)
        for index, layer in enumerate(computed.layers):
            both = (layer.keys, layer.values)
            moved = [rounded(states) if is_rounded_in_transfer else states for states in both]
            DynamicCache.update(state, *moved, index)
        while True:
            token_ids = logits[:, -1:].argmax(-1)
            drawn.append(int(token_ids))
            if len(drawn) == NUM_TOKENS:
                return drawn
            logits = logits_with_cache(model, token_ids, state)


TYPES = (
    ("auto", "float32", FP8),
    ("auto", FP8, FP8),
    ("auto", FP8, "auto"),
    (FP8, "float32", "auto"),
    (FP8, FP8, "auto"),
    (FP8, FP8, FP8),
)


@pytest.mark.parametrize(
    ("variant", "types", "sizes"),
    mostly_slow(pairs(("llama", "qwen3"), TYPES, ((16, 8), (8, 32))), num_fast=6),
)
def test_decode_loads_kv_of_another_type(
    variant: str, types: tuple[str, str, str], sizes: tuple[int, int], tmp_path: Path
) -> None:
    theirs, form, ours = types
    path, url = tiny_checkpoint(variant), f"memory://{tmp_path.name}"
    prefill, decode = (
        build(
            path,
            role,
            url,
            block_size=size,
            kv_cache_dtype=dtype,
            kv_transfer_block_size=8,
            kv_transfer_dtype=form,
            max_num_batched_tokens=64,  # a prompt in 8 bits attends to its own rounded tokens
        )
        for role, size, dtype in zip(("prefill", "decode"), sizes, (theirs, ours), strict=True)
    )
    split = run_split(prefill, decode)
    check(split, lambda prompt: expected_tokens(variant, prompt, theirs, form, ours))


def test_decode_rounds_loaded_kv_to_8_bits_as_if_it_had_computed_it(tmp_path: Path) -> None:
    """The bytes in the pool are those of bfloat16 KV after rounding."""
    path, url = tiny_checkpoint("llama"), f"memory://{tmp_path.name}"
    flags = {"dtype": "bfloat16", "kv_transfer_dtype": "bfloat16"}
    prefill = build(path, "prefill", url, block_size=16, **flags)
    decode = build(path, "decode", url, block_size=16, kv_cache_dtype=FP8, **flags)
    (request,) = make_requests((60,))
    handed = hand_over(request, run_all(prefill, [request])[request.spec.request_id])
    run_all(decode, [handed])
    assert handed.handoff is not None
    theirs, ours = (
        _cached_blocks(core, handed.handoff.block_keys[:3]) for core in (prefill, decode)
    )
    narrow, scales = quantize_kv(theirs, torch.float8_e4m3fn)
    views = view_blocks(ours, decode.info.layout)
    assert torch.equal(views.states.view(torch.uint8), narrow.view(torch.uint8))
    assert torch.equal(views.scales, scales)
    prefill.close()
    decode.close()


@pytest.mark.parametrize(
    ("variant", "types", "sizes"),
    [
        ("qwen3_5", (FP8, FP8, FP8), (16, 8)),
        ("lfm2", ("auto", FP8, FP8), (8, 32)),
        pytest.param("qwen3_5", ("auto", "bfloat16", FP8), (32, 8), marks=pytest.mark.slow),
    ],
)
def test_states_stay_as_they_are_where_kv_is_converted(
    variant: str, types: tuple[str, str, str], sizes: tuple[int, int], tmp_path: Path
) -> None:
    theirs, form, ours = types
    flags = {"kv_transfer_block_size": 4, "kv_transfer_dtype": form, "kv_transfer_head_slices": 2}
    path, url = tiny_checkpoint(variant), f"memory://{tmp_path.name}"
    prefill, decode = (
        build(path, role, url, block_size=size, kv_cache_dtype=dtype, **flags)
        for role, size, dtype in zip(("prefill", "decode"), sizes, (theirs, ours), strict=True)
    )
    (request,) = make_requests((64,))
    handed = hand_over(request, run_all(prefill, [request])[request.spec.request_id])
    outputs = run_all(decode, [handed])[request.spec.request_id]
    assert outputs[0].cached_tokens == 64
    assert handed.handoff is not None
    sent, arrived = (
        _cached_state(core, handed.handoff.block_keys[-1]) for core in (prefill, decode)
    )
    assert sent.any()
    assert torch.equal(arrived, sent)
    prefill.close()
    decode.close()


def _cached_state(core: EngineCore, key: bytes) -> torch.Tensor:
    """Returns the bytes of the slot with the states after a block."""
    slot = core.scheduler.kv.pool.lookup(key, len(core.info.windows))
    assert slot is not None
    return core._runner._slots[slot - core.num_blocks]


def _cached_blocks(core: EngineCore, keys: tuple[bytes, ...]) -> torch.Tensor:
    found = [core.scheduler.kv.pool.lookup(key) for key in keys]
    assert None not in found
    return core._runner.kv_pool[found]


# Heads.


def build_halved(path: Path, role: str, url: str, **flags: object) -> EngineCore:
    """Builds an engine that saves and loads KV by halves of its heads."""
    settings = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 64,
        "kv_load_failure_policy": "fail" if role == "decode" else "recompute",
    }
    config = EngineConfig(model=str(path), kv_connector=url, **(settings | flags))
    config = with_device_defaults(config)
    connector = (KvConnectorScheduler("memory", lease_s=30, saves_ahead=True), HalvedWorker(url))
    return with_role(EngineCore(config, ModelRunner(config), connector), role)


@pytest.mark.parametrize(
    ("variant", "halved", "sizes", "layer_slices"),
    pairs(
        ("llama", "opt"),
        ((True, False), (False, True), (True, True)),
        ((16, 8), (8, 8)),
        (1, 3),
    ),
)
def test_kv_moves_by_halves_of_the_heads(
    variant: str,
    halved: tuple[bool, bool],
    sizes: tuple[int, int],
    layer_slices: int,
    tmp_path: Path,
) -> None:
    path, url = tiny_checkpoint(variant), f"memory://{tmp_path.name}"
    flags = {
        "kv_transfer_block_size": 8,
        "kv_transfer_head_slices": 2,
        "kv_transfer_layer_slices": layer_slices,
    }
    cores = []
    for role, is_halved, size in zip(("prefill", "decode"), halved, sizes, strict=True):
        if is_halved:
            cores.append(build_halved(path, role, url, block_size=size, **flags))
        else:
            cores.append(build(path, role, url, block_size=size, **flags))
    split = run_split(*cores)
    check(split, lambda prompt: reference_greedy(path, prompt, NUM_TOKENS))
