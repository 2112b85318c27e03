"""Recorded steps of whole models give the same bits as steps that run through Python."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch

import kernels
from engine.runtime.forward import recorded_steps
from engine.runtime.forward.batch_inputs import StepInputs
from engine.runtime.forward.recorded_steps import RecordedSteps
from tests.support.checkpoints import DECODER_VARIANTS, VARIANTS, prompt_of
from tests.support.expert_variants import EXPERT_VARIANTS, LATENT_VARIANTS
from tests.support.kernel_checks import IS_NATIVE, native_only
from tests.support.paged_session import BLOCK_SIZE, PagedSession, loaded

PROMPTS = [prompt_of(length, seed=length) for length in (5, 1, 30, 8, 64, 17, 2, 40)]
# The sequences that decode in each step; each size recurs after smaller and larger ones.
STEPS = [[0], list(range(8)), [3, 1, 2], [1], [7, 6, 5, 4, 3, 2, 1, 0], [0, 5, 6], [4], [2, 6]]
STEPS += [[5, 7], list(range(8)), [6], [1, 3, 5], [2, 4]]
NUM_SIZES = len({len(step) for step in STEPS})

# Chunks of prompts: each step's (sequence, number of tokens), and the indices that need logits.
# Sizes recur with other sequences, more of them, other contexts, cached prefixes, and together
# with sequences that decode.
CHUNK_STEPS = [
    ([(0, 40)], []),
    ([(1, 24), (2, 16)], []),
    ([(0, 39), (2, 1)], [0]),
    ([(3, 20), (0, 1), (1, 19)], []),
    ([(0, 1), (1, 38), (2, 1)], [0]),
    ([(4, 40)], [0]),
    ([(5, 25), (4, 1)], [0, 1]),
    ([(3, 25), (4, 1)], [0, 1]),
    ([(1, 1), (5, 25)], [0, 1]),
    ([(0, 3), (1, 1), (2, 22)], [1, 2]),
    ([(2, 40)], []),
]
SEQUENCE_LEN = 90
# (sequence, other sequence, number of the first tokens that are in blocks of the other).
SHARED_PREFIXES = [(4, 0, 24), (5, 1, 16)]


class CountingModel:
    """A model that counts how often Python ran it."""

    def __init__(self, model):
        self._model, self.num_runs, self.logits = model, 0, model.logits
        self.part = model.part

    def __call__(self, *inputs):
        self.num_runs += 1
        return self._model(*inputs)


def prefilled(variant, dtype, seed=0):
    session = PagedSession(loaded(variant, dtype), [len(p) + len(STEPS) for p in PROMPTS], seed)
    session.step(list(enumerate(PROMPTS)))
    return session


def decode_work(step, sequences):
    return [(sequence, [(37 * step + 11 * sequence) % 256]) for sequence in sequences]


class ForeignModel(CountingModel):
    """A model one of whose operations is torch's."""

    def __init__(self, model):
        super().__init__(model)
        self.logits = lambda hidden: model.logits(hidden) * 1


def recorder_of(session, kind=CountingModel):
    model = kind(session.model.model)
    inputs = StepInputs(session.rows(), SEQUENCE_LEN, BLOCK_SIZE, session.pool.device)
    return model, RecordedSteps(model, session.views, session.layer_groups.slots, inputs)


def run_recorded(steps, session, work, wanted=None):
    steps.inputs.fill(*session.batch(work, wanted), decode_rows=np.zeros(0, np.int64))
    scores = steps.scores()
    if len(scores.logits):
        maxima, likeliest = kernels.row_maxima(scores.logits)
        assert torch.equal(scores.likeliest, likeliest)
        assert torch.equal(scores.maxima.nan_to_num(), maxima.nan_to_num())
    return scores.logits.clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "variant", [*VARIANTS, *DECODER_VARIANTS, *EXPERT_VARIANTS, *LATENT_VARIANTS]
)
def test_recorded_decode_steps_equal_plain_ones(variant, dtype):
    plain, recorded = prefilled(variant, dtype), prefilled(variant, dtype)
    model, decode = recorder_of(recorded)
    for step, sequences in enumerate(STEPS):
        work = decode_work(step, sequences)
        logits = run_recorded(decode, recorded, work)
        assert logits.isfinite().all()
        assert torch.equal(logits, torch.cat(plain.step(work)))
    assert torch.equal(plain.pool.view(torch.int16), recorded.pool.view(torch.int16))
    assert model.num_runs == (NUM_SIZES if IS_NATIVE else len(STEPS))


def chunk_session(variant, dtype):
    session = PagedSession(loaded(variant, dtype), [SEQUENCE_LEN] * 6)
    for sequence, other, num_tokens in SHARED_PREFIXES:
        for tables in session.tables:
            num_blocks = num_tokens // BLOCK_SIZE
            tables[sequence][:num_blocks] = tables[other][:num_blocks]
        session.done[sequence] = num_tokens
    return session


def chunk_work(session, step):
    prompts = [prompt_of(SEQUENCE_LEN, seed) for seed in range(6)]
    return [(i, prompts[i][session.done[i] :][:num_tokens]) for i, num_tokens in step]


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *product([*VARIANTS, *EXPERT_VARIANTS], ["float32", "bfloat16"]),
        *(("deepseek_v2", "float32"), ("deepseek_v3", "bfloat16")),
        *product(
            ["gemma2", "gemma3", "gemma4", "gemma4_moe", "olmo3", "smollm3_sliding"], ["bfloat16"]
        ),
    ],
)
def test_recorded_chunk_steps_equal_plain_ones(variant, dtype):
    plain, recorded = chunk_session(variant, dtype), chunk_session(variant, dtype)
    model, steps = recorder_of(recorded)
    runs = []
    for step, wanted in CHUNK_STEPS:
        expected = plain.step_with_logits_of(chunk_work(plain, step), wanted)
        logits = run_recorded(steps, recorded, chunk_work(recorded, step), wanted)
        assert logits.isfinite().all()
        assert torch.equal(logits, expected)
        runs.append(model.num_runs)
    assert torch.equal(plain.pool.view(torch.int16), recorded.pool.view(torch.int16))
    if IS_NATIVE:  # when a size occurs for the second time
        assert runs == [1, 2, 3, 3, 4, 4, 5, 6, 6, 6, 6]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layers_kv_is_written_when_its_mark_is_called(variant):
    session = chunk_session(variant, "float32")
    _, steps = recorder_of(session)
    slots, seen_pools = session.layer_groups.slots, []
    pool = session.pool.view(torch.int32)  # it holds NaN

    def see(num_layers):
        seen_pools.append((num_layers, pool.clone()))

    for sequence in range(3):  # run through Python, then recorded if possible, then replayed
        seen_pools.clear()
        work = chunk_work(session, [(sequence, 40)])
        steps.inputs.fill(*session.batch(work, [0]), decode_rows=np.zeros(0, np.int64))
        before = pool.clone()
        steps.scores(see)
        numbers = [number for number, _ in seen_pools]
        if sequence == 1:
            assert not numbers, "marks were called while a step was recorded"
            continue
        assert numbers == list(range(1, len(slots) + 1))
        for number, seen in seen_pools:
            for layer, (group, index) in enumerate(slots):
                blocks = session.tables[group][sequence][: 40 // BLOCK_SIZE]
                expected = pool if layer < number else before
                assert torch.equal(seen[blocks, index], expected[blocks, index])
                assert not torch.equal(pool[blocks, index], before[blocks, index])


@native_only("other kernels record nothing")
def test_long_steps_are_not_recorded(monkeypatch):
    monkeypatch.setattr(recorded_steps, "_MAX_TOKENS", 8)
    session = chunk_session("llama", "float32")
    model, steps = recorder_of(session)
    for num_tokens in (8, 8, 8, 9, 9, 9):
        run_recorded(steps, session, chunk_work(session, [(0, num_tokens)]), [0])
    assert model.num_runs == 2 + 3


@native_only("other kernels record nothing")
def test_sizes_seen_long_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr(recorded_steps, "_MAX_SIZES_SEEN", 2)
    session = chunk_session("llama", "float32")
    model, steps = recorder_of(session)
    runs = []
    for num_tokens in (4, 5, 6, 4, 6, 6, 4, 4):
        run_recorded(steps, session, chunk_work(session, [(0, num_tokens)]), [])
        runs.append(model.num_runs)
    assert runs == [1, 2, 3, 4, 5, 5, 6, 6]


def test_recording_is_not_tried_again_after_a_failure(monkeypatch):
    session = prefilled("llama", "float32")
    model, decode = recorder_of(session, ForeignModel)
    tries = []
    record = kernels.record_step
    monkeypatch.setattr(kernels, "record_step", lambda *a: tries.append(1) or record(*a))
    for step, sequences in enumerate(STEPS):
        run_recorded(decode, session, decode_work(step, sequences))
    assert len(tries) == 1
    assert not decode._recordings
    assert model.num_runs == len(STEPS) + IS_NATIVE  # the failed recording ran it once more


@native_only("other kernels record nothing")
def test_the_least_recently_used_recordings_are_dropped(monkeypatch):
    monkeypatch.setattr(recorded_steps, "_MAX_RECORDINGS", 2)
    plain, session = prefilled("llama", "float32"), prefilled("llama", "float32")
    model, decode = recorder_of(session)
    runs = []
    for step, num_rows in enumerate((1, 2, 1, 3, 1, 2, 3)):
        work = decode_work(step, range(num_rows))
        assert torch.equal(run_recorded(decode, session, work), torch.cat(plain.step(work)))
        runs.append(model.num_runs)
    assert runs == [1, 2, 2, 3, 3, 4, 5]


@pytest.mark.parametrize("variant", ["llama", "qwen3_mostly_sliding", "gpt2"])
def test_a_non_finite_sequence_does_not_affect_others(variant):
    plain, recorded = prefilled(variant, "float32"), prefilled(variant, "float32")
    _, decode = recorder_of(recorded)
    sequences = list(range(8))
    for step in range(2):
        work = decode_work(step, sequences)
        assert torch.equal(run_recorded(decode, recorded, work), torch.cat(plain.step(work)))
    for tables in recorded.tables:
        recorded.pool[tables[5]] = torch.nan
    work = decode_work(2, sequences)
    logits, expected = run_recorded(decode, recorded, work), torch.cat(plain.step(work))
    assert logits[5].isnan().all()
    others = [row for row in sequences if row != 5]
    assert torch.equal(logits[others], expected[others])


@native_only("other kernels record nothing")
def test_engines_of_one_process_record_and_run_concurrently():
    variants = ["llama", "qwen3_mostly_sliding", "llama"]

    def decode_all(index, replays):
        session = prefilled(variants[index], "float32", seed=index)
        _, decode = recorder_of(session)
        for step, sequences in enumerate(STEPS):
            work = decode_work(step, sequences)
            if replays:
                yield run_recorded(decode, session, work)
            else:
                yield torch.cat(session.step(work))

    expected = [list(decode_all(index, replays=False)) for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda i: list(decode_all(i, replays=True)), range(3), timeout=60))
    for got, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@native_only("other kernels record nothing")
@pytest.mark.parametrize("variant", ["lfm2", "lfm2_conv_last", "qwen3_5"])
def test_steps_with_states_are_recorded(variant):
    plain, recorded = (PagedSession(loaded(variant), [20, 20]) for _ in range(2))
    model, work = recorded.model.model, [(0, PROMPTS[0]), (1, PROMPTS[1])]
    inputs = recorded.inputs(work, [0, 1])
    kv = recorded.kv(inputs)
    with torch.inference_mode():
        _, step = kernels.record_step(
            torch.device("cpu"),
            kernels.Arena(),
            lambda: model.logits(model(inputs.token_ids, inputs.positions, kv)),
        )
        assert step is not None
        expected = plain.step_with_logits_of(work, [0, 1])
        assert torch.equal(step.run(), expected)
        inputs.token_ids.add_(1)
        assert not torch.equal(step.run(), expected)
    for ours, others in zip(recorded.states, plain.states, strict=True):
        assert not torch.equal(ours[0].nan_to_num(), others[0].nan_to_num())
