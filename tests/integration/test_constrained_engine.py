"""Constrained output through engines: whole and split, resumed, preempted, overlapped."""

import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from baton.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from baton.common.request.request_spec import ReasoningMarks
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints import backends
from engine.loop.core import EngineCore
from engine.request import CandidateProgress, EngineOutput, EngineRequest, FinishReason
from tests.support.checkpoints import EOS_TOKEN_ID, prompt_of, tiny_checkpoint
from tests.support.constrained_requests import (
    check_text,
    expected_tokens,
    mixed_requests,
    text_of,
)
from tests.support.engine_work import has_work
from tests.support.real_engines import SplitRun, build_core, engine, run_all, tokens_of
from tests.support.requests import changed, engine_request
from tests.support.runner_kinds import use_kind

TIGHT = {"num_gpu_blocks_override": 24, "max_model_len": 128}
FEATURES = {
    "plain": {"enable_prefix_caching": False, "max_num_batched_tokens": 512},
    "chunks": {"max_num_batched_tokens": 13},
    "recompute": {"preemption_mode": "recompute", **TIGHT},
    "swap": {"preemption_mode": "swap", "swap_space": 2**26, **TIGHT},
    "overlap": {"async_scheduling": True},
    "overlap, recompute": {"async_scheduling": True, "preemption_mode": "recompute", **TIGHT},
    "llguidance": {"structured_outputs_backend": "llguidance"},
}


def check_outputs(
    request: EngineRequest,
    outputs: Sequence[EngineOutput],
    first: Sequence[int] = (),
    variant: str = "llama",
) -> None:
    """Checks a request's tokens against those that it draws without an engine.

    Args:
        request: the request.
        outputs: all of its outputs.
        first: the first token of each candidate, if prefill drew it.
        variant: the checkpoint.
    """
    params = request.spec.params
    path, constraint = tiny_checkpoint(variant), params.structured_outputs
    if params.is_ranked:
        drawn = [expected_tokens(path, request, index) for index in range(params.num_candidates)]
    for index in range(params.n):
        tokens = [*first[index : index + 1], *tokens_of(outputs, index)]
        (last,) = (o for o in outputs if o.index == index and o.finish_reason)
        assert last.error is None
        if params.is_ranked:
            assert tokens in drawn
        else:
            assert tokens == expected_tokens(path, request, index)
        if constraint is not None:
            assert last.finish_reason is FinishReason.STOP
            check_text(constraint, text_of(tokens))


@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_next"])
def test_hybrids(variant: str) -> None:
    """Tokens that a grammar forces, several in a step, change states as drawn ones do."""
    with engine(variant, max_num_batched_tokens=13, async_scheduling=True) as core:
        for _ in range(2):
            outputs = run_all(core, mixed_requests())
            for request in mixed_requests():
                check_outputs(request, outputs[request.spec.request_id], variant=variant)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("feature", FEATURES)
def test_features_change_no_token(feature: str) -> None:
    is_tight = "num_gpu_blocks_override" in FEATURES[feature]
    requests = [
        changed(request, request_id=f"{request.spec.request_id}/{copy}")
        for copy in range(3 if is_tight else 1)
        for request in mixed_requests()
    ]
    with engine(**FEATURES[feature]) as core:
        for _ in range(2):  # the second run uses the prefix cache and the cached grammars
            outputs = run_all(core, requests)
            for request in requests:
                check_outputs(request, outputs[request.spec.request_id])
        if is_tight:
            assert core.scheduler.load().num_preemptions > 0


@pytest.mark.parametrize("kind", ["device, eager", "device, graphs"])
def test_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kind(kind, monkeypatch)
    with engine(async_scheduling=True) as core:
        outputs = run_all(core, mixed_requests())
        for request in mixed_requests():
            check_outputs(request, outputs[request.spec.request_id])


@pytest.mark.parametrize("overlap", [False, True])
def test_two_tiers(overlap: bool, tmp_path) -> None:
    flags = {
        "block_size": 8,
        "num_gpu_blocks_override": 160,
        "max_num_seqs": 12,
        "kv_connector": f"memory://{tmp_path.name}",
        "kv_load_failure_policy": "fail",  # so that decode loads all of every prompt
        "async_scheduling": overlap,
    }
    path = tiny_checkpoint("llama")
    prefill, decode = (build_core(path, role, **flags) for role in ("prefill", "decode"))
    try:
        split = SplitRun(prefill, decode)
        split.run(mixed_requests())
        for request in mixed_requests():
            name = request.spec.request_id
            (first,) = (output for output in split.prefilled[name] if output.token_ids)
            is_ranked = request.spec.params.is_ranked
            given = () if is_ranked else first.token_ids
            check_outputs(request, split.outputs[name], given)
    finally:
        prefill.close()
        decode.close()


def test_a_request_resumes_at_each_of_its_tokens() -> None:
    (request,) = (each for each in mixed_requests() if each.spec.request_id == "0")
    with engine() as core:
        tokens = expected_tokens(tiny_checkpoint("llama"), request, 0)
        resumed = [
            changed(
                request,
                request_id=str(count),
                progress=(CandidateProgress(0, tuple(tokens[:count])),),
            )
            for count in range(1, len(tokens) + 1)
        ]
        outputs = run_all(core, resumed)
        for count in range(1, len(tokens) + 1):
            assert tokens[:count] + tokens_of(outputs[str(count)]) == tokens
            assert outputs[str(count)][-1].finish_reason is FinishReason.STOP


def test_forced_tokens_are_not_drawn_one_by_one_unless_they_are_scored() -> None:
    outputs = StructuredOutputs(regex="<a-long-forced-beginning>[0-9]<and-an-end>")
    request = engine_request("a", tuple(prompt_of(9)), max_tokens=50, structured_outputs=outputs)
    scored = changed(request, request_id="b", logprobs=0)
    with engine() as core:
        results = run_all(core, [request, scored])
        tokens = expected_tokens(tiny_checkpoint("llama"), request, 0)
        assert tokens_of(results["a"]) == tokens_of(results["b"]) == tokens
        assert len(results["a"]) == 2
        assert len(results["b"]) == len(tokens)
        assert all(len(output.logprobs) == 1 for output in results["b"])


def test_the_limit_of_tokens_cuts_forced_tokens() -> None:
    outputs = StructuredOutputs(regex="<a-long-forced-beginning>[0-9]{9}")
    requests = [
        engine_request(
            str(limit), tuple(prompt_of(9)), max_tokens=limit, structured_outputs=outputs
        )
        for limit in (1, 2, 5, 26)
    ]
    with engine() as core:
        results = run_all(core, requests)
    for request in requests:
        of_request = results[request.spec.request_id]
        assert of_request[-1].finish_reason is FinishReason.LENGTH
        tokens = tokens_of(of_request)
        assert tokens == expected_tokens(tiny_checkpoint("llama"), request, 0)
        assert len(tokens) == request.spec.params.max_tokens


def test_a_forced_stop_token_ends_the_text() -> None:
    outputs = StructuredOutputs(regex="<begin>[0-9]{9}")
    request = engine_request(
        "a",
        tuple(prompt_of(9)),
        max_tokens=40,
        structured_outputs=outputs,
        stop_token_ids=frozenset(b"g"),
    )
    with engine() as core:
        (*_, last) = outputs_of_a = run_all(core, [request])["a"]
        assert last.finish_reason is FinishReason.STOP
        assert text_of(tokens_of(outputs_of_a)) == "<beg"


def test_refused_grammars_end_their_own_requests() -> None:
    plain, *_ = mixed_requests()[1:]
    refused = [
        ("regex", "(a"),
        ("json", {"type": "object", "not": {}}),
        ("grammar", 'root ::= "a" root'),
    ]
    requests = [
        changed(plain, request_id=field, structured_outputs=StructuredOutputs(**{field: source}))
        for field, source in refused
    ]
    with engine() as core:
        outputs = run_all(core, [*requests, plain])
        for field, _ in refused:
            (output,) = outputs[field]
            assert isinstance(output.error, InvalidArgumentError)
            assert f"structured_outputs.{field}" in str(output.error)
        check_outputs(plain, outputs[plain.spec.request_id])


def test_rules_that_leave_no_allowed_token_end_their_own_request() -> None:
    plain, *_ = mixed_requests()[1:]
    banned = changed(
        plain,
        request_id="banned",
        structured_outputs=StructuredOutputs(regex="a+"),
        allowed_token_ids=[ord("b")],
    )
    with engine() as core:
        outputs = run_all(core, [banned, plain])
        (output,) = outputs["banned"]
        assert isinstance(output.error, InvalidArgumentError)
        check_outputs(plain, outputs[plain.spec.request_id])


@pytest.mark.parametrize(
    "rules",
    [
        {"allowed_token_ids": [*b"xyab", EOS_TOKEN_ID]},
        {"bad_words": ["c"], "bad_words_token_ids": ((ord("c"),),)},
        {"min_tokens": 8, "stop_token_ids": frozenset(b"c")},
    ],
    ids=["allowed tokens", "bad words", "least tokens"],
)
def test_forced_tokens_obey_other_rules(rules: dict[str, object]) -> None:
    choice = StructuredOutputs(choice=["xabcdefgh1", "yabcdefgh2"])
    request = engine_request("a", tuple(prompt_of(9)), structured_outputs=choice, **rules)
    with engine() as core:
        (*_, last) = run_all(core, [request])["a"]
        assert isinstance(last.error, InvalidArgumentError)


def test_a_library_that_fails_ends_one_request(monkeypatch) -> None:
    constrained, plain, *_ = mixed_requests()
    with engine() as core:
        received: list[EngineOutput] = [
            *core.scheduler.add(constrained),
            *core.scheduler.add(plain),
        ]
        core.run_step(received.extend)
        while not any(output.token_ids for output in received if output.request_id == "0"):
            core.wait()
            core.run_step(received.extend)
        (sequence,) = core.scheduler._groups["0"].branches

        def fail(token_id: int) -> bool:
            raise RuntimeError("std::bad_alloc")

        monkeypatch.setattr(sequence.guide._matcher, "_state", SimpleNamespace(accept=fail))
        while core.scheduler.num_unfinished:
            core.run_step(received.extend)
        own = [output for output in received if output.request_id == "0"]
        assert isinstance(own[-1].error, InternalError)
        others = [output for output in received if output.request_id != "0"]
        check_outputs(plain, others)


def test_without_a_backend_constrained_requests_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(backends, "installed_backends", lambda: ())
    constrained, plain, *_ = mixed_requests()
    with engine() as core:
        with pytest.raises(FailedPreconditionError, match="pip install xgrammar"):
            core.check(constrained)
        check_outputs(plain, run_all(core, [plain])[plain.spec.request_id])


def test_a_tokenizer_without_bytes_refuses_constrained_requests(monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise backends.ConfigurationError("structured outputs support other tokenizers")

    monkeypatch.setattr("engine.constraints.grammars.Vocabulary.of", refuse)
    constrained, plain, *_ = mixed_requests()
    with engine() as core:
        outputs = run_all(core, [constrained, plain])
        assert isinstance(outputs["0"][-1].error, FailedPreconditionError)
        check_outputs(plain, outputs[plain.spec.request_id])


class HeldGrammars:
    """A source of grammars whose futures the test ends."""

    def __init__(self) -> None:
        self.futures: list[Future] = []

    def compile(self, outputs: StructuredOutputs, owner: str = "") -> Future:
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def held(monkeypatch) -> Iterator[tuple[EngineCore, HeldGrammars]]:
    with engine() as core:
        grammars = HeldGrammars()
        monkeypatch.setattr(core.scheduler._guides, "_grammars", grammars)
        yield core, grammars


def test_a_request_that_waits_for_its_grammar_delays_no_other(held) -> None:
    core, grammars = held
    constrained, plain, *_ = mixed_requests()
    waiting = [changed(constrained, request_id=f"c{index}") for index in range(20)]
    for request in waiting:
        assert core.scheduler.add(request) == []
    assert core.scheduler.load().num_waiting == 20
    received: list[EngineOutput] = []
    received += core.scheduler.add(plain)
    while not any(output.is_last for output in received):
        core.run_step(received.extend)
    check_outputs(plain, received)
    core.run_step(received.extend)
    assert core.is_stalled
    for future in grammars.futures:
        future.set_exception(ResourceExhaustedError("too many grammars"))
    core.run_step(received.extend)
    errors = [output.error for output in received if output.error]
    assert len(errors) == 20
    assert not has_work(core)


def test_waiting_for_a_grammar_ends_with_an_abort_or_a_deadline(held) -> None:
    core, grammars = held
    constrained, *_ = mixed_requests()
    received: list[EngineOutput] = []
    received += core.scheduler.add(changed(constrained, request_id="a"))
    received += core.scheduler.add(changed(constrained, request_id="b", deadline=0.0))
    received += core.scheduler.abort(["a"])
    assert received[-1].finish_reason is FinishReason.ABORTED
    core.run_step(received.extend)
    assert isinstance(received[-1].error, DeadlineExceededError)
    assert not core.scheduler.num_unfinished
    assert all(future.cancelled() for future in grammars.futures)
    core.run_step(received.extend)
    assert len(received) == 2
    assert core.scheduler.load().num_waiting == 0


MARKS = ReasoningMarks(tuple(b"<t>"), tuple(b"</t>"))
ROLES = ("prefill", "decode")


DIGITS = StructuredOutputs(regex="[0-9]{4}")


def reasoning_request(request_id: str, prompt: bytes, **fields: object) -> EngineRequest:
    return engine_request(
        request_id,
        (*prompt_of(12), *prompt),
        max_tokens=40,
        temperature=1.0,
        seed=3,
        stop_token_ids=frozenset([EOS_TOKEN_ID]),
        reasoning=MARKS,
        **fields,
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_reasoning_parts_end_at_their_budgets(overlap: bool) -> None:
    requests = [
        reasoning_request(
            f"{budget}, {constraint}",
            b"<t>",
            thinking_token_budget=budget,
            structured_outputs=constraint,
        )
        for budget, constraint in itertools.product((0, 1, 7), (None, DIGITS))
    ]
    free = changed(requests[0], request_id="free", thinking_token_budget=40)
    with engine(async_scheduling=overlap) as core:
        outputs = run_all(core, [*requests, free])
    free_bytes = bytes(t % 256 for t in tokens_of(outputs["free"]))
    for request in requests:
        params = request.spec.params
        text = bytes(t % 256 for t in tokens_of(outputs[request.spec.request_id]))
        reasoning, mark, answer = text.partition(b"</t>")
        assert (reasoning, mark) == (free_bytes[: params.thinking_token_budget], b"</t>")
        if params.structured_outputs is not None:
            assert re.fullmatch(rb"[0-9]{4}", answer)
        else:
            assert len(text) == 40


def test_without_a_reasoning_part_the_constraint_begins_at_once() -> None:
    requests = [
        reasoning_request(
            prompt.decode(), prompt, structured_outputs=DIGITS, logit_bias={ord("<"): -100.0}
        )
        for prompt in (b"", b"<t></t>", b"</t>x")
    ]
    with engine() as core:
        outputs = run_all(core, requests)
    for of_request in outputs.values():
        assert re.fullmatch(rb"[0-9]{4}", bytes(tokens_of(of_request)))


def test_a_generated_start_mark_opens_the_reasoning_part() -> None:
    request = reasoning_request(
        "a",
        b"",
        thinking_token_budget=5,
        structured_outputs=DIGITS,
        logit_bias={ord("<"): 100.0, ord("t"): 60.0, ord(">"): 60.0, ord("x"): 20.0},
    )
    with engine() as core:
        tokens = bytes(t % 256 for t in tokens_of(run_all(core, [request])["a"]))
        assert re.fullmatch(rb"<t>.{4,5}</t>[0-9]{4}", tokens, re.DOTALL)


ENDS_AT_ONCE = {EOS_TOKEN_ID: 100.0}


def ending_requests() -> list[EngineRequest]:
    """Requests within a reasoning part to a model that ends every text as soon as it may."""
    options: dict[str, dict[str, object]] = {
        "plain": {},
        "scored": {"logprobs": 1},
        "two": {"n": 2},
        "budget": {"thinking_token_budget": 20},
        "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    }
    return [
        reasoning_request(
            name, b"<t>", structured_outputs=DIGITS, logit_bias=ENDS_AT_ONCE, **fields
        )
        for name, fields in options.items()
    ]


def check_ended(request: EngineRequest, outputs: Sequence[EngineOutput]) -> None:
    """Checks that each candidate closes its reasoning part and has its form."""
    for index in range(request.spec.params.n):
        tokens = tokens_of(outputs, index)
        assert re.fullmatch(rb"</t>[0-9]{4}", bytes(token for token in tokens if token < 256))
        (last,) = (o for o in outputs if o.index == index and o.finish_reason)
        assert last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("overlap", [False, True])
def test_a_text_does_not_end_within_reasoning_while_a_form_is_owed(overlap: bool) -> None:
    free = reasoning_request("free", b"<t>", logit_bias=ENDS_AT_ONCE, thinking_token_budget=9)
    optional = changed(
        free, request_id="optional", structured_outputs=StructuredOutputs(regex="a*")
    )
    with engine(async_scheduling=overlap) as core:
        outputs = run_all(core, [*ending_requests(), free, optional])
    for request in ending_requests():
        check_ended(request, outputs[request.spec.request_id])
    assert tokens_of(outputs["free"]) == tokens_of(outputs["optional"]) == [EOS_TOKEN_ID]


def test_a_text_does_not_end_within_reasoning_on_another_tier(tmp_path) -> None:
    flags = {"kv_connector": f"memory://{tmp_path.name}", "block_size": 8}
    path = tiny_checkpoint("llama")
    cores = [build_core(path, role, num_gpu_blocks_override=160, **flags) for role in ROLES]
    try:
        split = SplitRun(*cores)
        split.run(ending_requests())
        for request in ending_requests():
            outputs = split.outputs[request.spec.request_id]
            (first,) = (o for o in split.prefilled[request.spec.request_id] if o.token_ids)
            assert set(first.token_ids) == {ord("<")}
            rest = bytes(token for token in tokens_of(outputs) if token < 256)
            assert re.fullmatch(rb"/t>[0-9]{4}", rest)
    finally:
        for core in cores:
            core.close()


def test_a_guessed_end_within_reasoning_is_none() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    request = reasoning_request("a", b"ab<t>", structured_outputs=DIGITS, logit_bias=ENDS_AT_ONCE)
    prompt = (*b"xy", ord(">"), EOS_TOKEN_ID, ord("<"), ord("/"), *request.spec.prompt_token_ids)
    with engine(speculative_config=ngram) as core:
        request = changed(request, prompt_token_ids=prompt)
        check_ended(request, run_all(core, [request])["a"])


WHITESPACE = dict.fromkeys(map(ord, " \n\t\r"), 100.0)
ONE_INTEGER = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_a_model_that_prefers_whitespace_ends_its_json(backend: str) -> None:
    forms = {
        "any": StructuredOutputs(json=ONE_INTEGER),
        "compact": StructuredOutputs(json=ONE_INTEGER, disable_any_whitespace=True),
    }
    requests = [
        engine_request(
            name,
            tuple(prompt_of(5)),
            structured_outputs=form,
            logit_bias=WHITESPACE,
            max_tokens=90,
            stop_token_ids=frozenset([EOS_TOKEN_ID]),
        )
        for name, form in forms.items()
    ]
    with engine(structured_outputs_backend=backend) as core:
        outputs = run_all(core, requests)
    texts = {name: text_of(tokens_of(outputs[name], 0)) for name in forms}
    assert texts["compact"] == '{"a":1}'
    assert "".join(texts["any"].split()) == '{"a":1}'
    assert len(texts["any"]) > 20
