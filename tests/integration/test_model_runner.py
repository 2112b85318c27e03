"""`ModelRunner.execute`, driven by hand, against `transformers`."""

import math
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

from baton.errors import ConfigurationError
from engine.batch import DrawParams, ScheduledBatch, ScheduledSequence
from engine.config import EngineConfig
from engine.runtime.model_runner import ModelRunner
from tests.support.checkpoints import VARIANTS, prompt_of, reference_greedy, tiny_checkpoint

_NUM_TOKENS = 8
_GREEDY = DrawParams(0.0, 0, 1.0, 0)


def _config(variant="llama", **flags):
    defaults = {"dtype": "float32", "device": "cpu", "max_model_len": 256}
    return EngineConfig(model=str(tiny_checkpoint(variant)), **{**defaults, **flags})


@cache
def _runner(variant="llama", block_size=16, dtype="float32"):
    config = _config(variant, block_size=block_size, dtype=dtype, num_gpu_blocks_override=64)
    return ModelRunner(config, progress=False)


@cache
def _reference(variant, prompt):
    return reference_greedy(tiny_checkpoint(variant), prompt, _NUM_TOKENS)


@dataclass
class _Request:
    """A prompt being generated in scattered blocks, a chunk of it per step."""

    prompt: tuple[int, ...]
    table: tuple[int, ...]
    chunk_size: int = 10**6
    first_step: int = 0
    draw: DrawParams = _GREEDY
    num_computed: int = 0
    drawn: list = field(default_factory=list)

    def share(self):
        token_ids = (*self.prompt, *self.drawn)[self.num_computed :][: self.chunk_size]
        at_end = self.num_computed + len(token_ids) == len(self.prompt) + len(self.drawn)
        draw = self.draw if at_end else None
        return ScheduledSequence("r", token_ids, self.num_computed, self.table, draw)


def _generate(runner, requests, num_tokens=_NUM_TOKENS):
    """Steps until every request has drawn `num_tokens`; joins each at its first step."""
    step = 0
    while any(len(request.drawn) < num_tokens for request in requests):
        running = [
            request
            for request in requests
            if request.first_step <= step and len(request.drawn) < num_tokens
        ]
        shares = tuple(request.share() for request in running)
        if shares:
            output = runner.execute(ScheduledBatch(step, shares))
            assert output.step == step
            for request, share, token_id in zip(running, shares, output.token_ids, strict=True):
                assert (token_id is None) == (share.draw is None)
                request.num_computed += share.num_tokens
                request.drawn += [] if token_id is None else [token_id]
        step += 1
    return [request.drawn for request in requests]


def _tables(num_tables, blocks_each=8, num_blocks=64, seed=0):
    """Disjoint block tables, scattered over the pool."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    return [tuple(order[i * blocks_each : (i + 1) * blocks_each]) for i in range(num_tables)]


def _prompts(block_size):
    lengths = (1, block_size - 1, block_size, block_size + 1, 5 * block_size + 3)
    return [tuple(prompt_of(length, seed=length)) for length in lengths]


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_mixed_batch_of_whole_and_chunked_prompts_equals_transformers(variant, block_size):
    prompts = _prompts(block_size)
    requests = [
        _Request(prompt, table, chunk_size=(10**6, 7)[index % 2], first_step=2 * index)
        for index, (prompt, table) in enumerate(
            zip(prompts * 1, _tables(len(prompts), blocks_each=9), strict=True)
        )
    ]
    expected = [_reference(variant, prompt) for prompt in prompts]
    assert _generate(_runner(variant, block_size), requests) == expected


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 17, 83])
def test_every_chunk_size_gives_the_same_tokens(chunk_size):
    prompt = tuple(prompt_of(83, seed=83))
    request = _Request(prompt, _tables(1)[0], chunk_size=chunk_size)
    assert _generate(_runner(), [request]) == [_reference("llama", prompt)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["llama", "gpt2", "opt"])
def test_half_precision_runs_and_keeps_to_float32s_choice(variant, dtype):
    prompt = tuple(prompt_of(37, seed=3))
    runner = _runner(variant, dtype=dtype)
    assert runner.kv_pool.dtype is getattr(torch, dtype)
    assert runner.info.layout.dtype == dtype
    (drawn,) = _generate(runner, [_Request(prompt, _tables(1)[0])])
    assert drawn[0] == _reference(variant, prompt)[0]


def test_copied_blocks_are_as_good_as_the_originals():
    prompt = tuple(prompt_of(37, seed=1))
    original, copy = _tables(2)
    request = _Request(prompt, original)
    runner = _runner()
    _generate(runner, [request], num_tokens=3)
    request.table = copy
    pairs = tuple(zip(original[:3], copy[:3], strict=True))
    output = runner.execute(ScheduledBatch(9, (request.share(),), pairs))
    assert list(output.token_ids) == _reference("llama", prompt)[3:4]


def test_seeded_draws_do_not_depend_on_the_batch():
    draws = [DrawParams(1.0, 0, 1.0, 5), DrawParams(0.8, 20, 0.9, 2**63), _GREEDY]
    prompts = [tuple(prompt_of(length, seed=length)) for length in (20, 33, 5)]
    tables = _tables(3)
    cases = list(zip(prompts, tables, draws, strict=True))
    alone = [
        _generate(_runner(), [_Request(prompt, table, draw=draw)])[0]
        for prompt, table, draw in cases
    ]
    together = [_Request(prompt, table, chunk_size=6, draw=draw) for prompt, table, draw in cases]
    assert _generate(_runner(), together) == alone
    assert alone[0] != _reference("llama", prompts[0])


def test_poisoned_kv_spoils_only_the_sequence_that_reads_it():
    runner = ModelRunner(_config(num_gpu_blocks_override=16), progress=False)
    prompts = [tuple(prompt_of(20, seed=seed)) for seed in (1, 2)]
    requests = [_Request(prompts[0], (1, 2, 3)), _Request(prompts[1], (4, 5, 6))]
    _generate(runner, requests, num_tokens=1)
    runner.kv_pool[4] = math.nan
    runner.kv_pool[9:] = math.nan
    shares = tuple(request.share() for request in requests)
    output = runner.execute(ScheduledBatch(2, shares))
    assert output.token_ids == (_reference("llama", prompts[0])[1], None)


def test_the_runners_facts_come_from_flags_and_checkpoint():
    runner = ModelRunner(_config(block_size=8, max_model_len=100, max_num_seqs=3), progress=False)
    assert runner.info.max_model_len == 100
    assert runner.info.vocab_size == 259
    assert runner.info.layout.block_shape == (3, 2, 2, 8, 16)
    assert runner.num_blocks == 3 * 13
    assert runner.kv_pool.shape == (39, *runner.info.layout.block_shape)
    assert (runner.kv_pool == 0).all()


def test_without_a_flag_the_length_is_the_models():
    runner = ModelRunner(_config(max_model_len=None, max_num_seqs=2), progress=False)
    assert runner.info.max_model_len == 2048


def test_the_number_of_threads_is_set():
    before = torch.get_num_threads()
    try:
        ModelRunner(_config(num_threads=before + 1), progress=False)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_model_len": 2049}, "--max-model-len is 2049; the model takes at most 2048"),
        ({"num_gpu_blocks_override": 15}, "set --num-gpu-blocks-override 16"),
        ({"device": "abacus"}, "--device is 'abacus'; this machine has auto, cpu"),
    ],
)
def test_bad_flags_are_told_at_start(flags, message):
    with pytest.raises(ConfigurationError, match=message):
        ModelRunner(_config(**flags), progress=False)
