"""Log-probabilities of drawn tokens and of prompts equal those of `transformers`, float32."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.batch import TokenLogprobs
from engine.request import CandidateProgress, EngineOutput, EngineRequest
from engine.runtime.draws import logprobs as logprobs_module
from engine.runtime.forward.recorded_steps import RecordedSteps
from tests.support.checkpoints import (
    DECODER_VARIANTS,
    FAMILIES,
    VARIANTS,
    VOCAB_SIZE,
    prompt_of,
    tiny_checkpoint,
)
from tests.support.logprob_checks import check_details, check_tokens, reference_logprobs
from tests.support.pairs import pairs
from tests.support.real_engines import SplitRun, build_core, engine, run_all, tokens_of
from tests.support.requests import changed, engine_request
from tests.support.runner_kinds import use_kind

pytestmark = pytest.mark.sampled(one_in=2)

NUM_TOKENS = 14
TIGHT = {"max_model_len": 72, "num_gpu_blocks_override": 12}
FEATURES = {
    "plain": {"enable_prefix_caching": False, "max_num_batched_tokens": 512},
    "prefix caching": {},
    "chunks": {"max_num_batched_tokens": 9},
    "long prompts": {"long_prefill_token_threshold": 5, "max_num_partial_prefills": 3},
    "recompute": {"preemption_mode": "recompute", **TIGHT},
    "swap": {"preemption_mode": "swap", "swap_space": 2**26, **TIGHT},
    "overlap": {"async_scheduling": True},
    "overlap, recompute": {"async_scheduling": True, "preemption_mode": "recompute", **TIGHT},
    "overlap, swap": {
        "async_scheduling": True,
        "preemption_mode": "swap",
        "swap_space": 2**26,
        **TIGHT,
    },
    "alone": {"max_num_seqs": 4, "max_num_batched_tokens": 16, "async_scheduling": False},
}


def mixed_requests() -> list[EngineRequest]:
    """Returns requests that ask for different log-probabilities, or for none. Some prompts are
    prefixes of others.
    """
    asked = (
        {"logprobs": 3},
        {"prompt_logprobs": 4, "logprobs": 0},
        {},
        {"prompt_logprobs": 0, "temperature": 1.3, "seed": 5},
        {"logprobs": 20, "temperature": 0.7, "top_k": 5, "seed": 6},
        {"prompt_logprobs": 2, "logprobs": 1, "n": 3, "temperature": 1.0, "seed": 7},
        {"logprobs": 2, "n": 1, "best_of": 3, "temperature": 1.0, "seed": 8},
        {"n": 2, "best_of": 3, "prompt_logprobs": 1, "temperature": 1.0, "seed": 9},
    )
    lengths = (7, 33, 16, 1, 50, 40, 18, 21)
    return [
        engine_request(
            request_id=str(index),
            prompt_token_ids=tuple(prompt_of(length, seed=length % 2)),
            max_tokens=NUM_TOKENS,
            **fields,
        )
        for index, (length, fields) in enumerate(zip(lengths, asked, strict=True))
    ]


def details_of(outputs: Sequence[EngineOutput], index: int) -> list[TokenLogprobs]:
    return [found for output in outputs if output.index == index for found in output.logprobs]


def check_outputs(
    variant: str, request: EngineRequest, outputs: Sequence[EngineOutput], first: tuple = ()
) -> None:
    """Checks all log-probabilities of a request.

    Args:
        variant: the checkpoint.
        request: the request.
        outputs: its outputs, in order.
        first: the output with the first tokens of all candidates, if prefill drew them.
    """
    path, params, prompt = (
        tiny_checkpoint(variant),
        request.spec.params,
        request.spec.prompt_token_ids,
    )
    for index in range(params.n):
        tokens, details = tokens_of(outputs, index), details_of(outputs, index)
        if first and not params.is_ranked:
            tokens = [first[0].token_ids[index], *tokens]
            details = [*first[0].logprobs[index : index + 1], *details]
        assert len(tokens) == NUM_TOKENS
        assert len(details) == (0 if params.logprobs is None else NUM_TOKENS)
        check_tokens(path, (*prompt, *tokens), details, params.logprobs or 0)
    all_outputs = [*first, *outputs]
    of_prompts = [output.prompt_logprobs for output in all_outputs if output.prompt_logprobs]
    if params.prompt_logprobs is None or len(prompt) == 1:
        assert not of_prompts
        return
    (details,) = of_prompts
    assert all_outputs[0].prompt_logprobs == details
    assert len(details) == len(prompt) - 1
    check_tokens(path, prompt, details, params.prompt_logprobs)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("variant", ["llama", "qwen2_alternating", "deepseek_v3"])
def test_features_change_no_logprob(variant: str, feature: str) -> None:
    flags = FEATURES[feature]
    if "num_gpu_blocks_override" in flags:
        with engine(variant, **(flags | {"num_gpu_blocks_override": 160})) as core:
            spec = core.scheduler.kv.spec
        flags = flags | {"num_gpu_blocks_override": spec.blocks_for_branches(40, 54, 3) + 1}
    with engine(variant, **flags) as core:
        for _ in range(2):  # the second run would use the prefix cache
            outputs = run_all(core, mixed_requests())
            for request in mixed_requests():
                check_outputs(variant, request, outputs[request.spec.request_id])
        if "recompute" in feature or "swap" in feature:
            assert core.scheduler.load().num_preemptions > 0


# With all of what decoders differ in.
TELLING = ("gemma3", "granite", "olmo3", "lfm2", "qwen3_5_moe", "qwen3_next")


@pytest.mark.parametrize(
    "variant",
    [
        *sorted(set(FAMILIES) - {"llama"}),
        *(
            pytest.param(variant, marks=pytest.mark.slow)
            for variant in sorted({*VARIANTS, *DECODER_VARIANTS} - {*FAMILIES, *TELLING})
        ),
        *TELLING,
    ],
)
def test_families(variant: str) -> None:
    with engine(variant) as core:
        outputs = run_all(core, mixed_requests())
        for request in mixed_requests():
            check_outputs(variant, request, outputs[request.spec.request_id])


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("variant", "overlap"), pairs(FAMILIES, (False, True)))
def test_two_tiers(variant: str, overlap: bool, tmp_path) -> None:
    flags = {
        "block_size": 8,
        "num_gpu_blocks_override": 160,
        "max_num_seqs": 12,
        "kv_connector": f"memory://{tmp_path.name}",
        "kv_load_failure_policy": "fail",  # so that decode loads all of every prompt
        "async_scheduling": overlap,
    }
    path = tiny_checkpoint(variant)
    prefill, decode = (build_core(path, role, **flags) for role in ("prefill", "decode"))
    try:
        for _ in range(2):  # the second run would find prompts in prefill's cache and the store
            split = SplitRun(prefill, decode)
            split.run(mixed_requests())
            for request in mixed_requests():
                name = request.spec.request_id
                (first,) = (output for output in split.prefilled[name] if output.token_ids)
                check_outputs(variant, request, split.outputs[name], (first,))
                assert split.outputs[name][0].cached_tokens == len(request.spec.prompt_token_ids)
    finally:
        prefill.close()
        decode.close()


@pytest.mark.parametrize("kind", ["device, eager", "device, graphs"])
def test_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kind(kind, monkeypatch)
    with engine("llama", async_scheduling=True, max_num_batched_tokens=24) as core:
        outputs = run_all(core, mixed_requests())
        for request in mixed_requests():
            check_outputs("llama", request, outputs[request.spec.request_id])


def test_steps_that_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedSteps, "_should_record", lambda self, size: False)
    with engine("llama") as core:
        outputs = run_all(core, mixed_requests())
        for request in mixed_requests():
            check_outputs("llama", request, outputs[request.spec.request_id])


def test_a_resumed_request_reports_only_its_new_tokens() -> None:
    (request,) = (each for each in mixed_requests() if each.spec.params.n == 3)
    with engine("llama") as core:
        whole = run_all(core, [request])["5"]
        tokens = {index: tokens_of(whole, index) for index in range(3)}
        begun = [
            CandidateProgress(index, tuple(tokens[index][:number]))
            for index, number in enumerate((1, 4, 9))
        ]
        resumed = run_all(core, [replace(request, progress=tuple(begun))])["5"]
    for index, number in enumerate((1, 4, 9)):
        assert tokens_of(resumed, index) == tokens[index][number:]
        details = details_of(resumed, index)
        assert len(details) == NUM_TOKENS - number
        known = (*request.spec.prompt_token_ids, *tokens[index])
        check_tokens(tiny_checkpoint("llama"), known, details, 1)
    assert not any(output.prompt_logprobs for output in resumed)


def test_all_logits_of_a_prompt_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "_PART_ELEMENTS", 5 * VOCAB_SIZE)
    with engine("llama", max_num_batched_tokens=512) as core:
        model, most_rows = core._runner._model, []
        compute = model.logits
        monkeypatch.setattr(model, "logits", lambda h: most_rows.append(len(h)) or compute(h))
        outputs = run_all(core, mixed_requests())
    assert max(most_rows) <= 12  # as many sequences decode at once; prompts have up to 49 targets
    for request in mixed_requests():
        check_outputs("llama", request, outputs[request.spec.request_id])


@pytest.mark.parametrize("kind", ["host", "device, eager"])
def test_processed_logprobs_are_those_of_the_distribution_drawn_from(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kind(kind, monkeypatch)
    base = changed(mixed_requests()[0], logprobs=8)
    requests = [
        changed(base, request_id="greedy"),
        changed(base, request_id="hot", temperature=1.7, seed=1),
        changed(base, request_id="few", temperature=0.6, top_k=4, seed=2),
        changed(base, request_id="nucleus", temperature=1.2, top_p=0.7, seed=3, n=2),
    ]
    with engine("llama", logprobs_mode="processed_logprobs") as core:
        outputs = run_all(core, requests)
    for request in requests:
        params, prompt = request.spec.params, request.spec.prompt_token_ids
        for index in range(params.n):
            of_one = outputs[request.spec.request_id]
            tokens, details = tokens_of(of_one, index), details_of(of_one, index)
            assert len(details) == NUM_TOKENS
            raw = reference_logprobs(tiny_checkpoint("llama"), (*prompt, *tokens))
            for position, found in enumerate(details, len(prompt)):
                expected = processed(raw[position - 1], params)
                check_details(expected, tokens[position - len(prompt)], found, 8)


def processed(raw: torch.Tensor, params) -> torch.Tensor:
    """Returns the log-probabilities that a token is drawn by."""
    if params.temperature == 0:
        return raw
    scaled = (raw.double() / params.temperature).log_softmax(-1)
    if params.top_k:
        scaled[scaled < scaled.topk(params.top_k).values[-1]] = -torch.inf
    ordered, order = scaled.log_softmax(-1).exp().sort(descending=True)
    ahead = ordered.cumsum(-1) - ordered
    scaled[order[ahead >= params.top_p]] = -torch.inf
    return scaled.log_softmax(-1)


RULES = {"repetition_penalty": 1.7, "logit_bias": {5: 9.0, 9: -30.0}, "min_p": 0.01}
FEW = {"allowed_token_ids": tuple(range(0, 200, 17))}


@pytest.mark.parametrize("kind", ["host", "device, eager"])
def test_raw_logprobs_are_those_before_rules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kind(kind, monkeypatch)
    requests = [
        changed(request, request_id=f"{request.spec.request_id} {name}", **rules)
        for request in mixed_requests()
        for name, rules in (("", {}), ("rules", RULES), ("few", FEW))
    ]
    with engine("llama") as core:
        outputs = run_all(core, requests)
        for request in requests:
            of_one = outputs[request.spec.request_id]
            check_outputs("llama", request, of_one)
            if request.spec.params.is_ranked and request.spec.params.logprobs is not None:
                own = [found.logprob for found in of_one[0].logprobs]
                assert of_one[0].score == pytest.approx(sum(own) / len(own), abs=1e-5)


@pytest.mark.parametrize("kind", ["host", "device, eager"])
def test_processed_logprobs_are_those_after_rules(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kind(kind, monkeypatch)
    base = changed(mixed_requests()[0], logprobs=15)
    requests = [
        changed(base, request_id="plain"),
        changed(base, request_id="few", temperature=1.3, **FEW),
        changed(base, request_id="biased", logit_bias=RULES["logit_bias"]),
    ]
    with engine("llama", logprobs_mode="processed_logprobs") as core:
        outputs = run_all(core, requests)
    for request in requests:
        params, prompt = request.spec.params, request.spec.prompt_token_ids
        (tokens, details) = (
            function(outputs[request.spec.request_id], 0) for function in (tokens_of, details_of)
        )
        raw = reference_logprobs(tiny_checkpoint("llama"), (*prompt, *tokens))
        for index, found in enumerate(details):
            expected = ruled(raw[len(prompt) + index - 1], params)
            check_details(processed(expected.log_softmax(-1), params), tokens[index], found, 15)


def ruled(raw: torch.Tensor, params) -> torch.Tensor:
    changed_logits = raw.clone()
    for token_id, bias in (params.logit_bias or {}).items():
        changed_logits[token_id] += bias
    if params.allowed_token_ids is not None:
        banned = torch.ones(len(raw), dtype=torch.bool)
        banned[list(params.allowed_token_ids)] = False
        changed_logits[banned] = -torch.inf
    return changed_logits
