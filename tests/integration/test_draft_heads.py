"""Engines whose draft tokens come from heads over the served model's hidden states."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
from baton.common.errors import ConfigurationError
from engine.batch import DraftWork
from engine.draw_params import DrawParams
from engine.groups.group import Sequence as GroupSequence
from engine.loop.core import EngineCore
from engine.runtime.drafting import draft_heads
from engine.runtime.draws.sampler import Scores, draw_record, draw_tokens
from engine.speculation import drafts
from kernels import DRAW_RECORD
from tests.support.checkpoints import VOCAB_SIZE, prompt_of, reference_greedy, tiny_checkpoint
from tests.support.draft_heads import METHODS, ReferenceHeads, random_heads
from tests.support.draw_params import draw_params
from tests.support.rank_engines import all_kinds, check_handed_over, tiers, tokens
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request
from tests.support.runner_kinds import use_kind

# Torch's kernels, without a compiler, take minutes beside other tests.
pytestmark = pytest.mark.timeout(300)

_NUM_DRAFTS = 4
_ANGLES = ("inv_freq", "cos_cached", "sin_cached")

Proposals = dict[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(autouse=True)
def _any_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts as many tokens as allowed: what they cost is not known without measured steps."""
    monkeypatch.setattr(drafts.Drafts, "_plan", lambda self, _: drafts._Plan(self._most, math.inf))


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    """Collects the draft tokens after each sequence."""
    worked, collected = drafts.Drafts.worked, Proposals()

    def noting(
        self: drafts.Drafts,
        sequence: GroupSequence,
        work: DraftWork,
        draft_tokens: tuple[int, ...],
        num_tokens: int,
    ) -> None:
        collected[tuple(sequence.token_ids[:num_tokens])] = draft_tokens
        worked(self, sequence, work, draft_tokens, num_tokens)

    monkeypatch.setattr(drafts.Drafts, "worked", noting)
    return collected


def _drafting(method: str, heads: Path, **flags: object) -> dict[str, object]:
    """Returns flags of an engine whose batches have room for the draft tokens of all sequences."""
    config = {"method": method, "model": str(heads), "num_speculative_tokens": _NUM_DRAFTS}
    sizes = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 160}
    return {"speculative_config": config, **sizes, **flags}


def _num_drafts(core: EngineCore) -> tuple[float, float]:
    values = core.metrics.snapshot().values
    return tuple(values["baton_engine_draft_tokens", each] for each in ("accepted", "rejected"))


def _check_right_ones(known: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engine check other draft tokens than the heads': 0 to 3 right ones and a wrong one,
    so that steps draw different numbers of tokens.
    """

    def draft_tokens(self: drafts.Drafts, sequence: GroupSequence, limit: int) -> list[int]:
        end = len(sequence.token_ids)
        right = list(known[end : end + end // 3 % 4])
        wrong = (known[min(end + len(right), len(known) - 1)] + 1) % VOCAB_SIZE
        return [*right, wrong][:limit] if end + 4 < len(known) else []

    monkeypatch.setattr(drafts.Drafts, "_drafts", draft_tokens)


def _draw_with(params: DrawParams) -> Callable[[torch.Tensor, int], int]:
    def draw(logits: torch.Tensor, position: int) -> int:
        rows = logits[None]
        scores = Scores(rows, *kernels.row_maxima(rows))
        records = np.array([draw_record(params)], DRAW_RECORD)
        return int(draw_tokens(scores, records, [0], np.array([position])))

    return draw


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kind", ["host", "device, eager"])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 50}])
@pytest.mark.parametrize(
    ("method", "variant"),
    [*((method, "llama") for method in METHODS), ("eagle", "lfm2"), ("eagle3", "qwen3_5")],
)
def test_draft_tokens_are_those_of_plain_torch(
    method: str,
    variant: str,
    options: dict[str, float],
    kind: str,
    tmp_path: Path,
    proposals: Proposals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the head has seen more tokens than its window holds, and where a model with states
    runs accepted draft tokens again.
    """
    use_kind(kind, monkeypatch)
    monkeypatch.setattr(draft_heads, "_WINDOW", 8)
    served = tiny_checkpoint(variant)
    heads = random_heads(method, served, tmp_path / "heads")
    requests = [
        engine_request(str(length), tuple(prompt_of(length)), max_tokens=44, seed=3, **options)
        for length in (7, 30)
    ]
    with closing(build_core(served, "both", max_model_len=128)) as core:
        plain = {key: tokens_of(each) for key, each in run_all(core, requests).items()}

    for request in requests:
        prompt = request.spec.prompt_token_ids
        known = [*prompt, *plain[request.spec.request_id]]
        proposals.clear()
        with monkeypatch.context() as patched:
            _check_right_ones(known, patched)
            flags = _drafting(method, heads, block_size=4, max_model_len=128)
            with closing(build_core(served, "both", **flags)) as core:
                outputs = run_all(core, [request])
        assert tokens_of(outputs[request.spec.request_id]) == plain[request.spec.request_id]

        reference = ReferenceHeads(method, served, heads, window=8)
        (params,) = DrawParams.of_candidates(request.spec, [0])
        assert len(proposals) > 10
        for sequence, draft_tokens in proposals.items():
            expected = reference.draft_tokens(
                sequence, len(prompt) - 1, len(draft_tokens), _draw_with(params)
            )
            assert list(draft_tokens) == expected
        assert max(map(len, proposals.values())) == (3 if method == "medusa" else 4)


@cache
def _plain_tokens(variant: str) -> dict[tuple[str, int], list[int]]:
    return tokens(variant, block_size=8)


_VARIANTS = (
    *("llama_tied_biased", "mistral_sliding", "qwen2", "qwen3_mostly_sliding", "opt", "gpt2"),
    *("lfm2", "qwen3_5"),
)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("method", "variant", "overlapped"),
    [
        (method, variant, (index + place) % 2 == 0)
        for index, method in enumerate(METHODS)
        for place, variant in enumerate(_VARIANTS)
    ],
)
def test_heads_change_no_token(method: str, variant: str, overlapped: bool, tmp_path: Path) -> None:
    served, plain = tiny_checkpoint(variant), _plain_tokens(variant)
    heads = random_heads(method, served, tmp_path / "heads")
    flags = _drafting(method, heads, async_scheduling=overlapped, block_size=8)
    with closing(build_core(served, "both", **flags)) as core:
        for _ in range(2):  # the second time prompts are found in the prefix cache
            outputs = run_all(core, all_kinds())
            assert {key: tokens_of(outputs[key[0]], key[1]) for key in plain} == plain
        assert sum(_num_drafts(core)) > 100


@pytest.mark.parametrize(
    ("method", "variant", "mode"),
    [
        ("medusa", "llama", "recompute"),
        ("eagle", "llama", "swap"),
        ("eagle3", "llama", "recompute"),
        ("eagle", "lfm2", "swap"),
        ("eagle", "qwen3_5", "recompute"),
    ],
)
def test_preempted_and_pausing_sequences_keep_their_tokens(
    method: str, variant: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft tokens are made in every other block, and sequences are preempted for others."""
    propose = drafts.Drafts.num_proposals
    monkeypatch.setattr(
        drafts.Drafts,
        "num_proposals",
        lambda self, each, num: propose(self, each, num) * (len(each.token_ids) // 8 % 2),
    )
    served = tiny_checkpoint(variant)
    heads = random_heads(method, served, tmp_path / "heads")
    flags = _drafting(method, heads, max_model_len=96, block_size=8)
    flags |= {"preemption_mode": mode, "swap_space": 2**26}
    requests = [
        engine_request(str(length), tuple(prompt_of(length)), max_tokens=40)
        for length in (7, 20, 33, 50)
    ]
    with closing(build_core(served, "both", **flags | {"num_gpu_blocks_override": 14})) as core:
        outputs = run_all(core, requests)
        assert core.scheduler.load().num_preemptions > 0
        assert sum(_num_drafts(core)) > 20
    for request_id, each in outputs.items():
        assert tokens_of(each) == reference_greedy(served, prompt_of(int(request_id)), 40)


@pytest.mark.parametrize("method", METHODS)
def test_a_decode_tier_drafts_without_the_states_of_prompts(
    method: str, tmp_path: Path, proposals: Proposals
) -> None:
    served = tiny_checkpoint("llama")
    heads = random_heads(method, served, tmp_path / "heads")
    # Each sequence fits in one block: at a block's end it would make no draft tokens, and the head
    # would miss a state, while another sequence waits for its KV.
    common = {"kv_connector": f"memory://heads-{method}", "block_size": 64}
    with tiers(served, {}, _drafting(method, heads), **common) as split:
        check_handed_over(served, split)
        assert sum(_num_drafts(split._decode)) > 20
    reference = ReferenceHeads(method, served, heads)
    for sequence, draft_tokens in proposals.items():
        # The first step of the decode tier runs the token that the prefill tier has drawn.
        length = next(each for each in (1, 8, 9, 31, 43) if sequence[:each] == _prompt(each))
        if len(sequence) > length + 4:
            continue  # where few tokens are left, some steps make no draft tokens
        draw = _draw_with(draw_params(temperature=0.0, top_k=0, top_p=1.0, seed=0))
        assert list(draft_tokens) == reference.draft_tokens(
            sequence, length, len(draft_tokens), draw
        )


def _prompt(length: int) -> tuple[int, ...]:
    return tuple(prompt_of(length, seed=length))


def test_heads_that_fail_harm_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = tiny_checkpoint("llama")
    heads = random_heads("eagle", served, tmp_path / "heads")
    expected = reference_greedy(served, prompt_of(20), 24)
    request = engine_request("r", tuple(prompt_of(20)), max_tokens=24)
    with closing(build_core(served, "both", **_drafting("eagle", heads))) as core:
        with monkeypatch.context() as broken:
            broken.setattr(draft_heads.EagleDrafter, "_run_step", _fail)
            assert tokens_of(run_all(core, [request])["r"]) == expected
        assert _num_drafts(core) == (0, 0)
        assert "drafting has failed" in caplog.text

        assert tokens_of(run_all(core, [request])["r"]) == expected
        assert sum(_num_drafts(core)) > 0


@pytest.mark.parametrize("method", METHODS)
def test_logits_that_are_not_finite_end_the_draft_tokens(method: str, tmp_path: Path) -> None:
    served = tiny_checkpoint("llama")
    heads = random_heads(method, served, tmp_path / "heads")
    tensors = load_file(heads / "model.safetensors")
    tensors["lm_heads.1.weight" if method == "medusa" else "fc.weight"][:] = torch.nan
    save_file(tensors, heads / "model.safetensors")
    request = engine_request("r", tuple(prompt_of(20)), max_tokens=24)
    with closing(build_core(served, "both", **_drafting(method, heads))) as core:
        outputs = run_all(core, [request])
        assert tokens_of(outputs["r"]) == reference_greedy(served, prompt_of(20), 24)
        assert bool(sum(_num_drafts(core))) == (method == "medusa")  # whose first head is right


def _fail(*_: object) -> None:
    raise RuntimeError("injected by the test")


def _as_medusa_wrote_them(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns Medusa heads with the names of the method's own repository."""
    renamed = {}
    for name, tensor in tensors.items():
        kind, head, *rest = name.split(".")
        own = f"{head}.0.linear.{rest[-1]}" if kind == "blocks" else f"{head}.1.weight"
        renamed[own] = tensor
    return renamed


def _as_vllm_names_it(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a head of EAGLE-3 with vLLM's name of its layer."""
    return {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}


def _as_eagle_wrote_it(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns an EAGLE head with a copy of the served model's embedding, and cached angles."""
    angles = {f"layers.0.self_attn.rotary_emb.{name}": torch.ones(9) for name in _ANGLES}
    return tensors | {"embed_tokens.weight": torch.zeros(259, 64), **angles}


@pytest.mark.parametrize(
    ("method", "file", "change"),
    [
        ("medusa", "medusa_lm_head.pt", _as_medusa_wrote_them),
        ("medusa", "medusa_lm_head.safetensors", _as_medusa_wrote_them),
        ("eagle", "pytorch_model.bin", _as_eagle_wrote_it),
        ("eagle3", "model.safetensors", _as_vllm_names_it),
    ],
)
def test_published_layouts_are_read(
    method: str,
    file: str,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    tmp_path: Path,
    proposals: Proposals,
) -> None:
    served = tiny_checkpoint("llama")
    heads = random_heads(method, served, tmp_path / "heads")
    other = tmp_path / "published"
    other.mkdir()
    shutil.copy(heads / "config.json", other)
    tensors = change(load_file(heads / "model.safetensors"))
    if file.endswith(".safetensors"):
        save_file(tensors, other / file)
    else:
        torch.save(tensors, other / file)
    found = []
    for folder in (heads, other):
        proposals.clear()
        with closing(build_core(served, "both", **_drafting(method, folder))) as core:
            run_all(core, [engine_request("r", tuple(prompt_of(20)), max_tokens=12)])
        found.append(dict(proposals))
    assert found[0] == found[1]
    assert any(found[0].values())


Change = Callable[[dict[str, torch.Tensor], dict[str, object]], None]


def _bad_heads() -> Iterator[tuple[str, Change, str]]:
    """Yields (method, change, message)."""
    yield "medusa", lambda t, _: t.__delitem__("lm_heads.0.weight"), "checkpoint of Medusa"
    yield "medusa", lambda t, _: t.update({"blocks.1.layers.0.bias": torch.ones(3)}), "of shape"
    yield "medusa", lambda t, _: t.update({"more": torch.ones(3)}), "has tensor more"
    yield "medusa", lambda t, _: t.update({"token_map": torch.arange(9)}), "outputs for 259"
    yield "eagle", lambda t, _: t.__delitem__("fc.weight"), "lacks tensor fc.weight"
    yield "eagle", lambda _, c: c.update(num_hidden_layers=2), "has 2 layers"
    yield "eagle", lambda _, c: c.update(hidden_size=32, head_dim=8), "width 32"
    yield "eagle3", lambda t, _: t.__delitem__("lm_head.weight"), "no head of EAGLE-3"
    yield "eagle3", lambda t, _: t["d2t"].add_(200), "does not have: see d2t"
    yield "eagle3", lambda _, c: c.update(eagle_config=_layers(0, 1, 3)), "reads the layers"
    yield "eagle3", lambda t, _: t.update(d2t=torch.tensor(3)), "outputs for 150 tokens"
    yield "eagle3", lambda t, _: t.update(d2t=torch.zeros(1, 150)), "no list of tokens"
    yield "eagle3", lambda _, c: c.update(eagle_config=_layers(1, 1, 2)), "reads the layers"
    yield "eagle3", lambda _, c: c.update(norm_before_residual="no"), "norm_before_residual 'no'"
    yield "eagle3", lambda _, c: c.update(hidden_act="relu"), "is invalid: .*hidden_act"
    yield "eagle3", lambda _, c: c.update(intermediate_size=10**18), "cannot be loaded"
    yield "eagle", lambda _, c: c.update(intermediate_size=10**14), "of shape"
    yield "eagle", lambda t, _: t.update({"fc.weight": t["fc.weight"].int()}), "of torch.int32"


def _layers(*layers: int) -> dict[str, object]:
    return {"eagle_aux_hidden_state_layer_ids": list(layers)}


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    served = tiny_checkpoint("llama")
    for number, (method, change, message) in enumerate(_bad_heads()):
        folder = random_heads(method, served, tmp_path / str(number))
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigurationError, match=message):
            build_core(served, "both", **_drafting(method, folder))
    (tmp_path / "0" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigurationError, match="is not readable"):
        build_core(served, "both", **_drafting("medusa", tmp_path / "0"))
    with pytest.raises(ConfigurationError, match="the engine 2 ranks"):
        build_core(served, "both", **_drafting("medusa", tmp_path / "1", tensor_parallel_size=2))
