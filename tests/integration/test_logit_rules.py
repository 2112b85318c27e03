"""Logit rules and min-p in engines, compared with `transformers` and with an oracle: float32.

Every engine computes requests with many rules together, so that a rule that reached another row
would change a token.
"""

from functools import cache

import pytest

from baton.common.errors import InternalError, InvalidArgumentError
from engine.request import FinishReason
from engine.runtime.forward import recorded_steps
from tests.support.checkpoints import FAMILIES, prompt_of, reference_greedy, tiny_checkpoint
from tests.support.engine_work import has_work
from tests.support.real_engines import SplitRun, build_core, run_all, tokens_of
from tests.support.requests import changed, engine_request
from tests.support.ruled_generation import by_oracle, by_transformers, generate
from tests.support.runner_kinds import use_kind

pytestmark = pytest.mark.sampled(one_in=2)

NUM_TOKENS = 16
PROMPT_LENGTH = 21
DRAWN = {"temperature": 1.2, "seed": 5}
TIGHT = {"max_model_len": 40, "num_gpu_blocks_override": 13, "max_num_seqs": 16}
SWAP = {"preemption_mode": "swap", "swap_space": 2**26}
FEATURES = {
    "plain": {"async_scheduling": False},
    "chunks": {"async_scheduling": False, "max_num_batched_tokens": 7},
    "overlap": {},
    "overlap, chunks": {"max_num_batched_tokens": 9},
    "recompute": {"async_scheduling": False, "preemption_mode": "recompute", **TIGHT},
    "overlap, recompute": {"preemption_mode": "recompute", **TIGHT},
    "swap": {"async_scheduling": False, **SWAP, **TIGHT},
    "overlap, swap": {**SWAP, **TIGHT},
}


@cache
def _plain(variant):
    """Returns the prompt, and the greedy tokens without rules."""
    prompt = tuple(prompt_of(PROMPT_LENGTH, seed=3))
    return prompt, reference_greedy(tiny_checkpoint(variant), prompt, NUM_TOKENS)


def _rules_of_transformers(variant):
    """Returns parameters by name, for which `transformers` has processors.

    They concern the tokens that the model generates without them, so that they change these.
    """
    _, plain = _plain(variant)
    words = ((plain[0], plain[1]), (plain[3],), (*plain[:4], plain[4]), (plain[9], 7))
    stops = frozenset((*plain[1:3], 257))
    return {
        "repetition": {"repetition_penalty": 1.4},
        "a reward of repetition": {"repetition_penalty": 0.7},
        "biases": {"logit_bias": {plain[0]: -9.0, plain[5]: 1.5, 3: 1.0}},
        "bad words": {"bad_words_token_ids": words},
        "least tokens": {"min_tokens": 5, "stop_token_ids": stops},
        "all": {
            "repetition_penalty": 1.2,
            "logit_bias": {plain[0]: -3.0, 9: 0.5},
            "bad_words_token_ids": words,
            "min_tokens": 7,
            "stop_token_ids": stops,
        },
    }


def _other_rules(variant):
    _, plain = _plain(variant)
    return {
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": 0.8},
        "rewards": {"presence_penalty": -0.5, "frequency_penalty": -0.3},
        "allowed": {"allowed_token_ids": tuple(range(1, 257, 3))},
        "several": {
            "presence_penalty": 0.7,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.1,
            "allowed_token_ids": tuple(range(0, 250, 2)),
            "logit_bias": {8: 2.0, plain[2]: -4.0},
        },
        "drawn": {**DRAWN, "frequency_penalty": 1.0, "top_k": 30},
        "min-p": {**DRAWN, "min_p": 0.1},
        "min-p, rules": {**DRAWN, "min_p": 0.05, "top_p": 0.95, "repetition_penalty": 1.3},
        "no rules": {},
    }


def _requests(variant, rules, *, are_shifted=False):
    prompt, _ = _plain(variant)
    return [
        engine_request(name, prompt[index % 4 * are_shifted :], max_tokens=NUM_TOKENS, **params)
        for index, (name, params) in enumerate(rules.items())
    ]


def _all_requests(variant):
    """Returns requests with all rules, whose prompts differ in length."""
    rules = _rules_of_transformers(variant) | _other_rules(variant)
    return _requests(variant, rules, are_shifted=True)


@cache
def _expected(variant):
    """Returns the oracle's tokens by request."""
    path = tiny_checkpoint(variant)
    return {
        request.spec.request_id: generate(path, request, by_oracle(request))
        for request in _all_requests(variant)
    }


def _build(variant="llama", role="both", **flags):
    defaults = {"block_size": 8, "num_gpu_blocks_override": 160, "async_scheduling": True}
    return build_core(tiny_checkpoint(variant), role, **({**defaults, "max_num_seqs": 16} | flags))


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(variant):
    requests = _requests(variant, _rules_of_transformers(variant))
    core = _build(variant)
    outputs = run_all(core, requests)
    core.close()
    num_changed = 0
    for request in requests:
        expected = generate(tiny_checkpoint(variant), request, by_transformers(request))
        name = request.spec.request_id
        assert tokens_of(outputs[name]) == expected, name
        num_changed += expected != _plain(variant)[1]
    assert num_changed >= len(requests) - 2  # some models seldom, or always, repeat themselves


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("variant", FAMILIES)
def test_tokens_equal_those_of_the_oracle(variant):
    core = _build(variant, max_num_batched_tokens=24)
    outputs = run_all(core, _all_requests(variant))
    core.close()
    assert {name: tokens_of(of_one) for name, of_one in outputs.items()} == _expected(variant)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        *(("host", feature) for feature in FEATURES),
        ("device, eager", "overlap, recompute"),
        ("device, graphs", "overlap, chunks"),
        ("device, graphs", "overlap, swap"),
    ],
)
def test_features_change_no_token(kind, feature, monkeypatch):
    use_kind(kind, monkeypatch)
    core = _build(**FEATURES[feature])
    for _ in range(2):  # the second run uses the prefix cache
        outputs = run_all(core, _all_requests("llama"))
        assert {name: tokens_of(of_one) for name, of_one in outputs.items()} == _expected("llama")
    if "recompute" in feature or "swap" in feature:
        assert core.scheduler.load().num_preemptions > 0
    core.close()


def test_steps_that_are_not_recorded_change_no_token(monkeypatch):
    monkeypatch.setattr(recorded_steps, "_MAX_TOKENS", 0)
    core = _build()
    outputs = run_all(core, _all_requests("llama"))
    core.close()
    assert {name: tokens_of(of_one) for name, of_one in outputs.items()} == _expected("llama")


@pytest.mark.parametrize("overlap", [False, True])
def test_split_equals_whole(overlap, tmp_path):
    """The rules and the history go from prefill to decode, which draws from them on."""
    flags = {"kv_connector": f"memory://{tmp_path.name}", "async_scheduling": overlap}
    prefill, decode = (_build(role=role, **flags) for role in ("prefill", "decode"))
    split = SplitRun(prefill, decode)
    requests = _all_requests("llama")
    short = _short_request()  # is first, so that no other prompt leaves it a part of a step
    candidates = changed(requests[0], request_id="candidates", n=3, **DRAWN)
    try:
        split.run([short, *requests, candidates, *_requests_without_tokens()])
    finally:
        prefill.close()
        decode.close()
    for name, expected in _expected("llama").items():
        first = split.handed[name].progress[0].output_token_ids
        assert [*first, *tokens_of(split.outputs[name])] == expected, name
    for request in (candidates, short):
        progress = split.handed[request.spec.request_id].progress
        _check_candidates(request, progress, split.outputs)
    assert "at once" not in split.handed
    for name in ("at once", "later"):
        _check_refused(split.outputs[name])


def _short_request():
    """Returns a request whose prompt fits in one chunk, and whose rules change its first token."""
    prompt = _plain("llama")[0][:9]
    (first,) = reference_greedy(tiny_checkpoint("llama"), prompt, 1)
    bans = {"logit_bias": {first: -100.0}}
    return engine_request("short", prompt, max_tokens=NUM_TOKENS, **bans)


def _check_candidates(request, progress, outputs):
    for index in range(request.spec.params.n):
        first = progress[index].output_token_ids if progress else ()
        expected = generate(tiny_checkpoint("llama"), request, by_oracle(request, index))
        of_request = outputs[request.spec.request_id]
        assert [*first, *tokens_of(of_request, index)] == expected, index


@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        ("host", "plain"),
        ("host", "recompute"),
        ("host", "overlap, chunks"),
        ("host", "overlap, swap"),
        ("device, graphs", "overlap, recompute"),
    ],
)
def test_each_candidate_has_its_own_history(kind, feature, monkeypatch):
    use_kind(kind, monkeypatch)
    prompt, _ = _plain("llama")
    first = engine_request(
        "0",
        prompt,
        max_tokens=NUM_TOKENS,
        n=3,
        **DRAWN,
        frequency_penalty=1.5,
        repetition_penalty=1.3,
        min_p=0.02,
    )
    requests = [first, changed(first, request_id="1", seed=6, presence_penalty=2.0)]
    core = _build(**FEATURES[feature])
    outputs = run_all(core, requests)
    core.close()
    for request in requests:
        _check_candidates(request, (), outputs)


def test_rows_are_used_again_with_other_rules_and_without():
    core = _build(max_num_seqs=1)
    requests = _all_requests("llama")
    for ordered in (requests, requests[::-1]):
        outputs = run_all(core, ordered)
        assert {name: tokens_of(of_one) for name, of_one in outputs.items()} == _expected("llama")
    core.close()


def _requests_without_tokens():
    """Returns requests whose rules leave no first token, and none after two tokens."""
    prompt, _ = _plain("llama")
    at_once = engine_request(
        "at once",
        prompt,
        max_tokens=NUM_TOKENS,
        allowed_token_ids=(4, 5),
        bad_words_token_ids=((prompt[-1], 4), (*prompt[-2:], 5)),
    )
    # One of two tokens is allowed; each must not follow itself or the other one twice.
    later = changed(
        at_once,
        request_id="later",
        bad_words_token_ids=((4, 4), (5, 5), (4, 5, 4), (5, 4, 5)),
    )
    return at_once, later


def _check_refused(outputs):
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert isinstance(outputs[-1].error, InvalidArgumentError)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["host", "device, eager"])
def test_a_request_whose_rules_leave_no_token_ends_alone(kind, overlap, monkeypatch):
    """It ends when that happens: at its first token, or later. Its KV may be used again."""
    use_kind(kind, monkeypatch)
    core = _build(async_scheduling=overlap)
    outputs = run_all(core, [*_requests_without_tokens(), *_all_requests("llama")])
    for name, num_tokens in (("at once", 0), ("later", 2)):
        _check_refused(outputs[name])
        assert len(tokens_of(outputs[name])) == num_tokens
    del outputs["at once"], outputs["later"]
    assert {name: tokens_of(of_one) for name, of_one in outputs.items()} == _expected("llama")
    again = engine_request("again", _plain("llama")[0], max_tokens=2)
    assert run_all(core, [again])["again"][0].cached_tokens == PROMPT_LENGTH // 8 * 8
    core.close()


@pytest.mark.parametrize("kind", ["host", "device, eager"])
def test_requests_without_rules_need_no_table_and_no_kernel(kind, monkeypatch):
    use_kind(kind, monkeypatch)
    core = _build()
    rules = core._runner._steps._rules

    def fail(*_, **__):
        raise AssertionError("rules are applied")

    monkeypatch.setattr(type(rules), "_apply", fail)
    plain = engine_request("plain", _plain("llama")[0], max_tokens=NUM_TOKENS, **DRAWN, min_p=0.1)
    assert len(tokens_of(run_all(core, [plain])["plain"])) == NUM_TOKENS
    assert rules._table is None
    core.close()


@pytest.mark.parametrize("has_table", [False, True])
def test_a_failed_step_leaves_valid_rules_to_the_step_after_it(has_table, monkeypatch):
    """The step after it has been submitted already, and decodes the row whose rules it lacks."""
    core = _build(max_num_batched_tokens=64)
    prompt, tokens = _plain("llama")
    several = {"repetition_penalty": 1.3, "bad_words_token_ids": ((tokens[0], tokens[1]),)}
    ruled = engine_request("ruled", prompt, max_tokens=NUM_TOKENS, **several)
    if has_table:
        run_all(core, [changed(ruled, request_id="before")])
    recorded = core._runner._steps._recorded
    compute_scores = recorded.scores

    def fail_once(on_layer):
        monkeypatch.setattr(recorded, "scores", compute_scores)
        raise RuntimeError("as the test asked")

    monkeypatch.setattr(recorded, "scores", fail_once)
    outputs = {"ruled": [], "plain": []}

    def collect(step_outputs):
        for output in step_outputs:
            outputs[output.request_id].append(output)

    core.scheduler.add(ruled)
    core.run_step(collect)  # submits the step that fails
    core.scheduler.add(engine_request("plain", prompt, max_tokens=NUM_TOKENS))
    core.run_step(collect)
    while has_work(core):
        core.wait()
        core.run_step(collect)
    assert isinstance(outputs["ruled"][-1].error, InternalError)
    assert tokens_of(outputs["plain"]) == tokens
    assert tokens_of(run_all(core, [ruled])["ruled"]) == generate(
        tiny_checkpoint("llama"), ruled, by_oracle(ruled)
    )
    core.close()
