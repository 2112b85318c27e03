"""Engines whose draft tokens come from a draft model, on real models."""

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from engine.batch import ScheduledChunk
from engine.groups.group import Sequence as GroupSequence
from engine.loop.core import EngineCore
from engine.request import EngineRequest
from engine.runtime.drafting.draft_model import DraftModel
from engine.runtime.launch import launcher
from engine.speculation import drafts
from tests.support.checkpoints import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    prompt_of,
    reference_greedy,
    tiny_checkpoint,
)
from tests.support.later_families import LATER_FAMILIES
from tests.support.odd_checkpoints import both, config, odd_checkpoint, other_head
from tests.support.rank_engines import all_kinds, check_handed_over, tiers, tokens
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request
from tests.support.runner_kinds import use_kind

# Torch's kernels, without a compiler, take minutes beside other tests.
pytestmark = pytest.mark.timeout(300)

NumProposals = Callable[[drafts.Drafts, GroupSequence, int], int]


@pytest.fixture(autouse=True)
def _any_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts as many tokens as allowed: what they cost is not known without measured steps."""
    monkeypatch.setattr(drafts.Drafts, "_plan", lambda self, _: drafts._Plan(self._most, math.inf))


def _drafting(draft_model: Path, **flags: object) -> dict[str, object]:
    """Returns flags of an engine whose batches have room for the draft tokens of all sequences."""
    config = {"model": str(draft_model), "num_speculative_tokens": 4}
    sizes = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 160}
    return {"speculative_config": config, **sizes, **flags}


def _num_drafts(core: EngineCore) -> tuple[float, float]:
    values = core.metrics.snapshot().values
    return tuple(values["baton_engine_draft_tokens", each] for each in ("accepted", "rejected"))


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    ("variant", "overlapped"),
    [
        *product(("llama", "gpt2", "qwen2_alternating", "lfm2", "qwen3_5"), (False, True)),
        # Later families in turn; those at even places look tokens up in `test_speculation`.
        *((variant, i % 4 > 1) for i, variant in enumerate(LATER_FAMILIES) if i % 2 and i > 1),
    ],
)
def test_a_draft_model_changes_no_token(variant: str, overlapped: bool) -> None:
    plain = tokens(variant, block_size=8)
    flags = _drafting(tiny_checkpoint("opt"), async_scheduling=overlapped, block_size=8)
    with closing(build_core(tiny_checkpoint(variant), "both", **flags)) as core:
        for _ in range(2):  # the second time prompts are found in the prefix cache
            outputs = run_all(core, all_kinds())
            assert {key: tokens_of(outputs[key[0]], key[1]) for key in plain} == plain
        assert _num_drafts(core)[1] > 100  # the models have nothing in common


def _plain_kinds() -> list[EngineRequest]:
    """Requests whose tokens are drawn from the model's own probabilities, as those of a draft model
    that is the same model are.
    """
    options = [{}, {"temperature": 1.0, "seed": 7, "n": 3, "top_k": 50}, {"logprobs": 2}]
    options.append({"temperature": 0.8, "seed": 1, "min_p": 0.02, "top_p": 0.9})
    return [
        engine_request(str(length), tuple(prompt_of(length)), max_tokens=24, **own)
        for length, own in zip((7, 20, 33, 50), options, strict=True)
    ]


def _check_all_right(core: EngineCore) -> None:
    """Runs requests twice, and checks that no draft token was wrong."""
    for _ in range(2):
        outputs = run_all(core, _plain_kinds())
        assert all(one.error is None for each in outputs.values() for one in each)
    accepted, rejected = _num_drafts(core)
    assert rejected == 0
    assert accepted > 150


@pytest.mark.parametrize("kind", ["host", "device, eager"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_the_same_model_drafts_every_token(
    kind: str, overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kind(kind, monkeypatch)
    path = tiny_checkpoint("llama")
    flags = _drafting(path, async_scheduling=overlapped, block_size=8, max_num_batched_tokens=40)

    with closing(build_core(path, "both", **flags)) as core:
        _check_all_right(core)


def test_a_draft_model_has_a_head_that_differs_from_its_embedding(tmp_path: Path) -> None:
    """The served model states what is true of the same weights; the draft model does not."""
    draft = odd_checkpoint("llama_tied_biased", other_head(), tmp_path)
    served = odd_checkpoint(
        "llama_tied_biased", both(other_head(), config(tie_word_embeddings=False)), tmp_path
    )
    flags = _drafting(draft, block_size=8, max_num_batched_tokens=40)
    with closing(build_core(served, "both", **flags)) as core:
        _check_all_right(core)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_sequence_is_run_again(mode: str) -> None:
    path = tiny_checkpoint("llama")
    flags = _drafting(path, max_model_len=96, block_size=8, preemption_mode=mode, swap_space=2**26)

    with closing(build_core(path, "both", **flags | {"num_gpu_blocks_override": 14})) as core:
        _check_all_right(core)
        assert core.scheduler.load().num_preemptions > 0


def test_a_sequence_that_decoded_meanwhile_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens are made in every other block."""
    monkeypatch.setattr(
        drafts.Drafts, "num_proposals", _in_every_other_block(drafts.Drafts.num_proposals)
    )
    path = tiny_checkpoint("llama")
    with closing(build_core(path, "both", **_drafting(path, block_size=4))) as core:
        _check_all_right(core)


@pytest.mark.parametrize("kind", ["host", "device, eager"])
def test_tokens_that_a_model_with_states_runs_again_are_not_drafted_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four draft tokens are right, which the served model runs twice."""
    use_kind(kind, monkeypatch)
    served, num_run = tiny_checkpoint("lfm2"), [0]
    prompt = tuple(prompt_of(20))
    known = [*prompt, *reference_greedy(served, list(prompt), 60)]
    fill = DraftModel._fill

    def counting(self: DraftModel, chunks: Sequence[ScheduledChunk]) -> None:
        num_run[0] += sum(chunk.num_tokens for chunk in chunks)
        fill(self, chunks)

    def draw(self: DraftModel, scores: object, jobs: object, positions: Sequence[int]) -> list[int]:
        return [(known[p] + (p % 4 == 0)) % VOCAB_SIZE if p < len(known) else 0 for p in positions]

    monkeypatch.setattr(DraftModel, "_fill", counting)
    monkeypatch.setattr(DraftModel, "_draw", draw)
    flags = _drafting(tiny_checkpoint("opt"), block_size=8, max_num_batched_tokens=40)
    with closing(build_core(served, "both", **flags)) as core:
        num_run[0] = 0
        outputs = run_all(core, [engine_request("r", prompt, max_tokens=60)])
        accepted, rejected = _num_drafts(core)
    assert tokens_of(outputs["r"]) == known[20:]
    assert min(accepted, rejected) > 10
    assert num_run[0] <= len(known) + rejected  # wrong draft tokens run besides


def _in_every_other_block(num_proposals: NumProposals) -> NumProposals:
    def limited(self: drafts.Drafts, sequence: GroupSequence, num_drafts: int) -> int:
        is_on = len(sequence.token_ids) // 4 % 2
        return num_proposals(self, sequence, num_drafts) if is_on else 0

    return limited


@pytest.mark.parametrize(
    ("salts", "caches", "finds"),
    [(("", ""), True, True), (("", ""), False, False), (("one", "two"), True, False)],
)
def test_a_prompt_is_run_again_only_if_its_kv_may_not_be_shared(
    salts: tuple[str, str], caches: bool, finds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt takes several steps, in which the sequence draws tokens one by one."""
    num_run = [0]
    fill = DraftModel._fill  # of known tokens and of draft tokens

    def counting(self: DraftModel, chunks: Sequence[ScheduledChunk]) -> None:
        num_run[-1] += sum(chunk.num_tokens for chunk in chunks)
        fill(self, chunks)

    monkeypatch.setattr(DraftModel, "_fill", counting)
    path = tiny_checkpoint("llama")
    flags = _drafting(path, block_size=8, enable_prefix_caching=caches)
    with closing(build_core(path, "both", **flags)) as core:
        for salt in salts:
            num_run.append(0)
            prompt = tuple(prompt_of(200))
            request = engine_request("r", prompt, max_tokens=24, cache_salt=salt)
            drawn = tokens_of(run_all(core, [request])["r"])
        accepted, rejected = _num_drafts(core)

    assert drawn == reference_greedy(path, prompt_of(200), 24)
    _, first, second = num_run
    assert first > 200
    assert (second < 80) == finds
    assert rejected == 0
    assert accepted > 20


def test_a_draft_model_that_fails_harms_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_checkpoint("llama")
    expected = reference_greedy(path, prompt_of(20), 24)
    with closing(build_core(path, "both", **_drafting(path))) as core:
        with monkeypatch.context() as broken:
            broken.setattr(DraftModel, "_draw", _fail)
            request = engine_request("r", tuple(prompt_of(20)), max_tokens=24)
            assert tokens_of(run_all(core, [request])["r"]) == expected
        assert _num_drafts(core) == (0, 0)
        assert "drafting has failed" in caplog.text

        _check_all_right(core)


def _fail(*_: object) -> None:
    raise RuntimeError("injected by the test")


def test_a_decode_tier_drafts_alone() -> None:
    """The prefill tier needs no draft model; the decode tier runs it over the prompt."""
    path = tiny_checkpoint("llama")
    with tiers(path, {}, _drafting(path), kv_connector="memory://draft-models") as split:
        check_handed_over(path, split)
        accepted, rejected = _num_drafts(split._decode)
    assert accepted > 15
    assert rejected == 0


def test_a_decode_tier_drafts_for_a_model_with_states() -> None:
    path = tiny_checkpoint("lfm2")
    flags = _drafting(tiny_checkpoint("opt"))
    with tiers(path, {}, flags, kv_connector="memory://draft-models-lfm2") as split:
        check_handed_over(path, split)
        assert sum(_num_drafts(split._decode)) > 20


def _changed(path: Path, file: str, old: str, new: str) -> Path:
    """Returns a copy of a checkpoint, one file of which differs."""
    copied = path / "draft"
    shutil.copytree(tiny_checkpoint("llama"), copied)
    text = (copied / file).read_text()
    assert old in text
    (copied / file).write_text(text.replace(old, new))
    return copied


def test_a_draft_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama")
    (tmp_path / "one").mkdir()
    limit = '"max_position_embeddings": '
    short = _changed(tmp_path / "one", "config.json", f"{limit}{MAX_MODEL_LEN}", f"{limit}64")
    foreign = _changed(tmp_path / "two", "tokenizer.json", '"a": 97', '"aa": 97')
    for served, draft_model, message in [
        (path, tmp_path / "missing", "missing"),
        (path, short, "takes 64 tokens; set --max-model-len 64"),
        (path, foreign, "tokenizer is not the served model's"),
        (tiny_checkpoint("mistral_sliding"), path, "all layers .* have a sliding window"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            build_core(served, "both", **_drafting(draft_model))
    with pytest.raises(ConfigurationError, match="the engine 2 ranks"):
        build_core(path, "both", **_drafting(path, tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        ("lfm2", "3 recurrent layers, the first of them layer 0"),
        ("gemma4", "layers that share K and V or have K and V of different shapes"),
    ],
)
def test_a_draft_model_whose_layers_cannot_draft_is_refused_before_weights_are_read(
    variant: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigurationError, match=f"{problem}; such models cannot draft"):
        build_core(tiny_checkpoint("llama"), "both", **_drafting(tiny_checkpoint(variant)))
