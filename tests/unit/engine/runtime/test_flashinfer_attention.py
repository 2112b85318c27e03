"""Attention by FlashInfer, on a stand-in for the package: what it is told, and what is refused."""

import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import ConfigurationError
from engine.batch import ScheduledBatch, ScheduledChunk
from engine.config import EngineConfig
from engine.runtime.forward import flashinfer_attention
from engine.runtime.forward.flashinfer_attention import (
    FlashInferAttention,
    HostSequences,
    workspace_bytes,
)
from engine.runtime.launch import attention_backend, launcher
from engine.runtime.launch.attention_backend import check_flashinfer, uses_flashinfer
from tests.support.attention_cases import make_case
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.draw_params import GREEDY
from tests.support.fake_flashinfer import FakeFlashInfer
from tests.support.kernel_checks import CPU
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request
from tests.support.runner_kinds import use_kind
from tests.support.strict_device import StrictDevice

_SPANS = ((0, 21), (30, 5), (16, 1), (0, 1))
_GPU = torch.device("cuda", 0)
_HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}


@pytest.fixture
def package(monkeypatch):
    return FakeFlashInfer().install(monkeypatch)


def _sequences(meta, num_groups=1):
    tables = meta.block_tables[None].expand(num_groups, -1, -1).numpy()
    return HostSequences(meta.query_starts.numpy(), meta.context_lens.numpy(), tables)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from((1, 4, 16)))
def test_tables_are_given_without_their_unused_ends(context_lens, block_size):
    tables = np.arange(2 * len(context_lens) * 41, dtype=np.int32).reshape(2, -1, 41)
    lens = np.array(context_lens, np.int32)
    starts = np.arange(len(lens) + 1, dtype=np.int32)
    pages = HostSequences(starts, lens, tables).pages(1, block_size, None)
    for index, length in enumerate(context_lens):
        begin, end = pages.starts[index : index + 2]
        assert pages.ids[begin:end].tolist() == tables[1, index, : end - begin].tolist()
        num_tokens = max(0, end - begin - 1) * block_size + pages.last_lens[index]
        assert num_tokens == length
        assert (pages.last_lens[index] == 0) == (length == 0)
        assert pages.last_lens[index] <= block_size
    assert {pages.starts.dtype, pages.ids.dtype, pages.last_lens.dtype} == {np.dtype(np.int32)}


def test_blocks_before_a_window_are_not_read():
    """Of 27 tokens in blocks of 4 the last 3 are queries; the first sees tokens 18 to 24."""
    tables = np.arange(1, 9, dtype=np.int32).reshape(1, 1, 8)
    sequences = HostSequences(np.array([0, 3], np.int32), np.array([27], np.int32), tables)
    pages = sequences.pages(0, 4, 7)
    assert pages.ids.tolist() == [5, 5, 5, 5, 5, 6, 7]
    assert (pages.starts.tolist(), pages.last_lens.tolist()) == ([0, 7], [3])
    assert sequences.pages(0, 4, 1000).ids.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_layers_share_a_plan_and_read_the_pool_in_place(package):
    case = make_case(_SPANS, dtype=torch.float16, **_HEADS)
    first, second = FlashInferAttention(16, CPU).begin(_sequences(case.meta, 2))
    layers = [case.pool[:, index] for index in range(3)]
    for attend, window in ((first, None), (second, None), (first, 5)):
        for layer in layers:
            attend(case.query, layer, case.meta, scale=0.3, sliding_window=window)
    assert package.num_plans == 3
    assert package.runs == [layer.data_ptr() for layer in layers] * 3


def test_the_workspace_holds_the_parts_of_all_tiles():
    """Of 2 x 132 tiles of 128 rows over 8 KV heads, for 128 query heads of 128 elements."""
    tiles = 2 * 132 // 8
    assert workspace_bytes(16, 128, 132) == tiles * 128 * 128 * (128 + 1) * 4
    assert workspace_bytes(1, 64, 132) == 128 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 48}, "heads of 48 elements"),
        ({"has_sinks": True}, "attention sinks"),
        ({"num_kv_heads": 1, "value_dim": 32}, "latent attention"),
    ],
)
def test_attention_that_is_not_computed_is_refused(change, message, package):
    case = make_case(_SPANS, **({"dtype": torch.bfloat16, **_HEADS} | change))
    (attend,) = FlashInferAttention(16, CPU).begin(_sequences(case.meta))
    with pytest.raises(ConfigurationError, match=rf"--attention-backend.*{message}"):
        attend(
            case.query,
            case.kv_layer,
            case.meta,
            scale=0.3,
            sinks=case.sinks,
            value_dim=case.value_dim,
        )
    assert not package.runs


def _config(**flags):
    return EngineConfig(model="demo", **{"attention_backend": "flashinfer", **flags})


class TestChoice:
    """What `--attention-backend` names is used, or refused."""

    @pytest.fixture(autouse=True)
    def capability(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")

    def test_flashinfer_is_used_where_it_is_named(self, package):
        assert uses_flashinfer(_config(), _GPU)
        assert not uses_flashinfer(_config(attention_backend="triton"), _GPU)
        assert not uses_flashinfer(_config(attention_backend="auto"), _GPU)
        assert not uses_flashinfer(_config(attention_backend="auto"), CPU)

    @pytest.mark.parametrize("name", ["triton", "flashinfer"])
    def test_a_cpu_has_neither(self, name, package):
        with pytest.raises(ConfigurationError, match=rf"--attention-backend is {name}.*cpu"):
            uses_flashinfer(_config(attention_backend=name), CPU)

    def test_an_unknown_name_is_refused_by_the_command(self):
        with pytest.raises(ConfigurationError, match="attention"):
            _config(attention_backend="fastest")

    def test_8_bit_kv(self, package):
        with pytest.raises(ConfigurationError, match="--kv-cache-dtype fp8_e4m3"):
            uses_flashinfer(_config(kv_cache_dtype="fp8_e4m3"), _GPU)

    def test_an_old_card(self, package, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        with pytest.raises(ConfigurationError, match=r"a card has 7\.5"):
            uses_flashinfer(_config(), _GPU)

    def test_a_missing_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "flashinfer", None)
        with pytest.raises(ConfigurationError, match=r"pip install 'baton-llm\[flashinfer\]'"):
            uses_flashinfer(_config(), _GPU)

    def test_a_package_that_does_not_fit_torch(self, monkeypatch):
        def fails(name):
            raise OSError(f"{name}: undefined symbol")

        monkeypatch.setattr(attention_backend, "import_module", fails)
        match = rf"beside torch {version('torch').split('+')[0]}.*undefined symbol"
        with pytest.raises(ConfigurationError, match=match):
            uses_flashinfer(_config(), _GPU)


class TestFirstAttention:
    """The first attention is compared with the reference before a worker serves."""

    def test_right_numbers_pass(self, package):
        check_flashinfer(CPU, torch.bfloat16, 8, 2, 64)
        assert package.num_plans == 1

    def test_a_layer_of_a_pool_is_read(self, package, monkeypatch):
        """A tensor that moves to a GPU is copied, and a copy of a layer has no gaps."""
        move = torch.Tensor.to
        monkeypatch.setattr(
            torch.Tensor, "to", lambda *args, **options: move(*args, **options).clone()
        )
        check_flashinfer(CPU, torch.bfloat16, 8, 2, 64)
        num_layers, elements_of_layer = 2, 2 * 2 * 16 * 64
        assert package.page_strides == [num_layers * elements_of_layer]

    def test_wrong_numbers_are_refused(self, monkeypatch):
        FakeFlashInfer(offset=0.2).install(monkeypatch)
        with pytest.raises(ConfigurationError, match=r"wrong numbers on cpu, off by up to 0\.2"):
            check_flashinfer(CPU, torch.bfloat16, 8, 2, 64)

    def test_a_kernel_that_cannot_be_compiled(self, package):
        package.BatchPrefillWithPagedKVCacheWrapper = lambda *_: 1 / 0
        with pytest.raises(ConfigurationError, match=r"nvcc.*flashinfer-jit-cache.*division"):
            check_flashinfer(CPU, torch.bfloat16, 8, 2, 64)


@pytest.mark.parametrize(
    "variant", ["qwen2_alternating", pytest.param("llama", marks=pytest.mark.slow)]
)
def test_engines_have_the_tokens_of_transformers(variant, package, monkeypatch):
    """In float32, which the real kernels do not compute."""
    monkeypatch.setattr(flashinfer_attention, "_TYPES", (torch.float32,))
    monkeypatch.setattr(flashinfer_attention, "_HEAD_DIMS", range(1, 99))
    monkeypatch.setattr(launcher, "uses_flashinfer", lambda *_: True)
    use_kind("device, eager", monkeypatch)
    path, lengths = tiny_checkpoint(variant), (1, 17, 33)
    core = build_core(
        path,
        "both",
        block_size=8,
        num_gpu_blocks_override=160,
        async_scheduling=True,
        max_num_batched_tokens=24,
    )
    num_plans = package.num_plans
    requests = [
        engine_request(
            request_id=str(length), prompt_token_ids=tuple(prompt_of(length)), max_tokens=6
        )
        for length in lengths
    ]
    outputs = run_all(core, requests)
    core.close()
    for length in lengths:
        expected = reference_greedy(path, prompt_of(length), 6)
        assert tokens_of(outputs[str(length)]) == expected
    assert package.num_plans > num_plans


def test_planned_steps_wait_for_nothing_and_graphs_are_not_planned(monkeypatch):
    path = tiny_checkpoint("llama")
    package = FakeFlashInfer(computes=False).install(monkeypatch)
    monkeypatch.setattr(launcher, "check_flashinfer", lambda *_: None)
    monkeypatch.setattr(flashinfer_attention, "_HEAD_DIMS", range(1, 99))
    monkeypatch.setattr(flashinfer_attention, "_num_processors", lambda _: 132)
    with StrictDevice().entered() as device:
        steps = device.steps(
            path,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=4,
            max_num_batched_tokens=1024,
            block_size=16,
            attention_backend="flashinfer",
        )
        device.warm_up(steps)
        package.num_plans = 0
        chunk = ScheduledChunk(0, (5,) * 40, 0, (GREEDY,))
        assert device.run(steps, ScheduledBatch(1, (chunk,))).replays == 1
        assert package.num_plans == 0
        chunk = ScheduledChunk(1, (5,) * 600, 0, (GREEDY,))
        assert device.run(steps, ScheduledBatch(2, (chunk,), (0,))).replays == 0
        assert package.num_plans == 1
        assert device.run(steps, ScheduledBatch(3, (), (0, 1))).replays == 1
        assert package.num_plans == 1
