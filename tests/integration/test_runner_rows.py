"""The state that `ModelRunner` keeps per row, and its draws, compared with `transformers`."""

import math
from dataclasses import replace
from functools import cache, lru_cache

import pytest
import torch

from baton.common.errors import ConfigurationError
from engine.batch import INVALID_TOKEN, ScheduledBatch, ScheduledChunk, StepOutput, TableUpdate
from engine.config import EngineConfig
from engine.kv_cache.spec import KvCacheSpec
from engine.runtime.steps.host_steps import HostSteps
from tests.support.checkpoints import (
    SMALL_WINDOW,
    VOCAB_SIZE,
    prompt_of,
    reference_greedy,
    reference_model,
    tiny_checkpoint,
)
from tests.support.draw_params import draw_params
from tests.support.driven_requests import GREEDY, DrivenRequest, generate, run_step
from tests.support.pairs import pairs
from tests.support.runner_kinds import current_kind, make_runner, use_kind

BLOCK_SIZE = 8
PROMPT = tuple(prompt_of(21, seed=7))
OTHER = tuple(prompt_of(30, seed=8))
TABLE, OTHER_TABLE = tuple(range(4, 10)), tuple(range(20, 14, -1))


def _config(variant="llama", **flags):
    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 128,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 7,
        "num_gpu_blocks_override": 64,
        "swap_space": 2**20,
    }
    return EngineConfig(model=str(tiny_checkpoint(variant)), **(defaults | flags))


pytestmark = pytest.mark.sampled(one_in=2)
KINDS = ("host", "device, eager", "device, graphs")


@pytest.fixture(autouse=True, params=KINDS)
def _kind(request, monkeypatch):
    use_kind(request.param, monkeypatch)


@lru_cache(maxsize=4)  # one with stand-ins for graphs has some 400 MB
def _runner_of(kind, variant):
    return make_runner(_config(variant))


def _runner(variant="llama"):
    return _runner_of(current_kind(), variant)


@pytest.fixture
def runner():
    return _runner()


@cache
def _greedy(prompt, num_tokens=8, variant="llama"):
    return reference_greedy(tiny_checkpoint(variant), prompt, num_tokens)


@cache
def _log_probs(token_ids):
    """Returns `transformers`' log-softmax for the token after `token_ids`: `[vocab]`."""
    with torch.inference_mode():
        logits = reference_model(tiny_checkpoint("llama"))(torch.tensor([token_ids])).logits
    return logits[0, -1].float().log_softmax(-1)


def _prefill(runner, row=0, prompt=PROMPT, table=TABLE, **options):
    """Computes a prompt in one chunk; returns the chunk's output."""
    chunk = ScheduledChunk(row, prompt, 0, **({"draws": (GREEDY,)} | options))
    batch = ScheduledBatch(1, (chunk,), table_updates=(TableUpdate(row, 0, 0, table),))
    (output,) = runner.execute(batch).chunks
    return output


def _decode(runner, rows, num_tokens, **first):
    """Decodes `rows`; returns each row's tokens. `first` are fields of the first batch."""
    batches = [ScheduledBatch(2, decode_rows=rows, **first)]
    batches += [ScheduledBatch(2, decode_rows=rows) for _ in range(num_tokens - 1)]
    return list(zip(*(runner.execute(batch).decoded for batch in batches), strict=True))


# -- rows


def test_a_row_is_used_again_by_a_shorter_sequence(runner):
    for prompt in (OTHER, PROMPT[:3]):
        request = DrivenRequest(prompt, 3, [TABLE], draw=GREEDY)
        assert generate(runner, [request], 8) == [_greedy(prompt)]


def test_a_row_uses_the_draw_parameters_of_its_new_sequence(runner):
    wild = draw_params(temperature=50.0, top_k=0, top_p=1.0, seed=3)
    for draw, wants_logprobs in ((wild, True), (GREEDY, False)):
        request = DrivenRequest(PROMPT, 1, [TABLE], draw=draw, wants_logprobs=wants_logprobs)
        (drawn,) = generate(runner, [request], 6)
        assert (drawn == _greedy(PROMPT)[:6]) is (draw is GREEDY)
        assert len(request.logprobs) == (6 if wants_logprobs else 0)


def test_chunks_and_decode_rows_in_one_batch_do_not_change_each_other(runner):
    decoding = DrivenRequest(PROMPT, 4, [TABLE])
    joining = DrivenRequest(OTHER, 2, [OTHER_TABLE], chunk_size=4, first_step=2)
    assert generate(runner, [decoding, joining], 8) == [_greedy(PROMPT), _greedy(OTHER)]


def test_a_row_may_run_known_tokens_again_between_decodes(runner):
    """A preempted sequence runs its prompt and generated tokens in one chunk."""
    _prefill(runner)
    drawn = [_greedy(PROMPT)[0], *_decode(runner, (0,), 2)[0]]
    again = _prefill(runner, row=5, prompt=(*PROMPT, *drawn), table=OTHER_TABLE)
    drawn += [*again.token_ids, *_decode(runner, (5,), 3)[0]]
    assert drawn == _greedy(PROMPT)[:7]


def test_a_fork_continues_from_its_parents_blocks_and_a_copy(runner):
    """Row 1 shares the prompt's full blocks with row 0 and writes to a copy of the last."""
    first = _greedy(PROMPT)[0]
    _prefill(runner)
    fork = ScheduledChunk(1, (first ^ 1,), len(PROMPT), (GREEDY,))
    output = runner.execute(
        ScheduledBatch(
            2,
            chunks=(fork,),
            decode_rows=(0,),
            table_updates=(TableUpdate(1, 0, 0, (*TABLE[:2], 30)), TableUpdate(1, 0, 3, (31, 32))),
            block_copies=((TABLE[2], 30),),
        )
    )
    parent, forked = _decode(runner, (0, 1), 5)
    assert (first, *output.decoded, *parent) == tuple(_greedy(PROMPT)[:7])
    expected = _greedy((*PROMPT, first ^ 1))
    assert (*output.chunks[0].token_ids, *forked) == tuple(expected[:6])


def test_a_table_grows_while_its_row_decodes(runner):
    _prefill(runner, table=TABLE[:3])
    (drawn,) = _decode(runner, (0,), 3)
    (more,) = _decode(runner, (0,), 4, table_updates=(TableUpdate(0, 0, 3, (40,)),))
    assert [*drawn, *more] == _greedy(PROMPT)[1:]


def test_neighbours_do_not_change_a_rows_tokens(runner):
    draws = (GREEDY, draw_params(1.0, 0, 1.0, 5), draw_params(0.7, 9, 0.9, 6), GREEDY)
    tables = [tuple(range(5 * row, 5 * row + 5)) for row in range(4)]
    requests = [
        DrivenRequest(PROMPT[row:], row, [tables[row]], draw=draw, wants_logprobs=True)
        for row, draw in enumerate(draws)
    ]
    alone = [replace(request, drawn=[], logprobs=[]) for request in requests]
    for request in alone:
        generate(runner, [request], 6)
    generate(runner, requests, 6)
    assert [request.drawn for request in requests] == [request.drawn for request in alone]
    for together, single in zip(requests, alone, strict=True):
        assert together.logprobs == pytest.approx(single.logprobs, abs=1e-5)


def test_rows_are_advanced_past_a_step_that_failed(runner, monkeypatch):
    """A step that was submitted before the failure then writes to the rows' own blocks."""
    _prefill(runner, row=1, prompt=OTHER, table=OTHER_TABLE)
    expected = runner.kv_pool.clone()
    with monkeypatch.context() as broken:
        if isinstance(runner._steps, HostSteps):
            broken.setattr(runner._steps._recorded, "scores", lambda on_layer: 1 / 0)
        else:
            broken.setattr(runner._steps, "_compute_scores", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _prefill(runner, row=1)
    runner.execute(ScheduledBatch(3, decode_rows=(1,)))
    untouched = [block for block in range(64) if block != TABLE[len(PROMPT) // BLOCK_SIZE]]
    assert torch.equal(runner.kv_pool[untouched], expected[untouched])


# -- draws


@pytest.mark.parametrize(
    "draw",
    [draw_params(1.5, 0, 1.0, 2**63 + 1), draw_params(2.0, 30, 1.0, 1), draw_params(2, 0, 0.9, 0)],
)
def test_a_decode_row_draws_as_a_chunk_over_the_same_tokens_does(runner, draw):
    first = _prefill(runner, draws=(draw,)).token_ids
    drawn = [*first, *_decode(runner, (0,), 7)[0]]
    for index, token_id in enumerate(drawn):
        sequence = (*PROMPT, *drawn[:index])
        again = _prefill(runner, row=1, prompt=sequence, table=OTHER_TABLE, draws=(draw,))
        assert again.token_ids == (token_id,)
    assert drawn != _greedy(PROMPT)


def test_candidates_draw_from_one_row_of_logits(runner):
    draws = tuple(draw_params(1.0, 0, 1.0, seed) for seed in range(40))
    together = _prefill(runner, draws=(*draws, GREEDY), wants_logprobs=True)
    alone = [_prefill(runner, draws=(draw,)).token_ids[0] for draw in draws]
    assert list(together.token_ids) == [*alone, _greedy(PROMPT)[0]]
    assert len(set(alone)) > 5
    expected = _log_probs(PROMPT)[list(together.token_ids)]
    assert together.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("num_top", [1, 7, VOCAB_SIZE, VOCAB_SIZE + 5])
def test_the_most_likely_tokens_are_those_of_transformers(runner, num_top):
    output = _prefill(runner, draws=(), num_top=num_top)
    values, tokens = _log_probs(PROMPT).topk(min(num_top, VOCAB_SIZE))
    assert list(output.token_ids) == tokens.tolist()
    assert output.logprobs == pytest.approx(values.tolist(), abs=1e-4)


def test_chunks_of_every_kind_in_one_batch_have_the_outputs_of_each_alone(runner):
    _prefill(runner, row=6, prompt=OTHER, table=OTHER_TABLE)
    kinds = (
        {"draws": ()},
        {"draws": (draw_params(1.0, 0, 1.0, 1), GREEDY), "wants_logprobs": True},
        {"draws": (), "num_top": 4},
        {"draws": (GREEDY,)},
        {"draws": (), "num_top": 2},
        {"draws": (), "num_top": 4},
    )
    tables = [(30 + 3 * row, 31 + 3 * row, 32 + 3 * row) for row in range(len(kinds))]
    prompts = [OTHER[row : row + 20] for row in range(len(kinds))]
    alone = [
        _prefill(runner, row, prompts[row], tables[row], **kind) for row, kind in enumerate(kinds)
    ]
    chunks = tuple(ScheduledChunk(row, prompts[row], 0, **kind) for row, kind in enumerate(kinds))
    output = runner.execute(ScheduledBatch(2, chunks, decode_rows=(6,)))
    assert output.decoded == (_greedy(OTHER)[1],)
    assert alone[0] is None
    assert output.chunks[0] is None
    for together, single in zip(output.chunks[1:], alone[1:], strict=True):
        assert together.token_ids == single.token_ids
        assert together.logprobs == pytest.approx(single.logprobs, abs=1e-5)


def test_log_probabilities_are_of_the_raw_logits_and_only_for_rows_that_want_them(runner):
    draw = draw_params(temperature=3.0, top_k=20, top_p=0.9, seed=9)
    first = _prefill(runner, draws=(draw,), wants_logprobs=True)
    _prefill(runner, row=1, prompt=OTHER, table=OTHER_TABLE)
    outputs = [runner.execute(ScheduledBatch(2, decode_rows=(1, 0))) for _ in range(3)]
    tokens = [*first.token_ids, *(output.decoded[1] for output in outputs)]
    logprobs = [*first.logprobs, *(output.decoded_logprobs[1] for output in outputs)]
    for index, token_id in enumerate(tokens):
        expected = _log_probs((*PROMPT, *tokens[:index]))[token_id]
        assert logprobs[index] == pytest.approx(float(expected), abs=1e-4)
    assert all(math.isnan(output.decoded_logprobs[0]) for output in outputs)
    assert runner.execute(ScheduledBatch(3, decode_rows=(1,))).decoded_logprobs == ()


def test_tokens_from_logits_that_are_not_finite_are_invalid():
    runner = make_runner(_config())
    runner.kv_pool[4] = math.nan
    chunks = (
        ScheduledChunk(
            0, PROMPT[8:], 8, (GREEDY, draw_params(1.0, 5, 0.5, 1)), wants_logprobs=True
        ),
        ScheduledChunk(1, PROMPT[8:], 8, num_top=3),
        ScheduledChunk(2, PROMPT, 0, (GREEDY,)),
    )
    updates = tuple(
        TableUpdate(row, 0, 0, table)
        for row, table in enumerate(((4, 5, 6), (4, 7, 8), (10, 11, 12)))
    )
    drawn, top, good = runner.execute(ScheduledBatch(1, chunks, table_updates=updates)).chunks
    assert drawn.token_ids == (INVALID_TOKEN,) * 2
    assert top.token_ids == (INVALID_TOKEN,) * 3
    assert all(math.isnan(logprob) for logprob in (*drawn.logprobs, *top.logprobs))
    assert good.token_ids == (_greedy(PROMPT)[0],)


# -- swaps


def _random_pool(runner):
    noise = torch.randint(0, 256, (runner.kv_pool.nbytes,), dtype=torch.uint8)
    runner.kv_pool.view(-1).view(torch.uint8).copy_(noise)


def _block_bytes(runner, blocks):
    return runner.kv_pool[list(blocks)].view(len(blocks), -1).view(torch.uint8)


def test_swapped_blocks_return_bit_for_bit_to_other_blocks():
    runner = make_runner(_config(dtype="float16"))
    _random_pool(runner)
    before = _block_bytes(runner, (3, 1, 60)).clone()
    assert runner.execute(ScheduledBatch(1, swap_outs=((3, 0), (1, 5), (60, 2)))) == StepOutput(1)
    runner.kv_pool.zero_()
    runner.execute(ScheduledBatch(2, swap_ins=((0, 7), (5, 8), (2, 3))))
    assert torch.equal(_block_bytes(runner, (7, 8, 3)), before)


def test_a_batch_swaps_in_then_out_then_copies():
    runner = make_runner(_config())
    _random_pool(runner)
    blocks = _block_bytes(runner, range(64)).clone()
    runner.execute(ScheduledBatch(1, swap_outs=((0, 0),)))
    # Host block 0 is swapped in before block 2 replaces it; block 5 is copied after that.
    runner.execute(
        ScheduledBatch(2, swap_ins=((0, 5),), swap_outs=((2, 0),), block_copies=((5, 6), (6, 7)))
    )
    runner.execute(ScheduledBatch(3, swap_ins=((0, 9),)))
    assert torch.equal(_block_bytes(runner, (5, 6, 7, 9)), blocks[[0, 0, 6, 2]])


def test_a_sequence_continues_after_a_swap_to_other_blocks_and_another_row(runner):
    first = _prefill(runner).token_ids[0]
    runner.execute(ScheduledBatch(2, swap_outs=tuple((b, b - 4) for b in TABLE[:3])))
    runner.kv_pool[list(TABLE)] = math.nan
    again = ScheduledChunk(2, (first,), len(PROMPT), (GREEDY,))
    output = runner.execute(
        ScheduledBatch(
            3,
            (again,),
            table_updates=(TableUpdate(2, 0, 0, OTHER_TABLE),),
            swap_ins=tuple(
                (b - 4, other) for b, other in zip(TABLE[:3], OTHER_TABLE, strict=False)
            ),
        )
    )
    drawn = [*output.chunks[0].token_ids, *_decode(runner, (2,), 4)[0]]
    assert drawn == _greedy(PROMPT)[1:6]
    runner.kv_pool[list(TABLE)] = 0


# -- windows


@pytest.mark.parametrize(
    ("_kind", "variant", "chunk_size"),
    pairs(KINDS, ("qwen2_alternating", "qwen3_mostly_sliding", "mistral_sliding"), (5, 8, 64)),
    indirect=["_kind"],
)
def test_blocks_outside_of_the_windows_are_not_read(variant, chunk_size):
    """Blocks are poisoned as soon as the layer groups' windows have moved past them."""
    runner, prompt = make_runner(_config(variant)), tuple(prompt_of(61, seed=3))
    spec = KvCacheSpec(BLOCK_SIZE, runner.info.windows)
    tables = [tuple(range(9 * g, 9 * g + 9)) for g in range(spec.num_layer_groups)]
    request = DrivenRequest(prompt, 0, tables, chunk_size=chunk_size)
    while len(request.drawn) < 8:
        run_step(runner, 1, [request])
        for group, table in enumerate(tables):
            behind = table[: spec.first_live(group, request.num_computed)]
            runner.kv_pool[list(behind)] = math.nan
    assert runner.kv_pool.isnan().any()
    assert request.drawn == _greedy(prompt, 8, variant)


def test_layer_groups_follow_the_checkpoint():
    info = _runner("qwen3_mostly_sliding").info
    assert info.windows == (SMALL_WINDOW,) * 3 + (None,)
    assert info.layout.num_layers == 2
    assert _runner("qwen2_alternating").info.windows == (None, SMALL_WINDOW)
    assert _runner().info.windows == (None,)
    assert _runner().info.layout.num_layers == 3


def test_a_windowed_model_needs_a_smaller_pool():
    flags = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 16}
    assert make_runner(_config("mistral_sliding", **flags)).num_blocks == 16
    smaller = flags | {"num_gpu_blocks_override": 5}
    assert make_runner(_config("mistral_sliding", **smaller)).num_blocks == 5
    with pytest.raises(ConfigurationError, match="--num-gpu-blocks-override 16"):
        make_runner(_config(**smaller))


# -- submit, costs


def test_submitted_batches_run_in_order_each_on_the_tokens_of_the_last():
    runner = make_runner(_config())
    chunk = ScheduledChunk(0, PROMPT, 0, (GREEDY,))
    rows = (0,)
    futures = [
        runner.submit(ScheduledBatch(1, (chunk,), table_updates=(TableUpdate(0, 0, 0, TABLE),)))
    ]
    futures += [runner.submit(ScheduledBatch(step, decode_rows=rows)) for step in range(2, 9)]
    outputs = [future.result() for future in futures]
    assert [output.step for output in outputs] == list(range(1, 9))
    drawn = [outputs[0].chunks[0].token_ids[0], *(output.decoded[0] for output in outputs[1:])]
    assert drawn == _greedy(PROMPT)
    runner.close()
    runner.close()


def test_a_failed_submission_raises_and_does_not_stop_the_next():
    runner = make_runner(_config())
    with pytest.raises(IndexError):  # raised at once, or in the runner's thread
        runner.submit(ScheduledBatch(1, table_updates=(TableUpdate(99, 0, 0, (1,)),))).result()
    good = runner.submit(ScheduledBatch(2))
    assert good.result() == StepOutput(2)
    runner.close()


def test_a_runner_can_be_closed_without_submissions():
    make_runner(_config()).close()


def test_costs_are_measured(runner):
    assert 0 < runner.costs.prompt_token_s < 1
    assert 0 < runner.costs.swapped_block_s < 1
    assert runner.num_host_blocks == min(64, 2**20 // runner.info.layout.block_bytes)
    without = make_runner(_config(swap_space=None))
    assert without.num_host_blocks == 0
    assert without.costs.swapped_block_s == 0


def test_swapping_without_a_host_pool_is_refused():
    with pytest.raises(ConfigurationError, match="--preemption-mode swap needs at least one block"):
        make_runner(_config(swap_space=0, preemption_mode="swap"))
