"""`ModelRunner.execute` on hand-made batches, compared with `transformers`."""

import math
from functools import cache, lru_cache

import pytest
import torch

import kernels
from baton.common.errors import ConfigurationError
from engine.batch import INVALID_TOKEN, NO_LOGPROBS, ScheduledBatch, TableUpdate
from engine.config import EngineConfig
from engine.runtime.launch.launcher import Launcher
from tests.support import runner_kinds
from tests.support.checkpoints import VARIANTS, prompt_of, reference_greedy, tiny_checkpoint
from tests.support.draw_params import draw_params
from tests.support.driven_requests import (
    GREEDY,
    DrivenRequest,
    generate,
    run_step,
    scattered_tables,
)
from tests.support.pairs import pairs
from tests.support.runner_kinds import current_kind, make_runner, use_kind

_NUM_TOKENS = 8
_NUM_BLOCKS = 160
KINDS = ("host", "device, eager", "device, graphs")


def _config(variant="llama", **flags):
    defaults = {"dtype": "float32", "device": "cpu", "max_model_len": 256}
    return EngineConfig(model=str(tiny_checkpoint(variant)), **{**defaults, **flags})


def slow_unless_host(cases):
    """Returns a test's parameters, of which cases on other kinds of runners are marked slow."""
    return [
        pytest.param(*case, marks=() if case[0] == "host" else pytest.mark.slow) for case in cases
    ]


@pytest.fixture(autouse=True, params=slow_unless_host([(kind,) for kind in KINDS]))
def _kind(request, monkeypatch):
    use_kind(request.param, monkeypatch)


@lru_cache(maxsize=4)  # one with stand-ins for graphs has some 400 MB
def _runner_of(kind, variant, block_size, dtype):
    flags = {"block_size": block_size, "dtype": dtype, "num_gpu_blocks_override": _NUM_BLOCKS}
    return make_runner(_config(variant, **flags))


def _runner(variant="llama", block_size=16, dtype="float32"):
    return _runner_of(current_kind(), variant, block_size, dtype)


@cache
def _reference(variant, prompt):
    return reference_greedy(tiny_checkpoint(variant), prompt, _NUM_TOKENS)


def _tables(runner, num_sequences, blocks_each=7):
    num_layer_groups = len(runner.info.windows)
    return scattered_tables(num_sequences, blocks_each, num_layer_groups, _NUM_BLOCKS)


def _request(runner, prompt, **fields):
    return DrivenRequest(prompt, 0, _tables(runner, 1)[0], **fields)


def _generate(runner, requests):
    return generate(runner, requests, _NUM_TOKENS)


def _prompts(block_size):
    lengths = (1, block_size - 1, block_size, block_size + 1, 5 * block_size + 3)
    return [tuple(prompt_of(length, seed=length)) for length in lengths]


@pytest.mark.parametrize(
    ("_kind", "variant", "block_size"),
    slow_unless_host(pairs(KINDS, sorted(VARIANTS), (8, 16))),
    indirect=["_kind"],
)
def test_a_mixed_batch_of_whole_and_chunked_prompts_equals_transformers(variant, block_size):
    prompts, runner = _prompts(block_size), _runner(variant, block_size)
    requests = [
        DrivenRequest(prompt, row, tables, chunk_size=(10**6, 7)[row % 2], first_step=2 * row)
        for row, (prompt, tables) in enumerate(
            zip(prompts, _tables(runner, len(prompts)), strict=True)
        )
    ]
    expected = [_reference(variant, prompt) for prompt in prompts]
    assert _generate(runner, requests) == expected


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 17, 83])
def test_every_chunk_size_gives_the_same_tokens(chunk_size):
    prompt = tuple(prompt_of(83, seed=83))
    request = _request(_runner(), prompt, chunk_size=chunk_size)
    assert _generate(_runner(), [request]) == [_reference("llama", prompt)]


@pytest.mark.parametrize(
    ("_kind", "variant", "dtype"),
    slow_unless_host(pairs(KINDS, ("llama", "gpt2", "opt"), ("bfloat16", "float16"))),
    indirect=["_kind"],
)
def test_half_precision_draws_the_first_token_of_float32(variant, dtype):
    prompt = tuple(prompt_of(37, seed=3))
    runner = _runner(variant, dtype=dtype)
    assert runner.kv_pool.dtype is getattr(torch, dtype)
    assert runner.info.layout.dtype == dtype
    (drawn,) = _generate(runner, [_request(runner, prompt)])
    assert drawn[0] == _reference(variant, prompt)[0]


def test_decoding_from_copied_blocks_gives_the_same_tokens():
    prompt = tuple(prompt_of(37, seed=1))
    runner = _runner()
    (original,), (copy,) = _tables(runner, 2)
    request = DrivenRequest(prompt, 0, [original])
    generate(runner, [request], num_tokens=3)
    output = runner.execute(
        ScheduledBatch(
            9,
            decode_rows=(0,),
            table_updates=(TableUpdate(0, 0, 0, copy),),
            block_copies=tuple(zip(original[:3], copy[:3], strict=True)),
        )
    )
    runner.kv_pool[list(original)] = 0
    assert [*output.decoded, *runner.execute(ScheduledBatch(10, decode_rows=(0,))).decoded] == (
        _reference("llama", prompt)[3:5]
    )


def test_seeded_draws_do_not_depend_on_the_batch():
    draws = [draw_params(1.0, 0, 1.0, 5), draw_params(0.8, 20, 0.9, 2**63), GREEDY]
    prompts = [tuple(prompt_of(length, seed=length)) for length in (20, 33, 5)]
    runner = _runner()
    cases = list(zip(prompts, range(3), _tables(runner, 3), draws, strict=True))
    alone = [
        _generate(runner, [DrivenRequest(prompt, row, tables, draw=draw)])[0]
        for prompt, row, tables, draw in cases
    ]
    together = [
        DrivenRequest(prompt, 2 - row, tables, chunk_size=6, draw=draw)
        for prompt, row, tables, draw in cases
    ]
    assert _generate(runner, together) == alone
    assert alone[0] != _reference("llama", prompts[0])


def test_poisoned_kv_spoils_only_the_sequence_that_reads_it():
    runner = make_runner(_config(num_gpu_blocks_override=16))
    prompts = [tuple(prompt_of(20, seed=seed)) for seed in (1, 2)]
    requests = [
        DrivenRequest(prompt, row, [table], wants_logprobs=True)
        for prompt, row, table in zip(prompts, (0, 1), ((1, 2, 3), (4, 5, 6)), strict=True)
    ]
    generate(runner, requests, num_tokens=1)
    runner.kv_pool[4] = math.nan
    runner.kv_pool[9:] = math.nan
    # The scheduler may have submitted more steps before it reads the first one's output.
    run_step(runner, 2, requests)
    run_step(runner, 3, requests)
    assert requests[0].drawn == _reference("llama", prompts[0])[:3]
    assert requests[1].drawn[1:] == [INVALID_TOKEN] * 2
    assert [math.isnan(logprob) for logprob in requests[1].logprobs] == [False, True, True]


def test_the_model_info_comes_from_flags_and_checkpoint():
    runner = make_runner(_config(block_size=8, max_model_len=100, max_num_seqs=3))
    assert runner.info.max_model_len == 100
    assert runner.info.vocab_size == 259
    assert runner.info.layout.block_shape == (3, 2, 2, 8, 16)
    assert runner.num_blocks == 3 * 13
    assert runner.kv_pool.shape == (39, *runner.info.layout.block_shape)
    assert (runner.kv_pool == 0).all()


def test_the_default_maximum_length_is_the_models():
    runner = make_runner(_config(max_model_len=None, max_num_seqs=2))
    assert runner.info.max_model_len == 2048


def test_the_number_of_threads_is_set():
    before = kernels.num_threads()
    try:
        make_runner(_config(num_threads=before + 1))
        assert kernels.num_threads() == before + 1
    finally:
        kernels.set_num_threads(before)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_model_len": 2049}, "--max-model-len is 2049; the model takes at most 2048"),
        ({"num_gpu_blocks_override": 15}, "set --num-gpu-blocks-override 16"),
        ({"device": "abacus"}, "--device is 'abacus'; this machine has auto, cpu"),
    ],
)
def test_bad_flags_are_reported_at_start(flags, message):
    with pytest.raises(ConfigurationError, match=message):
        make_runner(_config(**flags))


def test_a_length_that_no_block_table_has_room_for_needs_the_flag(monkeypatch):
    monkeypatch.setattr("engine.runtime.launch.launcher._MAX_MODEL_LEN", 1000)
    with pytest.raises(ConfigurationError, match=r"takes 2048 tokens, .* to at most 1000"):
        make_runner(_config(max_model_len=None))
    make_runner(_config(max_model_len=1000)).close()


def test_only_the_profile_of_memory_has_rules_and_log_probabilities(monkeypatch):
    """They would distort the measured time of a prompt token."""
    steps, batches = runner_kinds.KINDS[current_kind()].steps, []
    launch = steps.launch

    def launch_recorded(self, batch):
        batches.append(batch)
        return launch(self, batch)

    monkeypatch.setattr(steps, "launch", launch_recorded)
    flags = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 16}
    runner = make_runner(_config(**flags))
    num_tokens = [batch.num_tokens for batch in batches[:2]]
    assert num_tokens == [16, 32]  # a warm-up, and the measured step
    of_all = [chunk for batch in batches for chunk in batch.chunks]
    assert all(chunk.num_logprobs == NO_LOGPROBS for chunk in of_all)
    assert not any(chunk.prompt_targets or chunk.rules for chunk in of_all)
    batches.clear()
    trials = Launcher(_config(**flags), progress=False, ranks=None).trials()
    assert trials.run(64, 8, uses_all_memory=True) == 64
    assert [len(batch.chunks) for batch in batches] == [8, 8]
    assert all(chunk.rules and chunk.prompt_targets for chunk in batches[0].chunks)
    assert runner._steps._rules._table is None
    runner.close()
