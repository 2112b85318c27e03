"""`ModelRunner` on a GPU, compared with `transformers`: chunks, decoding, sampling, masks, logits
processors, swaps.
"""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.batch import ProcessedText, ScheduledBatch, ScheduledChunk
from engine.config import EngineConfig
from engine.runtime.model_runner import ModelRunner
from tests.support.checkpoints import (
    VOCAB_SIZE,
    prompt_of,
    reference_greedy,
    reference_model,
    tiny_checkpoint,
)
from tests.support.devices import DEVICE, IS_CUDA
from tests.support.draw_params import draw_params
from tests.support.driven_requests import DrivenRequest, generate, run_step, scattered_tables
from tests.support.logits_processors import FLAG, processed_logits

_NUM_TOKENS = 6
_NUM_BLOCKS = 96
_BF16_LOGPROB = 0.25
"""Allowed difference of a three-layer model's log-probabilities from those in float32."""
_VARIANTS = ("llama", "llama_sharded", "qwen2_alternating", "qwen3", "opt", "gpt2")


def _config(variant, **flags):
    defaults = {"dtype": "float32", "device": str(DEVICE), "max_model_len": 256, "max_num_seqs": 8}
    return EngineConfig(model=str(tiny_checkpoint(variant)), **{**defaults, **flags})


@pytest.fixture
def make_runner():
    runners = []

    def make(variant="llama", **flags):
        flags.setdefault("num_gpu_blocks_override", _NUM_BLOCKS)
        runners.append(ModelRunner(_config(variant, **flags), progress=False))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@cache
def _reference(variant, length):
    return reference_greedy(tiny_checkpoint(variant), prompt_of(length, seed=length), _NUM_TOKENS)


def _requests(runner, lengths, **fields):
    groups = len(runner.info.windows)
    tables = scattered_tables(len(lengths), 5, groups, _NUM_BLOCKS)
    return [
        DrivenRequest(tuple(prompt_of(length, seed=length)), row, own, first_step=row, **fields)
        for row, (length, own) in enumerate(zip(lengths, tables, strict=True))
    ]


@pytest.mark.parametrize("variant", _VARIANTS)
def test_mixed_batches_give_the_tokens_of_transformers(variant, make_runner):
    runner, lengths = make_runner(variant), (1, 16, 33)
    requests = _requests(runner, lengths, chunk_size=12)
    expected = [_reference(variant, length) for length in lengths]
    assert generate(runner, requests, _NUM_TOKENS) == expected


def test_graphs_and_eager_steps_draw_the_same(make_runner):
    drawn = []
    for enforce_eager in (False, True):
        runner = make_runner(enforce_eager=enforce_eager)
        requests = _requests(runner, (9, 20, 31), draw=draw_params(0.9, 20, 0.95, 11))
        drawn.append(generate(runner, requests, _NUM_TOKENS))
    assert drawn[0] == drawn[1]


def _logits_after(token_ids):
    """Returns the `[vocab]` logits of the llama checkpoint after some tokens."""
    with torch.inference_mode():
        return reference_model(tiny_checkpoint("llama"))(torch.tensor([token_ids])).logits[0, -1]


def _next_chunk(request, **fields):
    """Returns the next chunk of a request that never decodes: its prompt or its last token."""
    known = (*request.prompt, *request.drawn)
    new = known[request.num_computed :]
    return replace(request.next_chunk(), token_ids=new, draws=(request.draw,), **fields)


def _run_beside_a_decoding_row(runner, step, request, chunk, decoding):
    """Runs a step of one chunk and one row that decodes."""
    updates = request.table_updates() if chunk.start_position == 0 else ()
    batch = ScheduledBatch(step, (chunk,), (decoding.row,), table_updates=updates)
    output = runner.execute(batch)
    request.take_chunk(chunk, output.chunks[0])
    decoding.take_token(output.decoded[0], None)


def _mask_of(allowed):
    words = [0] * -(-VOCAB_SIZE // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return b"".join(word.to_bytes(4, "little") for word in words)


def test_masked_chunks_draw_the_likeliest_allowed_tokens(make_runner):
    runner = make_runner()
    decoding, masked = _requests(runner, (9, 33))
    run_step(runner, 1, [decoding])
    for step in range(2, _NUM_TOKENS + 1):
        logits = _logits_after([*masked.prompt, *masked.drawn])
        allowed = logits.argsort()[step : 40 + step].tolist()
        chunk = _next_chunk(masked, mask=_mask_of(allowed))
        _run_beside_a_decoding_row(runner, step, masked, chunk, decoding)
        assert masked.drawn[-1] == max(allowed, key=logits.tolist().__getitem__)
    assert decoding.drawn == _reference("llama", 9)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_draft_tokens_are_kept_as_far_as_they_are_right(enforce_eager, make_runner):
    drafting = {"method": "ngram", "num_speculative_tokens": 3}
    runner = make_runner(enforce_eager=enforce_eager, speculative_config=drafting)
    decoding, guessing = _requests(runner, (9, 33))
    run_step(runner, 1, [decoding])
    _run_beside_a_decoding_row(runner, 2, guessing, _next_chunk(guessing), decoding)
    expected = _reference("llama", 33)
    wrong = (expected[3] + 1) % 256
    chunk = ScheduledChunk(
        guessing.row,
        (expected[0], expected[1], expected[2], wrong),
        33,
        (guessing.draw,),
        num_drafts=3,
    )
    _run_beside_a_decoding_row(runner, 3, guessing, chunk, decoding)
    assert guessing.drawn == expected[:4]
    assert decoding.drawn == _reference("llama", 9)[:3]


def test_logits_processors_change_the_logits_of_their_own_chunks(make_runner):
    runner, args = make_runner(logits_processors=FLAG), {"steer": 5, "count_penalty": 2.0}
    decoding, processed = _requests(runner, (9, 33))
    run_step(runner, 1, [decoding])
    for step in range(2, _NUM_TOKENS + 1):
        output = tuple(processed.drawn)
        logits = _logits_after([*processed.prompt, *output])
        text = ProcessedText((0, 0), args, processed.prompt, output)
        chunk = _next_chunk(processed, processed=text)
        _run_beside_a_decoding_row(runner, step, processed, chunk, decoding)
        assert processed.drawn[-1] == int(processed_logits(logits, args, output).argmax())
    assert decoding.drawn == _reference("llama", 9)


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_bfloat16_log_probabilities_are_close_to_those_of_float32(variant, make_runner):
    runner, length = make_runner(variant, dtype="bfloat16"), 37
    (request,) = _requests(runner, (length,), wants_logprobs=True)
    run_step(runner, 1, [request])
    prompt = torch.tensor([prompt_of(length, seed=length)])
    with torch.inference_mode():
        logits = reference_model(tiny_checkpoint(variant))(prompt).logits[0, -1]
    expected = logits.log_softmax(-1)
    assert request.drawn[0] == int(expected.argmax())
    assert abs(request.logprobs[0] - float(expected.max())) < _BF16_LOGPROB


def test_a_step_may_be_submitted_before_the_previous_one_is_read(make_runner):
    runner, length = make_runner(), 33
    (request,) = _requests(runner, (length,))
    chunk = ScheduledBatch(1, (request.next_chunk(),), table_updates=request.table_updates())
    decode_rows = (request.row,)
    pending = [runner.submit(chunk)]
    pending += [
        runner.submit(ScheduledBatch(step, decode_rows=decode_rows))
        for step in range(2, _NUM_TOKENS + 1)
    ]
    first, *others = [step.result() for step in pending]
    tokens = [*first.chunks[0].token_ids, *(token for output in others for token in output.decoded)]
    assert tokens == _reference("llama", length)


def test_a_request_continues_after_its_blocks_are_swapped_in_elsewhere(make_runner):
    runner, length = make_runner(preemption_mode="swap", swap_space=2**20), 33
    (request,) = _requests(runner, (length,))
    generate(runner, [request], num_tokens=3)
    (blocks,) = request.tables
    free = [block for block in range(_NUM_BLOCKS) if block not in blocks][: len(blocks)]
    hosts = range(3, 3 + len(blocks))
    runner.execute(ScheduledBatch(10, swap_outs=tuple(zip(blocks, hosts, strict=True))))
    runner.kv_pool[list(blocks)] = math.nan
    request.tables = [tuple(free)]
    resumed = ScheduledBatch(
        11,
        decode_rows=(request.row,),
        table_updates=request.table_updates(),
        swap_ins=tuple(zip(hosts, free, strict=True)),
    )
    tokens = [*request.drawn, *runner.execute(resumed).decoded]
    tokens += runner.execute(ScheduledBatch(12, decode_rows=(request.row,))).decoded
    assert tokens == _reference("llama", length)[:5]
    assert runner.costs.swapped_block_s > 0


@pytest.mark.skipif(not IS_CUDA, reason="a CPU's memory is not profiled")
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_the_pool_fills_its_share_of_gpu_memory_and_no_more(share, make_runner):
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    runner = make_runner(num_gpu_blocks_override=None, gpu_memory_utilization=share, swap_space=0)
    torch.cuda.synchronize()
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert taken <= share * total
    assert runner.kv_pool.nbytes > 0.7 * share * total


@pytest.mark.skipif(not IS_CUDA, reason="host pools are pinned only with a GPU")
def test_the_host_pool_is_pinned(make_runner):
    runner = make_runner(preemption_mode="swap", swap_space=2**20)
    assert runner._host_pool.is_pinned()
