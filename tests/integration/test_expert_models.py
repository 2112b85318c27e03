"""Models with mixtures of experts: whole and divided engines, compared with `transformers`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.models import experts
from engine.models.experts import ExpertLinear
from engine.runtime.launch.worker_plan import step_bytes
from engine.runtime.weights.loader import load_model
from kernels.library.commands import library
from tests.support.checkpoints import prompt_of, tiny_checkpoint
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
    ("mixtral", {"pipeline_parallel_size": 3}),
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
    ("variant", "num_ranks", "decode_ranks"), [("qwen3_moe", 1, 2), ("mixtral", 2, 1)]
)
def test_tiers_of_other_numbers_of_ranks(
    variant: str, num_ranks: int, decode_ranks: int, tmp_path: Path
) -> None:
    path, url = tiny_checkpoint(variant), f"file://{tmp_path}/kv"
    common = {"kv_connector": url, "block_size": 8, "kv_transfer_head_slices": 2}
    prefill, decode = ({"tensor_parallel_size": size} for size in (num_ranks, decode_ranks))
    with tiers(path, prefill, decode, **common) as split:
        check_handed_over(path, split)


def test_long_steps_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(43)
    whole, sliced = (PagedSession(loaded("qwen2_moe"), [43]) for _ in range(2))
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


def test_the_memory_of_a_step_has_room_for_the_states_of_experts() -> None:
    config = EngineConfig(model="", max_num_batched_tokens=4096)
    bytes_of = {name: step_bytes(config, loaded(name)) for name in ("qwen3_moe", "qwen3_untied")}
    states = 2048 * 2 * (40 + 64) * 4
    assert bytes_of["qwen3_moe"] - bytes_of["qwen3_untied"] > states


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("num_experts_per_tok", 6, "num_experts_per_tok is 6; there are 5 experts"),
        ("num_experts", 0, "num_experts is 0; it must be a positive integer"),
        ("norm_topk_prob", "no", "norm_topk_prob is 'no'; it must be true or false"),
        ("mlp_only_layers", ["one"], "mlp_only_layers is"),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_field(
    field: str, value: object, problem: str, tmp_path: Path
) -> None:
    config = json.loads((tiny_checkpoint("qwen3_moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ConfigurationError, match=problem):
        load_model(str(tmp_path), "auto", "cpu", progress=False, load_format="dummy")
