"""Beam search equals `transformers`' on real models, and candidates are the same on one tier,
on two, after a restart, and under every load.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loop.core import EngineCore
from engine.request import (
    CandidateProgress,
    EngineOutput,
    EngineRequest,
    FinishReason,
)
from tests.support.checkpoints import prompt_of, reference_model, tiny_checkpoint
from tests.support.engine_work import has_work
from tests.support.pairs import pairs
from tests.support.real_engines import Outputs, build_core, hand_over, run_all, tokens_of
from tests.support.requests import changed, engine_request

pytestmark = pytest.mark.sampled(one_in=2)

WIDTH = 4
NUM_TOKENS = 12
PROMPTS = (1, 8, 21, 40)
WARM = {"temperature": 1.0, "top_p": 0.95, "seed": 2**40 + 7}
SWAP = {"preemption_mode": "swap", "swap_space": 2**26}
LOADS = {
    "roomy": {},
    "tight, recompute": {"preemption_mode": "recompute", "num_gpu_blocks_override": 36},
    "tight, swap": {**SWAP, "num_gpu_blocks_override": 36},
    "overlap": {"async_scheduling": True},
    "overlap, tight, swap": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 36,
        **SWAP,
    },
    "chunks": {"max_num_batched_tokens": 9},
}


@contextmanager
def _engine(variant: str, role: str = "both", **flags: object) -> Iterator[EngineCore]:
    defaults = {
        "block_size": 4,
        "max_model_len": 64,
        "num_gpu_blocks_override": 256,
        "max_num_seqs": 16,
    }
    core = build_core(tiny_checkpoint(variant), role, **{**defaults, **flags})
    try:
        yield core
    finally:
        core.close()


def _beam_request(length: int, **fields: Any) -> EngineRequest:
    return engine_request(
        request_id=f"beams {length}",
        prompt_token_ids=tuple(prompt_of(length)),
        max_tokens=NUM_TOKENS,
        n=WIDTH,
        beam_width=WIDTH,
        **fields,
    )


def _sample_request(length: int, num_returned: int, **fields: Any) -> EngineRequest:
    return engine_request(
        request_id=f"sample {length} {num_returned}",
        prompt_token_ids=tuple(prompt_of(length, seed=length)),
        max_tokens=NUM_TOKENS,
        n=num_returned,
        best_of=WIDTH,
        **WARM,
        **fields,
    )


def _all_requests() -> list[EngineRequest]:
    beams = [_beam_request(length) for length in PROMPTS]
    samples = [_sample_request(length, n) for length in PROMPTS for n in (2, WIDTH)]
    return beams + samples


def _candidates(outputs: Sequence[EngineOutput]) -> list[tuple[list[int], float | None]]:
    """Returns tokens and scores by index; checks that every candidate has ended once."""
    ends = [output for output in outputs if output.finish_reason is not None]
    assert sorted(output.index for output in ends) == list(range(len(ends)))
    assert [output.is_last for output in outputs] == [False] * (len(outputs) - 1) + [True]
    ends.sort(key=lambda output: output.index)
    return [(tokens_of(outputs, output.index), output.score) for output in ends]


def _check_same(found: Outputs, expected: Outputs) -> None:
    assert found.keys() == expected.keys()
    for request_id, outputs in found.items():
        ours, theirs = _candidates(outputs), _candidates(expected[request_id])
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        for (_, score), (_, other) in zip(ours, theirs, strict=True):
            assert score == pytest.approx(other, abs=1e-4)


@cache
def _stops(variant: str) -> frozenset[int]:
    """Returns stop tokens that beams of the shortest prompt reach."""
    with _engine(variant) as core:
        outputs = run_all(core, [_beam_request(1)])["beams 1"]
        candidates = _candidates(outputs)
    return frozenset({candidates[0][0][5], candidates[1][0][-1]})


def _transformers_beams(path: Path, request: EngineRequest) -> list[tuple[list[int], float]]:
    params = request.spec.params
    output = reference_model(path).generate(
        torch.tensor([request.spec.prompt_token_ids]),
        attention_mask=torch.ones(1, len(request.spec.prompt_token_ids), dtype=torch.int64),
        do_sample=False,
        num_beams=WIDTH,
        num_return_sequences=WIDTH,
        eos_token_id=sorted(request.spec.stop_token_ids) or None,
        pad_token_id=0,
        max_new_tokens=NUM_TOKENS,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = output.sequences[:, len(request.spec.prompt_token_ids) :].tolist()
    ends = [_end(row, request.spec.stop_token_ids) for row in rows]
    scores = output.sequences_scores.tolist()
    return [(row[:end], score) for row, end, score in zip(rows, ends, scores, strict=True)]


def _end(row: list[int], stops: frozenset[int]) -> int:
    return next((i + 1 for i, token_id in enumerate(row) if token_id in stops), len(row))


@pytest.mark.parametrize(
    ("variant", "length_penalty", "early_stopping"),
    [
        *pairs(
            ("llama", "gpt2", "qwen3_mostly_sliding"),
            (-1.0, 0.0, 1.0, 2.0),
            (False, True, "never"),
        ),
        ("qwen3_5", 1.0, "never"),
        ("qwen3_next", 2.0, False),
    ],
)
def test_beam_search_equals_transformers(
    variant: str, length_penalty: float, early_stopping: bool | str
) -> None:
    fields = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    requests = [
        _beam_request(length, stop_token_ids=_stops(variant), **fields) for length in PROMPTS
    ]
    with _engine(variant) as core:
        outputs = run_all(core, requests)
    for request in requests:
        expected = _transformers_beams(tiny_checkpoint(variant), request)
        found = _candidates(outputs[request.spec.request_id])
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert [score for _, score in found] == pytest.approx(
            [score for _, score in expected], abs=1e-4, rel=1e-6
        )  # rel: float32 sums, which the length penalty makes as large as 300


@cache
def _reference(variant: str) -> Outputs:
    with _engine(variant, enable_prefix_caching=False) as core:
        return {r.spec.request_id: run_all(core, [r])[r.spec.request_id] for r in _all_requests()}


@pytest.mark.parametrize(
    ("variant", "load"),
    [
        *product(["llama", "qwen2_alternating", "lfm2"], LOADS),
        ("qwen3_5", "tight, recompute"),
        ("qwen3_next", "overlap, tight, swap"),
        pytest.param("deepseek_v2_lite", "tight, recompute", marks=pytest.mark.slow),
    ],
)
def test_candidates_do_not_depend_on_the_load(variant: str, load: str) -> None:
    flags = dict(LOADS[load])
    if variant == "qwen2_alternating" and "num_gpu_blocks_override" in flags:
        flags["num_gpu_blocks_override"] = 68 if "async_scheduling" in flags else 56
    if variant in ("qwen3_5", "qwen3_next"):
        flags["num_state_slots"] = 24  # so that blocks are what there are too few of
    with _engine(variant, **flags) as core:
        outputs = run_all(core, _all_requests())
        is_tight = core.scheduler.load().num_preemptions > 0
    _check_same(outputs, _reference(variant))
    assert is_tight == ("tight" in load)


@pytest.mark.parametrize("variant", ["llama", "qwen2_alternating", "deepseek_v2_lite"])
def test_two_tiers_return_the_candidates_of_one_engine(variant: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    requests = _all_requests()
    with (
        _engine(variant, "prefill", kv_connector=url) as prefill,
        # It waits for the KV, however slowly that comes.
        _engine(variant, "decode", kv_connector=url, kv_load_failure_policy="fail") as decode,
    ):
        answers = run_all(prefill, requests)
        handed = [hand_over(request, answers[request.spec.request_id]) for request in requests]
        outputs = run_all(decode, handed)
        for request in handed:
            assert outputs[request.spec.request_id][0].cached_tokens == len(
                request.spec.prompt_token_ids
            )
    whole = {r.spec.request_id: _with_first_tokens(r, outputs[r.spec.request_id]) for r in handed}
    _check_same(whole, _reference(variant))


def _with_first_tokens(request: EngineRequest, outputs: list[EngineOutput]) -> list[EngineOutput]:
    """Returns what the client gets: prefill's tokens come first if candidates are streamed."""
    if request.spec.params.is_ranked:
        return outputs
    first = [
        EngineOutput(request.spec.request_id, progress.index, progress.output_token_ids)
        for progress in request.progress
    ]
    return first + outputs


def test_the_first_of_many_candidates_equals_that_of_a_single_request() -> None:
    request = _sample_request(21, WIDTH)
    single = changed(request, n=1, best_of=1)
    with _engine("llama") as core:
        many = _candidates(run_all(core, [request])[request.spec.request_id])
        (alone,) = _candidates(run_all(core, [single])[request.spec.request_id])
    assert many[0] == alone
    assert len({tuple(tokens) for tokens, _ in many}) > 1


def test_a_resumed_request_continues_with_the_same_tokens() -> None:
    """The candidates resume at unlike lengths, as after the loss of a replica."""
    request = _sample_request(21, WIDTH)
    with _engine("llama") as core:
        whole = run_all(core, [request])[request.spec.request_id]
        expected = [tokens for tokens, _ in _candidates(whole)]
    lengths = (1, 5, 3, 5)
    progress = tuple(
        CandidateProgress(index, tuple(expected[index][:length]))
        for index, length in enumerate(lengths)
    )
    resumed = replace(request, progress=progress)
    with _engine("llama") as core:
        outputs = run_all(core, [resumed])[request.spec.request_id]
    for index, length in enumerate(lengths):
        assert tokens_of(outputs, index) == expected[index][length:]


def test_best_of_returns_the_likeliest() -> None:
    """The expected scores are the log-probabilities of the same tokens in `transformers`."""
    some, every = _sample_request(21, 2), _sample_request(21, WIDTH)
    with _engine("llama") as core:
        best = _candidates(run_all(core, [some])[some.spec.request_id])
        candidates = _candidates(run_all(core, [every])[every.spec.request_id])
    scored = [(_mean_logprob(every, tokens), tokens) for tokens, _ in candidates]
    scored.sort(reverse=True)
    assert [tokens for tokens, _ in best] == [tokens for _, tokens in scored[:2]]
    assert [score for _, score in best] == pytest.approx(
        [score for score, _ in scored[:2]], abs=1e-4
    )


def _mean_logprob(request: EngineRequest, tokens: list[int]) -> float:
    whole = torch.tensor([[*request.spec.prompt_token_ids, *tokens]])
    with torch.inference_mode():
        logits = reference_model(tiny_checkpoint("llama"))(whole).logits[0]
    logprobs = logits.float().log_softmax(-1)[len(request.spec.prompt_token_ids) - 1 : -1]
    return float(logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).mean())


def test_finishing_one_candidate_early_does_not_change_the_others() -> None:
    request = _sample_request(21, WIDTH)
    with _engine("llama") as core:
        expected = run_all(core, [request])[request.spec.request_id]
        core.scheduler.add(request)
        outputs: list[EngineOutput] = []
        while has_work(core):
            core.run_step(outputs.extend)
            if len(outputs) >= WIDTH:  # each has a token
                core.scheduler.finish_candidate(request.spec.request_id, 1)
        core.scheduler.check()
        assert core.scheduler.load().num_free_blocks == core.num_blocks
    for index in (0, 2, 3):
        assert tokens_of(outputs, index) == tokens_of(expected, index)
    assert len(tokens_of(outputs, 1)) < NUM_TOKENS
    assert outputs[-1].is_last
    assert outputs[-1].finish_reason is FinishReason.LENGTH
