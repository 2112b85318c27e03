"""Models with mixtures of experts: whole and divided engines, compared with `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import kernels
from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.models import experts
from engine.models.experts import ExpertLinear
from engine.models.linear import PackedModule
from engine.runtime.launch.worker_plan import step_bytes
from engine.runtime.weights import loader
from engine.runtime.weights.loader import load_model
from kernels import ServedFormats
from kernels.library.commands import library
from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.expert_variants import LATENT_VARIANTS
from tests.support.kernel_checks import normal
from tests.support.paged_session import PagedSession, loaded
from tests.support.rank_engines import check_greedy, check_handed_over, tiers, tokens

pytestmark = pytest.mark.timeout(180)

needs_ranks = pytest.mark.skipif(library() is None, reason="no native kernels")
NAMES = ("gate", "up", "down")
DRAFTING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


# Pairs of families and of ways to divide or to speed up an engine.
DIVIDED = [
    ("qwen3_moe", {"tensor_parallel_size": 2}),
    ("qwen2_moe", {"tensor_parallel_size": 2, "async_scheduling": True}),
    ("olmoe", {"tensor_parallel_size": 2}),
    ("gpt_oss", {"tensor_parallel_size": 2, "async_scheduling": True}),
    ("gpt_oss", {"pipeline_parallel_size": 2, "speculative_config": DRAFTING}),
    ("mixtral", {"pipeline_parallel_size": 3}),
    ("glm4_moe", {"tensor_parallel_size": 2, "speculative_config": DRAFTING}),
    ("deepseek_v2", {"tensor_parallel_size": 4}),
    ("deepseek_v2_lite", {"tensor_parallel_size": 2, "async_scheduling": True}),
    ("deepseek_v3", {"pipeline_parallel_size": 3, "speculative_config": DRAFTING}),
    ("glm4_moe_lite", {"tensor_parallel_size": 2, "max_num_batched_tokens": 16}),
    ("qwen3_moe_mixed", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ("qwen2_moe", {"speculative_config": DRAFTING, "max_num_batched_tokens": 48}),
]


@needs_ranks
@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(("variant", "flags"), DIVIDED)
def test_tokens_do_not_depend_on_ranks_stages_and_drafts(
    variant: str, flags: dict[str, object]
) -> None:
    found = tokens(variant, block_size=8, **flags)
    assert found == tokens(variant, block_size=8)
    check_greedy(variant, found)


@needs_ranks
@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("variant", "num_ranks", "decode_ranks"),
    [
        ("qwen3_moe", 1, 2),
        ("mixtral", 2, 1),
        ("gpt_oss", 2, 1),
        ("deepseek_v2", 1, 4),
        ("deepseek_v3", 2, 1),
    ],
)
def test_tiers_of_other_numbers_of_ranks(
    variant: str, num_ranks: int, decode_ranks: int, tmp_path: Path
) -> None:
    path, url = tiny_checkpoint(variant), f"file://{tmp_path}/kv"
    common: dict[str, object] = {"kv_connector": url, "block_size": 8}
    if variant not in LATENT_VARIANTS:  # whose ranks have the same vectors
        common["kv_transfer_head_slices"] = 2
    prefill, decode = ({"tensor_parallel_size": size} for size in (num_ranks, decode_ranks))
    with tiers(path, prefill, decode, **common) as split:
        check_handed_over(path, split)


@pytest.mark.parametrize("variant", ["qwen2_moe", "gemma4_moe"])
def test_long_steps_are_computed_in_slices(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(43)
    whole, sliced = (PagedSession(loaded(variant), [43]) for _ in range(2))
    (expected,) = whole.step([(0, prompt)])
    monkeypatch.setattr(experts, "MAX_TOKENS_AT_ONCE", 8)
    (logits,) = sliced.step([(0, prompt)])
    assert torch.equal(logits, expected) if library() else torch.allclose(logits, expected)


def test_experts_may_be_stored_as_two_tensors(tmp_path: Path) -> None:
    path = tiny_checkpoint("qwen2_moe")
    tensors = load_file(path / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [
            {name: tensors.pop(f"{prefix}.{number}.{name}_proj.weight") for name in NAMES}
            for number in range(5)
        ]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat((expert["gate"], expert["up"])) for expert in each]
        )
        tensors[f"{prefix}.down_proj"] = torch.stack([expert["down"] for expert in each])
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    stored = (load_model(str(folder), "auto", "cpu", progress=False) for folder in (path, tmp_path))
    matrices = [
        [module.weight.data for module in each.model.modules() if isinstance(module, ExpertLinear)]
        for each in stored
    ]
    assert len(matrices[0]) == 6
    assert all(map(torch.equal, *matrices))


def _mxfp4(num_rows: int, num_columns: int, seed: int) -> dict[str, torch.Tensor]:
    """Returns random blocks and scales of 5 experts, by the end of their names."""
    random = torch.Generator().manual_seed(seed)
    shape = 5, num_rows, num_columns // 32
    return {
        "_blocks": torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=random),
        "_scales": torch.randint(118, 130, shape, dtype=torch.uint8, generator=random),
    }


def _write_gpt_oss(folder: Path, files: list[dict[str, torch.Tensor]], **fields: object) -> None:
    """Writes a checkpoint in several files."""
    config = json.loads((tiny_checkpoint("gpt_oss") / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", **fields}))
    places = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"{number}.safetensors", {"format": "pt"})
        places |= dict.fromkeys(tensors, f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _weights(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    model = load_model(str(folder), "auto", "cpu", progress=False, **options).model
    packed = {
        name: module.weight.data
        for name, module in model.named_modules()
        if isinstance(module, PackedModule)
    }
    return packed | dict(model.named_parameters())


def test_experts_in_mxfp4_are_those_that_transformers_makes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(tiny_checkpoint("gpt_oss") / "model.safetensors")
    common = {
        name: tensor.bfloat16() for name, tensor in tensors.items() if ".mlp.experts." not in name
    }
    blocks: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    floats: dict[str, torch.Tensor] = {}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            stored = _mxfp4(rows, columns, seed=layer)
            path = f"{prefix}.{name}"
            blocks[f"{path}_blocks"], scales[f"{path}_scales"] = stored.values()
            floats[path] = convert_moe_packed_tensors(*stored.values()).contiguous()
            common[f"{path}_bias"] = normal(5, rows, dtype=torch.bfloat16, seed=layer)
    quantized, wide = tmp_path / "mxfp4", tmp_path / "bfloat16"
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    files = [common | blocks, scales]
    _write_gpt_oss(quantized, files, intermediate_size=32, quantization_config=method)
    _write_gpt_oss(wide, [common | floats], intermediate_size=32)
    logits = [
        PagedSession(load_model(str(folder), "auto", "cpu", progress=False), [43]).step(
            [(0, prompt_of(43))]
        )
        for folder in (quantized, wide)
    ]
    assert torch.equal(logits[0][0], logits[1][0])  # of blocks, if kernels multiply by them
    nothing = ServedFormats(frozenset(), frozenset())
    monkeypatch.setattr(kernels, "served_formats", lambda device, dtype: nothing)
    expected = _weights(wide)
    assert _weights(wide, load_format="dummy").keys() == expected.keys()
    for uploaded_to in ("cuda", "cpu"):  # a CPU's weights take the way of a GPU's
        monkeypatch.setattr(loader, "_UPLOADED_TO", (uploaded_to,))
        found = _weights(quantized)
        assert found.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_the_bias_of_a_ranking_is_not_rounded() -> None:
    name = "mlp.gate.e_score_correction_bias"
    tensors = load_file(tiny_checkpoint("glm4_moe") / "model.safetensors")
    parts = loaded("glm4_moe", "bfloat16").model.checkpoint_tensors()
    biases = {path: part.target for path, (part, *_) in parts.items() if path.endswith(name)}
    assert len(biases) == 2
    assert all(torch.equal(bias, tensors[path]) for path, bias in biases.items())


def test_the_memory_of_a_step_has_room_for_the_states_of_experts() -> None:
    """Two experts of each of 2,048 tokens at a time, of 40 and 64 elements."""
    config, model = EngineConfig(model="", max_num_batched_tokens=4096), loaded("qwen3_moe")
    states = 2048 * 2 * (40 + 64) * 4
    workspace = model.model.config.workspace_bytes(4096, 4)
    assert workspace > states
    hidden = 4096 * 4 * model.model.config.hidden_size * 4
    assert step_bytes(config, model) > workspace + hidden


@pytest.mark.parametrize(
    ("variant", "field", "value", "problem"),
    [
        ("qwen3_moe", "num_experts_per_tok", 6, "num_experts_per_tok is 6; there are 5 experts"),
        ("qwen3_moe", "num_experts", 0, "num_experts is 0; it must be a positive integer"),
        ("qwen3_moe", "norm_topk_prob", "no", "norm_topk_prob is 'no'; it must be true or false"),
        ("qwen3_moe", "mlp_only_layers", ["one"], "mlp_only_layers is"),
        ("qwen3_moe", "hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
        ("glm4_moe", "n_group", 2, "n_group is 2; n_routed_experts 9 must be a multiple of it"),
        ("glm4_moe", "n_group", 9, "with at least 2 experts in a group"),
        ("glm4_moe", "topk_group", 4, "topk_group is 4; it must be at most n_group 3"),
        ("glm4_moe", "num_experts_per_tok", 7, "must have num_experts_per_tok 7 experts"),
        ("glm4_moe", "n_shared_experts", 1.5, "n_shared_experts is 1.5; it must be a positive"),
        ("glm4_moe", "scoring_func", "softmax", "scoring_func 'softmax' is not supported"),
        ("glm4_moe", "topk_method", "greedy", "topk_method 'greedy' is not supported"),
        ("gpt_oss", "swiglu_limit", 5.0, "swiglu_limit 5.0 is not supported"),
        ("gpt_oss", "swiglu_alpha", 1.0, "swiglu_alpha 1.0 is not supported"),
        ("gpt_oss", "quantization_config", {"quant_method": "gptq"}, "quantization_config"),
        ("qwen3_moe", "quantization_config", {"quant_method": "mxfp4"}, "quantization_config"),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_field(
    variant: str, field: str, value: object, problem: str, tmp_path: Path
) -> None:
    config = json.loads((tiny_checkpoint(variant) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ConfigurationError, match=problem):
        load_model(str(tmp_path), "auto", "cpu", progress=False, load_format="dummy")
