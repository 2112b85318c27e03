"""Sizes of the KV pool and the host pool, and the errors if they are too small."""

import logging
import re
from dataclasses import replace

import pytest
import torch

from baton.common.container_limits import LimitsShare
from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.kv_cache.spec import KvCacheSpec, group_layers
from engine.runtime.forward.memory_plan import MemoryPlan
from engine.runtime.kv_pool import (
    DeviceMemory,
    allocate_host_pool,
    allocate_pool,
    check_kv_cache_dtype,
    decide_layout,
    decide_num_blocks,
    decide_num_host_blocks,
    default_cpu_bytes,
    log_pool,
)
from engine.runtime.weights.loader import LoadedModel
from kvstore.layout import KvLayout

_LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, block_size=16, head_dim=4, dtype="float16")
_SPEC = KvCacheSpec(block_size=16)
_GIBIBYTE = 2**30
_CPU = torch.device("cpu")


def _decide(max_model_len=100, free_bytes=None, spec=_SPEC, plan=None, **flags):
    config = EngineConfig(model="m", **flags)
    is_on_cpu = free_bytes is None
    bytes_for_pool = default_cpu_bytes(plan) if is_on_cpu else free_bytes
    places = {"is_on_cpu": is_on_cpu, "plan": plan}
    return decide_num_blocks(config, _LAYOUT, spec, max_model_len, bytes_for_pool, **places)


def test_the_override_wins_over_everything():
    flags = {"num_gpu_blocks_override": 7, "kv_cache_memory_bytes": _GIBIBYTE}
    assert _decide(free_bytes=_GIBIBYTE, **flags) == 7


def test_the_pool_fills_the_given_memory_with_whole_blocks():
    assert _decide(kv_cache_memory_bytes=_LAYOUT.block_bytes * 50 - 1) == 49
    assert _decide(kv_cache_memory_bytes=_LAYOUT.block_bytes * 50, free_bytes=1) == 50


def test_the_pool_fills_the_free_memory_of_a_gpu_with_whole_blocks():
    assert _decide(free_bytes=_LAYOUT.block_bytes * 1000 + 5) == 1000


def test_the_pool_of_a_cpu_is_no_larger_than_its_sequences_need():
    assert _decide(max_model_len=100, max_num_seqs=3) == 3 * 7


def test_the_pool_of_a_cpu_is_at_most_one_gibibyte():
    assert _decide(max_model_len=10**5, max_num_seqs=1000) == _GIBIBYTE // _LAYOUT.block_bytes


@pytest.mark.parametrize(
    ("flags", "size_flag"),
    [
        ({"num_gpu_blocks_override": 6}, "--num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 6 * _LAYOUT.block_bytes}, "--kv-cache-memory-bytes"),
        ({"free_bytes": 6 * _LAYOUT.block_bytes}, "--kv-cache-memory-bytes"),
    ],
)
def test_the_error_of_a_pool_too_small_for_one_request_names_sufficient_flags(flags, size_flag):
    with pytest.raises(ConfigurationError, match="the model's length is 100") as caught:
        _decide(**flags)
    message = caught.value.message
    assert "holds 96 tokens" in message
    assert size_flag in message
    # Both flags that the message names work.
    assert re.search(r"--max-model-len (\d+)", message)[1] == "96"
    assert _decide(max_model_len=96, **flags) == 6
    advised = re.search(rf"{size_flag} (\d+)(MiB)?", message)
    remedy = int(advised[1]) * (2**20 if advised[2] else 1)
    field = size_flag.removeprefix("--").replace("-", "_")
    assert _decide(**{field: remedy}) >= 7


def test_the_error_of_a_pool_too_small_for_max_model_len_names_that_flag():
    config = EngineConfig(model="m", num_gpu_blocks_override=6, max_model_len=100)
    with pytest.raises(ConfigurationError, match="--max-model-len is 100"):
        decide_num_blocks(config, _LAYOUT, _SPEC, 100, default_cpu_bytes(None))


def test_the_error_of_an_empty_pool_suggests_no_length():
    with pytest.raises(ConfigurationError) as caught:
        _decide(kv_cache_memory_bytes=1)
    assert "--max-model-len" not in caught.value.message


_NEEDS = {"weights": 30 << 20, "process": 170 << 20}
_MIB = 1 << 20


def _plan(limit_mib, share=None):
    return MemoryPlan(limit_mib * _MIB, share or LimitsShare(), _NEEDS)


def test_the_pool_of_a_cpu_is_what_a_memory_limit_leaves():
    long = {"max_model_len": 10**5, "max_num_seqs": 1000}
    assert _decide(plan=_plan(300), **long) == 100 * _MIB // _LAYOUT.block_bytes
    assert _decide(plan=_plan(5000), **long) == _GIBIBYTE // _LAYOUT.block_bytes
    assert _decide(max_model_len=100, max_num_seqs=3, plan=_plan(300)) == 3 * 7


def test_workers_of_a_container_divide_what_its_memory_limit_leaves():
    share = LimitsShare(num_workers=2, other_bytes=50 * _MIB)
    num_blocks = _decide(max_model_len=10**5, max_num_seqs=1000, plan=_plan(650, share))
    assert num_blocks == 100 * _MIB // _LAYOUT.block_bytes


def test_a_memory_limit_below_what_is_needed_is_refused_with_the_numbers():
    needed = -(-_SPEC.blocks_for(10**5) * _LAYOUT.block_bytes // _MIB)
    with pytest.raises(ConfigurationError) as caught:
        _decide(max_model_len=10**5, plan=_plan(200 + needed - 1))
    for text in (
        f"the memory limit of this container is {199 + needed} MiB, and {200 + needed} MiB are",
        "weights 30 MiB, process 170 MiB, KV cache",
        "mem_limit of compose",
        "--max-model-len",
    ):
        assert text in caught.value.message
    assert _decide(max_model_len=10**5, plan=_plan(200 + needed)) >= _SPEC.blocks_for(10**5)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ({"kv_cache_memory_bytes": 101 * _MIB}, "--kv-cache-memory-bytes to at most 100MiB"),
        (
            {"num_gpu_blocks_override": 100 * _MIB // _LAYOUT.block_bytes + 1},
            f"--num-gpu-blocks-override to at most {100 * _MIB // _LAYOUT.block_bytes}",
        ),
    ],
)
def test_a_size_that_a_flag_sets_and_that_does_not_fit_is_refused(flags, remedy):
    assert _decide(plan=_plan(500), **flags)
    with pytest.raises(ConfigurationError, match="limit of this container is 300 MiB") as caught:
        _decide(plan=_plan(300), **flags)
    assert caught.value.message.endswith(f"set {remedy}")


def test_the_plan_is_a_line_of_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="baton.engine"):
        _decide(plan=_plan(300), kv_cache_memory_bytes=64 * _MIB)
    assert caplog.messages == [
        "memory: of a limit of 300 MiB: weights 30 MiB, process 170 MiB, KV cache 64 MiB"
    ]


def test_swapped_kv_of_a_gpu_is_what_a_memory_limit_leaves():
    config = EngineConfig(model="m")
    num_blocks = decide_num_host_blocks(config, _LAYOUT, 10**9, torch.device("cuda"), _plan(300))
    assert num_blocks == 100 * _MIB // _LAYOUT.block_bytes
    with pytest.raises(ConfigurationError, match=r"resources\.limits\.memory of Kubernetes\)$"):
        _decide(free_bytes=_GIBIBYTE, plan=_plan(100))
    # The pool itself is not in this memory.
    assert _decide(free_bytes=_GIBIBYTE, plan=_plan(300)) == _GIBIBYTE // _LAYOUT.block_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_pool_is_zeroed_and_has_the_shape_of_the_layout(dtype):
    layout = KvLayout(num_layers=2, num_kv_heads=3, block_size=8, head_dim=4, dtype=dtype)
    pool = allocate_pool(5, layout, torch.device("cpu"))
    assert pool.shape == (5, 2, 2, 3, 8, 4)
    assert pool.nbytes == 5 * layout.block_bytes
    assert pool.is_contiguous()
    assert (pool == 0).all()


def test_pools_of_8_bit_kv_have_the_type_uint8():
    layout = KvLayout(num_layers=2, num_kv_heads=3, block_size=8, head_dim=4, dtype="fp8_e4m3")
    for pool in (allocate_pool(5, layout, _CPU), allocate_host_pool(5, layout, _CPU)):
        assert pool.shape == (5, 2, 2, 3, 8 * 4 + 8 * 4)
        assert pool.dtype is torch.uint8
        assert pool.nbytes == 5 * layout.block_bytes


def _layout(head_dim=16, **flags):
    model = LoadedModel(
        model=None,
        max_model_len=100,
        vocab_size=10,
        eos_token_ids=(),
        fingerprint=b"",
        sliding_windows=(None,) * 3,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype="bfloat16",
    )
    return decide_layout(EngineConfig(model="m", **flags), model, group_layers((None,) * 3))


def test_blocks_have_the_models_type_unless_a_flag_changes_it():
    assert _layout(block_size=8) == KvLayout(3, 2, 8, 16, "bfloat16")
    assert _layout(block_size=8, kv_cache_dtype="fp8_e4m3") == KvLayout(3, 2, 8, 16, "fp8_e4m3")
    assert _layout(block_size=8, kv_cache_dtype="int8") == KvLayout(3, 2, 8, 16, "int8")


def test_an_unknown_kv_cache_dtype_is_refused():
    with pytest.raises(ConfigurationError, match="--kv-cache-dtype is 'int3'; it must be one of"):
        EngineConfig(model="m", kv_cache_dtype="int3")


@pytest.mark.parametrize(("head_dim", "block_size", "multiple"), [(6, 3, 2), (5, 6, 4)])
def test_8_bit_heads_fill_whole_words(head_dim, block_size, multiple):
    with pytest.raises(ConfigurationError, match=f"it must be a multiple of {multiple}$"):
        _layout(head_dim, kv_cache_dtype="fp8_e4m3", block_size=block_size)
    layout = _layout(head_dim, kv_cache_dtype="fp8_e4m3", block_size=3 * multiple)
    assert layout.block_size * layout.head_dim % 4 == 0
    assert _layout(head_dim, block_size=block_size).dtype == "bfloat16"


def test_a_pool_beyond_memory_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="--kv-cache-memory-bytes"):
        allocate_pool(2**50, _LAYOUT, torch.device("cpu"))


def test_a_model_with_windows_needs_fewer_blocks():
    spec = KvCacheSpec(block_size=16, windows=(None, 32, 32), max_chunk=16)
    needed = spec.blocks_for(1000)
    assert needed == 63 + 2 * 4
    assert _decide(max_model_len=1000, spec=spec, num_gpu_blocks_override=needed) == needed
    with pytest.raises(ConfigurationError, match=f"--num-gpu-blocks-override {needed} ") as caught:
        _decide(max_model_len=1000, spec=spec, num_gpu_blocks_override=needed - 1)
    assert "set --max-model-len 992" in caught.value.message
    assert _decide(max_model_len=992, spec=spec, num_gpu_blocks_override=needed - 1) == needed - 1


@pytest.mark.parametrize(
    ("space", "device", "expected"),
    [
        (_LAYOUT.block_bytes * 5 - 1, "cpu", 4),
        (_LAYOUT.block_bytes * 500, "cpu", 99),
        (0, "cuda", 0),
        (None, "cpu", 0),
        (None, "cuda", 99),
    ],
)
def test_the_host_pool_fits_into_swap_space_and_is_no_larger_than_the_pool(space, device, expected):
    config = EngineConfig(model="m", swap_space=space)
    assert decide_num_host_blocks(config, _LAYOUT, 99, torch.device(device)) == expected


def test_the_default_host_pool_of_a_gpu_is_4_gib():
    config = EngineConfig(model="m")
    num_blocks = decide_num_host_blocks(config, _LAYOUT, 10**9, torch.device("cuda"))
    assert num_blocks == 4 * _GIBIBYTE // _LAYOUT.block_bytes


@pytest.mark.parametrize("space", [None, 0, 100])
def test_the_error_of_swapping_without_a_host_pool_names_the_space_needed(space):
    config = EngineConfig(model="m", swap_space=space, preemption_mode="swap")
    with pytest.raises(
        ConfigurationError, match=r"--swap-space (\d+)MiB holds the whole"
    ) as caught:
        decide_num_host_blocks(config, _LAYOUT, 99, _CPU)
    advised = int(re.search(r"--swap-space (\d+)MiB", caught.value.message)[1])
    config = EngineConfig(model="m", swap_space=advised * 2**20, preemption_mode="swap")
    assert decide_num_host_blocks(config, _LAYOUT, 99, _CPU) == 99


def test_a_host_pool_beyond_memory_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="--swap-space"):
        allocate_host_pool(2**50, _LAYOUT, _CPU)


def _pool_log(caplog, *args):
    with caplog.at_level(logging.INFO, logger="baton.engine"):
        log_pool(*args)
    return caplog.text


def test_the_log_reports_blocks_tokens_and_concurrency(caplog):
    text = _pool_log(caplog, 10, 0, _LAYOUT, _SPEC, 64)
    assert "10 blocks of 16 tokens, 160 tokens" in text
    assert "maximum concurrency at 64 tokens per request: 2.50" in text
    assert "host" not in text


def test_the_log_reports_windows_and_the_host_pool(caplog):
    spec = KvCacheSpec(block_size=16, windows=(None, 16), max_chunk=1)
    text = _pool_log(caplog, 30, 7, _LAYOUT, spec, 160)
    assert "30 blocks of 16 tokens, 240 tokens" in text
    assert "maximum concurrency at 160 tokens per request: 2.50" in text
    assert "host pool for swapped KV: 7 blocks" in text


def test_memory_left_for_the_pool_is_the_share_minus_other_uses():
    memory = DeviceMemory(
        total=1000, free=500, used_by_others=100, reserved=350, peak_reserved=420, graphs=0
    )
    # 1000 - 500 - 100 - 350 = 50 are used outside torch (context, libraries).
    assert memory.left_for_pool(0.8) == 800 - 420 - 50
    # With any larger share, 430 remain: 500 free, less the 70 that activations need at their peak.
    assert memory.left_for_pool(1.0) == 430
    assert memory.left_for_pool(0.4) == 0
    with_graphs = replace(memory, graphs=30)
    assert with_graphs.left_for_pool(0.8) == 800 - 420 - 50 - 30
    assert with_graphs.left_for_pool(1.0) == 400


@pytest.mark.parametrize("capability", [(8, 0), (7, 5)])
def test_8_bit_kv_on_a_gpu_without_8_bit_floats_is_refused(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU of old")
    message = rf"--kv-cache-dtype fp8_e4m3 needs .* 8\.9 or newer; GPU of old has {capability[0]}"
    with pytest.raises(ConfigurationError, match=message):
        check_kv_cache_dtype("fp8_e4m3", torch.device("cuda"))
    check_kv_cache_dtype("auto", torch.device("cuda"))
    check_kv_cache_dtype("int8", torch.device("cuda"))
    check_kv_cache_dtype("fp8_e4m3", torch.device("cpu"))


def test_8_bit_kv_on_a_gpu_with_8_bit_floats_is_accepted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_kv_cache_dtype("fp8_e4m3", torch.device("cuda"))
