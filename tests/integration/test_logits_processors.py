"""Logits processors in engines, compared with the same changes of a reference's logits."""

from collections import defaultdict
from functools import cache

import pytest
import torch

from baton import LLM
from baton.common.errors import ConfigurationError, InternalError, InvalidArgumentError
from engine.request import CandidateProgress, FinishReason
from engine.runtime.forward import recorded_steps
from tests.support.checkpoints import prompt_of, reference_model, tiny_checkpoint
from tests.support.logits_processors import FAULTS, FLAG, processed_logits
from tests.support.real_engines import SplitRun, build_core, run_all, tokens_of
from tests.support.requests import changed, engine_request
from tests.support.ruled_generation import by_oracle, generate
from tests.support.runner_kinds import use_kind

pytestmark = pytest.mark.sampled(one_in=2)

NUM_TOKENS = 14
PROMPT = tuple(prompt_of(21, seed=3))
DRAWN = {"temperature": 1.2, "seed": 5}
TIGHT = {"max_model_len": 40, "num_gpu_blocks_override": 13}
FEATURES = {
    "plain": {"async_scheduling": False},
    "chunks": {"async_scheduling": False, "max_num_batched_tokens": 9},
    "overlap": {},
    "overlap, chunks": {"max_num_batched_tokens": 10},
    "recompute": {"async_scheduling": False, "preemption_mode": "recompute", **TIGHT},
    "overlap, recompute": {"preemption_mode": "recompute", **TIGHT},
    "overlap, swap": {"preemption_mode": "swap", "swap_space": 2**26, **TIGHT},
}
# Requests for one processor, for both, with the request's own rules, and for none.
REQUESTS = {
    "steer": {"extra_args": {"steer": 7}},
    "count": {"extra_args": {"count_penalty": 1.5}},
    "plain": {},
    "both": {"extra_args": {"steer": 3, "count_penalty": 0.5, "not": ["for", {"them": None}]}},
    "drawn": {**DRAWN, "extra_args": {"steer": 5, "count_penalty": 2.0}, "top_k": 40},
    "plain, drawn": DRAWN,
    "ruled": {
        "extra_args": {"steer": 2, "count_penalty": 0.25},
        "repetition_penalty": 1.2,
        "logit_bias": {2: -1.0, 4: 0.5},
        "bad_words_token_ids": ((2,), (4, 6)),
    },
    "plain, ruled": {"presence_penalty": 1.0},
}
CANDIDATES = {
    "candidates": {"n": 3, **DRAWN, "extra_args": {"steer": 4, "count_penalty": 1.0}},
}


def _requests(params=REQUESTS):
    """Returns requests whose prompts differ in length."""
    return [
        engine_request(name, PROMPT[index % 4 :], max_tokens=NUM_TOKENS, **own)
        for index, (name, own) in enumerate(params.items())
    ]


def _expected_of(request, index=0):
    choose = by_oracle(request, index)
    num_prompt, args = len(request.spec.prompt_token_ids), request.spec.params.extra_args

    def choose_processed(logits, tokens):
        return choose(processed_logits(logits, args, tokens[num_prompt:]), tokens)

    return generate(tiny_checkpoint("llama"), request, choose_processed)


@cache
def _expected():
    return {request.spec.request_id: _expected_of(request) for request in _requests()}


def _build(role="both", processors=FLAG, **flags):
    defaults = {"block_size": 8, "num_gpu_blocks_override": 160, "async_scheduling": True}
    return build_core(
        tiny_checkpoint("llama"),
        role,
        **({**defaults, "max_num_seqs": 16, "logits_processors": processors} | flags),
    )


def _tokens(outputs):
    return {name: tokens_of(of_one) for name, of_one in outputs.items()}


def test_the_processors_change_the_tokens():
    plain = generate(tiny_checkpoint("llama"), _requests()[0], by_oracle(_requests()[0]))
    assert len({*map(tuple, _expected().values()), tuple(plain)}) == len(REQUESTS) + 1


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        *(("host", feature) for feature in FEATURES),
        ("device, eager", "overlap, recompute"),
        ("device, eager", "overlap, swap"),
        ("device, graphs", "overlap, chunks"),
    ],
)
def test_tokens_equal_those_of_the_oracle(kind, feature, monkeypatch):
    """Requests with and without processors run together; the second time from cached prefixes."""
    use_kind(kind, monkeypatch)
    core = _build(**FEATURES[feature])
    for _ in range(2):
        assert _tokens(run_all(core, _requests())) == _expected()
    if "recompute" in feature or "swap" in feature:
        assert core.scheduler.load().num_preemptions > 0
    core.close()


def test_steps_that_are_not_recorded_change_no_token(monkeypatch):
    monkeypatch.setattr(recorded_steps, "_MAX_TOKENS", 0)
    core = _build()
    assert _tokens(run_all(core, _requests())) == _expected()
    core.close()


@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        ("host", "plain"),
        ("host", "recompute"),
        ("host", "overlap, chunks"),
        ("host", "overlap, swap"),
        ("device, eager", "overlap, recompute"),
    ],
)
def test_each_candidate_has_its_own_state(kind, feature, monkeypatch):
    use_kind(kind, monkeypatch)
    (first,) = _requests(CANDIDATES)
    requests = [first, changed(first, request_id="1", seed=6, extra_args={"count_penalty": 3.0})]
    core = _build(**FEATURES[feature])
    outputs = run_all(core, requests)
    core.close()
    for request in requests:
        for index in range(3):
            tokens = tokens_of(outputs[request.spec.request_id], index)
            assert tokens == _expected_of(request, index)


def test_sequences_have_ids_of_their_own(monkeypatch):
    """A state belongs to one candidate, whose text grows from step to step."""
    core = _build(**FEATURES["recompute"])
    lengths = defaultdict(list)
    processors = core._runner._steps._processors
    apply = processors.apply

    def record(processed, scores):
        for _, chunk in processed:
            text = chunk.processed
            assert (*text.prompt_token_ids, *text.output_token_ids)[-1] == chunk.token_ids[-1]
            lengths[text.sequence_id].append(len(text.output_token_ids))
        apply(processed, scores)

    monkeypatch.setattr(processors, "apply", record)
    (first,) = _requests(CANDIDATES)
    run_all(core, [first, changed(first, request_id="1")])
    core.close()
    every = list(range(1, NUM_TOKENS))
    assert sorted(lengths) == [(request, index) for request in (0, 1) for index in range(-1, 3)]
    for (_, index), of_sequence in lengths.items():
        assert of_sequence == ([0] if index == -1 else every)


def test_the_best_candidates_are_found_by_the_models_own_probabilities():
    (request,) = _requests(CANDIDATES)
    request = changed(request, n=2, best_of=3)
    core = _build()
    outputs = run_all(core, [request])["candidates"]
    core.close()
    every = [_expected_of(request, index) for index in range(3)]
    scores = [_logprob(tokens) / len(tokens) for tokens in every]
    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [tokens_of(outputs, rank) for rank in range(2)] == [every[index] for index in best]
    assert [output.score for output in outputs] == pytest.approx(
        [scores[index] for index in best], abs=1e-4
    )


def _logprob(tokens):
    """Returns the model's log-probability of tokens after `PROMPT`."""
    with torch.inference_mode():
        model = reference_model(tiny_checkpoint("llama"))
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = logits.float().log_softmax(dim=-1)
    return logprobs.gather(-1, torch.tensor(tokens).unsqueeze(-1)).sum().item()


def test_rows_are_used_again_with_other_arguments_and_without():
    core = _build(max_num_seqs=1)
    for ordered in (_requests(), _requests()[::-1]):
        assert _tokens(run_all(core, ordered)) == _expected()
    core.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_split_equals_whole(overlap, tmp_path):
    flags = {"kv_connector": f"memory://{tmp_path.name}", "async_scheduling": overlap}
    prefill, decode = (_build(role=role, **flags) for role in ("prefill", "decode"))
    split = SplitRun(prefill, decode)
    (candidates,) = _requests(CANDIDATES)
    try:
        split.run([*_requests(), candidates])
    finally:
        prefill.close()
        decode.close()
    for request in (*_requests(), candidates):
        name = request.spec.request_id
        for index in range(request.spec.params.n):
            first = split.handed[name].progress[index].output_token_ids
            tokens = [*first, *tokens_of(split.outputs[name], index)]
            assert tokens == _expected_of(request, index), name


@pytest.mark.parametrize("num_known", [1, 6])
def test_a_resumed_request_continues(num_known):
    resumed = []
    for request in _requests():
        known = tuple(_expected()[request.spec.request_id][:num_known])
        resumed.append(changed(request, progress=(CandidateProgress(0, known),)))
    core = _build()
    outputs = _tokens(run_all(core, resumed))
    core.close()
    assert outputs == {name: tokens[num_known:] for name, tokens in _expected().items()}


@pytest.mark.parametrize("kind", ["host", "device, eager"])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_are_the_models_own_or_those_after_the_processors(kind, mode, monkeypatch):
    use_kind(kind, monkeypatch)
    core = _build(logprobs_mode=mode)
    requests = [changed(request, logprobs=2) for request in _requests()]
    outputs = run_all(core, requests)
    core.close()
    assert _tokens(outputs) == _expected()
    for request in requests[:4]:  # greedy, without rules
        _check_logprobs(request, outputs[request.spec.request_id], mode)


def _check_logprobs(request, outputs, mode):
    prompt, args = request.spec.prompt_token_ids, request.spec.params.extra_args
    tokens = tokens_of(outputs)
    with torch.inference_mode():
        model = reference_model(tiny_checkpoint("llama"))
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    found = [entry for output in outputs for entry in output.logprobs]
    assert len(found) == len(tokens)
    for index, entry in enumerate(found):
        row = logits[index]
        if mode == "processed_logprobs":
            row = processed_logits(row, args, tokens[:index])
        expected = row.log_softmax(dim=-1)
        assert entry.logprob == pytest.approx(expected[tokens[index]].item(), abs=1e-4)
        assert entry.top_logprobs == pytest.approx(expected.topk(2).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("fault", "kind", "overlap"),
    [
        (fault, *setting)
        for fault, setting in zip(
            FAULTS, 2 * [("host", False), ("host", True), ("device, eager", True)], strict=True
        )
    ],
)
def test_a_processor_that_fails_ends_only_its_own_requests(fault, kind, overlap, monkeypatch):
    use_kind(kind, monkeypatch)
    processors = (*FLAG, "tests.support.logits_processors:Faulty")
    core = _build(processors=processors, async_scheduling=overlap)
    args = {"fault": fault, "steer": 2}
    failing = [
        engine_request("at once", PROMPT, max_tokens=9, extra_args={**args, "after": 0}),
        engine_request("later", PROMPT, max_tokens=9, extra_args={**args, "after": 3}),
        engine_request("n", PROMPT, max_tokens=9, n=2, **DRAWN, extra_args={**args, "after": 3}),
    ]
    outputs = run_all(core, [*failing, *_requests()])
    for request in failing:
        last = outputs.pop(request.spec.request_id)[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, InternalError)
        assert "logits processor" in str(last.error)
    assert _tokens(outputs) == _expected()
    # Their KV is sound, so others may use it.
    again = engine_request("again", PROMPT, max_tokens=2)
    assert run_all(core, [again])["again"][0].cached_tokens == len(PROMPT) // 8 * 8
    core.close()


def test_a_model_whose_logits_are_not_finite_ends_as_invalid(monkeypatch):
    core = _build()
    recorded = core._runner._steps._recorded
    compute_scores = recorded.scores

    def broken(on_layer):
        scores = compute_scores(on_layer)
        scores.likeliest[:] = -1
        return scores

    monkeypatch.setattr(recorded, "scores", broken)
    (output,) = run_all(core, _requests()[:1])["steer"]
    assert "not finite" in str(output.error)
    core.close()


def test_requests_without_arguments_reach_no_processor(monkeypatch):
    core = _build()

    def fail(*_):
        raise AssertionError("processors are applied")

    monkeypatch.setattr(type(core._runner._steps._processors), "apply", fail)
    plain = [engine_request("plain", PROMPT, max_tokens=NUM_TOKENS, extra_args={})]
    assert len(_tokens(run_all(core, plain))["plain"]) == NUM_TOKENS
    core.close()


def test_arguments_that_no_processor_takes_are_refused():
    core = _build(processors=())
    with pytest.raises(InvalidArgumentError, match=r"'steer'.*--logits-processors: none"):
        core.check(_requests()[0])
    core.check(_requests(CANDIDATES | {"plain": {}})[1])
    core.close()
    core = _build(processors=(*FLAG, "tests.support.logits_processors:Faulty"))
    for args, message in (
        ({"other": 1}, r"extra_args has 'other'.*Steer, .*CountPenalty"),
        ({"steer": 0}, "extra_args: steer is 0; it must be an integer above 0"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            core.check(changed(_requests()[0], extra_args=args))
    with pytest.raises(InternalError, match="extra_args"):
        core.check(changed(_requests()[0], extra_args={"fault": "raise in applies_to"}))
    core.close()


def test_an_unknown_processor_is_an_error_before_the_model_is_loaded():
    with pytest.raises(ConfigurationError, match="unknown name 'absent'"):
        build_core(tiny_checkpoint("llama") / "no such folder", "both", logits_processors="absent")


def test_the_offline_engine_takes_processors():
    llm = LLM(str(tiny_checkpoint("llama")), logits_processors=list(FLAG), dtype="float32")
    (result,) = llm.generate(
        [PROMPT], {"max_tokens": 6, "temperature": 0.0, "extra_args": {"steer": 7}}
    )
    llm.close()
    assert list(result.token_ids) == _expected()["steer"][:6]
