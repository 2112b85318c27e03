"""Engines with overlapped steps, as on a GPU, compared with `transformers`: greedy, float32."""

from functools import cache
from itertools import count

import pytest
import torch

import kernels
from engine.request import FinishReason
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import changed, engine_request
from tests.support.runner_kinds import use_kind

NUM_TOKENS = 20
LENGTHS = (1, 7, 16, 33, 50)
TIGHT = {"max_model_len": 72, "num_gpu_blocks_override": 12}
FEATURES = {
    "plain": {"async_scheduling": False},
    "overlap": {},
    "overlap, chunks": {"max_num_batched_tokens": 9},
    "overlap, recompute": {"preemption_mode": "recompute", **TIGHT},
    "overlap, swap": {"preemption_mode": "swap", "swap_space": 2**26, **TIGHT},
}


@cache
def _reference(variant, length):
    prompt = prompt_of(length, seed=length % 2)
    return reference_greedy(tiny_checkpoint(variant), prompt, NUM_TOKENS)


def _requests(lengths=LENGTHS, num_tokens=NUM_TOKENS, **fields):
    return [
        engine_request(
            request_id=str(length),
            prompt_token_ids=tuple(prompt_of(length, seed=length % 2)),
            max_tokens=num_tokens,
            **fields,
        )
        for length in lengths
    ]


def _build(variant="llama", **flags):
    defaults = {"block_size": 8, "num_gpu_blocks_override": 160, "async_scheduling": True}
    return build_core(tiny_checkpoint(variant), "both", **(defaults | flags))


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        ("device, graphs", "plain"),
        ("device, graphs", "overlap"),
        ("device, graphs", "overlap, recompute"),
        ("device, eager", "overlap, chunks"),
        ("device, eager", "overlap, swap"),
        *(
            pytest.param(kind, feature, marks=pytest.mark.slow)
            for kind, feature in (
                ("device, eager", "plain"),
                ("device, eager", "overlap"),
                ("device, eager", "overlap, recompute"),
                ("device, graphs", "overlap, chunks"),
                ("device, graphs", "overlap, swap"),
            )
        ),
    ],
)
def test_features_change_no_token(kind, feature, monkeypatch):
    use_kind(kind, monkeypatch)
    core = _build(**FEATURES[feature])
    for _ in range(2):  # the second run uses the prefix cache
        outputs = run_all(core, _requests())
        for length in LENGTHS:
            assert tokens_of(outputs[str(length)]) == _reference("llama", length)
    core.close()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("variant", ["gpt2", "mistral_sliding", "qwen2_alternating", "deepseek_v2"])
def test_model_families_on_graphs_equal_transformers(variant, monkeypatch):
    use_kind("device, graphs", monkeypatch)
    core = _build(variant, max_num_batched_tokens=24)
    outputs = run_all(core, _requests())
    for length in LENGTHS:
        assert tokens_of(outputs[str(length)]) == _reference(variant, length)
    core.close()


def test_graphs_give_the_right_tokens_for_every_number_of_rows(monkeypatch):
    """The number of rows falls from 13 to 1 as requests end: graphs of 1, 2, 4, 8 and 13 rows."""
    use_kind("device, graphs", monkeypatch)
    core = _build(max_num_seqs=13, max_num_batched_tokens=64, num_gpu_blocks_override=200)
    requests = [
        engine_request(
            request_id=str(index),
            prompt_token_ids=tuple(prompt_of(16, seed=0)),
            max_tokens=4 + index,
        )
        for index in range(14)
    ]
    outputs = run_all(core, requests)
    for index in range(14):
        assert tokens_of(outputs[str(index)]) == _reference("llama", 16)[: 4 + index]
    core.close()


_DRAWS = (
    {"temperature": 1.0, "seed": 2**63 + 5},
    {"temperature": 0.7, "top_k": 20, "seed": 6},
    {},
    {"temperature": 1.3, "top_p": 0.8, "seed": 7},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "seed": 8},
)


def _mixed_requests():
    """Returns requests with draws of all kinds, candidates of one prompt, and beams."""
    alone = [
        engine_request(
            request_id=str(index),
            prompt_token_ids=tuple(prompt_of(9 + index, seed=index)),
            max_tokens=NUM_TOKENS,
            **draw,
        )
        for index, draw in enumerate(_DRAWS)
    ]
    several = changed(alone[0], request_id="several", n=3)
    beams = changed(several, request_id="beams", beam_width=3)
    return [*alone, several, beams]


@pytest.mark.parametrize("kind", ["device, eager", "device, graphs"])
def test_draws_candidates_and_beams_equal_those_of_the_host(kind, monkeypatch):
    results = []
    for one in ("host", kind):
        with monkeypatch.context() as patched:
            use_kind(one, patched)
            core = _build(max_num_batched_tokens=24, max_num_seqs=11)
            outputs = run_all(core, _mixed_requests())
            results.append(
                {
                    name: [tokens_of(of_one, index) for index in range(3)]
                    for name, of_one in outputs.items()
                }
            )
            core.close()
    assert results[0] == results[1]
    assert all(len(tokens) == NUM_TOKENS for tokens in results[0]["several"])


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ["write_table_entries", "keep_drawn", "row_maxima"])
def test_no_step_follows_a_failed_launch(name, monkeypatch):
    """Such a step would write KV to blocks that only the device's tables have, not the host's.
    The requests of the failed step start over, and keep their tokens.
    """
    use_kind("device, eager", monkeypatch)
    core = _build(num_gpu_blocks_override=64)
    failing = _requests((13, 14), 40)
    for request in failing:
        core.scheduler.add(request)
    outputs = []
    for _ in range(9):
        core.run_step(outputs.extend)
    with monkeypatch.context() as broken:
        function = getattr(kernels, name)
        calls = count()

        def fail_once(*arguments, **named):
            if next(calls) == 0:
                raise torch.OutOfMemoryError("none is left")
            return function(*arguments, **named)

        broken.setattr(kernels, name, fail_once)
        for _ in range(120):
            core.run_step(outputs.extend)
    assert next(calls) > 0
    reasons = {output.request_id: output.finish_reason for output in outputs}
    assert reasons == dict.fromkeys(("13", "14"), FinishReason.LENGTH)
    for length in (13, 14):
        tokens = tokens_of([output for output in outputs if output.request_id == str(length)])
        assert tokens[:NUM_TOKENS] == _reference("llama", length)
    outputs = run_all(core, _requests((13, 14)))
    for length in (13, 14):
        assert tokens_of(outputs[str(length)]) == _reference("llama", length)
    core.close()


def test_the_connector_is_closed_although_the_runner_fails_to_close(monkeypatch):
    use_kind("device, eager", monkeypatch)
    core = _build(kv_connector="memory://closing")
    closed = []
    monkeypatch.setattr(core._connector, "close", lambda: closed.append(True))

    def fail():
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(core._runner, "close", fail)
    with pytest.raises(RuntimeError, match="lost"):
        core.close()
    assert closed == [True]
