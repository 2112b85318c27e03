"""Steps recorded and run again give the bits that the same step gives through Python."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import kernels
from engine.runtime import recorded_decode
from engine.runtime.recorded_decode import RecordedDecode
from kernels import Arena, WeightUse
from tests.support.attention_cases import make_case
from tests.support.checkpoints import VARIANTS, prompt_of
from tests.support.kernel_checks import CPU, DTYPES, IS_NATIVE, filled_weight, native_only, normal
from tests.support.paged_session import PagedSession, loaded

PROMPTS = [prompt_of(length, seed=length) for length in (5, 1, 30, 8, 64, 17, 2, 40)]
# Which sequences decode in each step: every size comes again, after smaller and larger ones.
STEPS = [[0], list(range(8)), [3, 1, 2], [1], [7, 6, 5, 4, 3, 2, 1, 0], [0, 5, 6], [4], [2, 6]]
STEPS += [[5, 7], list(range(8)), [6], [1, 3, 5], [2, 4]]
NUM_SIZES = len({len(step) for step in STEPS})


class CountingModel:
    """A model that counts how often Python ran it."""

    def __init__(self, model):
        self._model, self.num_runs, self.logits = model, 0, model.logits

    def __call__(self, *inputs):
        self.num_runs += 1
        return self._model(*inputs)


def prefilled(variant, dtype, seed=0):
    session = PagedSession(loaded(variant, dtype), [len(p) + len(STEPS) for p in PROMPTS], seed)
    session.step(list(enumerate(PROMPTS)))
    return session


def decode_work(step, sequences):
    return [(sequence, [(37 * step + 11 * sequence) % 256]) for sequence in sequences]


def recorder_of(session):
    model = CountingModel(session.model.model)
    return model, RecordedDecode(model, session.pool, session.groups.slots)


@torch.inference_mode()
def decode_recorded(decode, session, work):
    return decode.logits(session.inputs(work)).clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_decoding_is_decoding(variant, dtype):
    plain, recorded = prefilled(variant, dtype), prefilled(variant, dtype)
    model, decode = recorder_of(recorded)
    for step, sequences in enumerate(STEPS):
        work = decode_work(step, sequences)
        logits = decode_recorded(decode, recorded, work)
        assert logits.isfinite().all()
        assert torch.equal(logits, torch.cat(plain.step(work)))
    assert torch.equal(plain.pool.view(torch.int16), recorded.pool.view(torch.int16))
    # Operations of torch are among those of OPT and GPT-2.
    is_recorded = IS_NATIVE and not variant.startswith(("opt", "gpt2"))
    assert model.num_runs == (NUM_SIZES if is_recorded else len(STEPS))


def test_what_cannot_be_recorded_is_tried_once(monkeypatch):
    session = prefilled("gpt2", "float32")
    model, decode = recorder_of(session)
    tries = []
    record = kernels.record_step
    monkeypatch.setattr(kernels, "record_step", lambda *a: tries.append(1) or record(*a))
    for step, sequences in enumerate(STEPS):
        decode_recorded(decode, session, decode_work(step, sequences))
    assert len(tries) == 1
    assert not decode._recordings
    assert model.num_runs == len(STEPS)


@native_only("others record nothing")
def test_the_recordings_that_were_not_used_for_longest_are_dropped(monkeypatch):
    monkeypatch.setattr(recorded_decode, "_MAX_RECORDINGS", 2)
    plain, session = prefilled("llama", "float32"), prefilled("llama", "float32")
    model, decode = recorder_of(session)
    runs = []
    for step, num_rows in enumerate((1, 2, 1, 3, 1, 2, 3)):
        work = decode_work(step, range(num_rows))
        assert torch.equal(decode_recorded(decode, session, work), torch.cat(plain.step(work)))
        runs.append(model.num_runs)
    assert runs == [1, 2, 2, 3, 3, 4, 5]


@pytest.mark.parametrize("variant", ["llama", "qwen3_mostly_sliding", "gpt2"])
def test_a_sequence_that_is_not_finite_spoils_no_other(variant):
    plain, recorded = prefilled(variant, "float32"), prefilled(variant, "float32")
    _, decode = recorder_of(recorded)
    everyone = list(range(8))
    for step in range(2):
        work = decode_work(step, everyone)
        assert torch.equal(decode_recorded(decode, recorded, work), torch.cat(plain.step(work)))
    for tables in recorded.tables:
        recorded.pool[tables[5]] = torch.nan
    work = decode_work(2, everyone)
    logits, expected = decode_recorded(decode, recorded, work), torch.cat(plain.step(work))
    assert logits[5].isnan().all()
    others = [row for row in everyone if row != 5]
    assert torch.equal(logits[others], expected[others])


@native_only("others record nothing")
def test_engines_of_one_process_record_and_run_at_once():
    variants = ["llama", "qwen3_mostly_sliding", "llama"]

    def decode_all(index, decodes):
        session = prefilled(variants[index], "float32", seed=index)
        _, decode = recorder_of(session)
        for step, sequences in enumerate(STEPS):
            work = decode_work(step, sequences)
            if decodes:
                yield decode_recorded(decode, session, work)
            else:
                yield torch.cat(session.step(work))

    expected = [list(decode_all(index, decodes=False)) for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda i: list(decode_all(i, decodes=True)), range(3), timeout=60))
    for got, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


class Chain:
    """Layers over an input that is changed in place; results are kept by none of them."""

    def __init__(self, num_rows, dtype, seed=0):
        self.hidden = normal(num_rows, 48, dtype=dtype, seed=seed)
        self._up = filled_weight(normal(80, 48, dtype=dtype, seed=1) / 7)
        self._gate = filled_weight(normal(96, 80, dtype=dtype, seed=2) / 9, WeightUse.GATED_LINEAR)
        self._norm = normal(48, dtype=dtype, seed=3)

    def run(self):
        wide = kernels.linear(self.hidden, self._up)
        gated = kernels.linear_silu_and_mul(wide, self._gate)
        first = kernels.rms_norm(gated, self._norm, 1e-6)
        again = kernels.linear(first, self._up, None, wide)[:, 16:64]  # rows that lie apart
        return kernels.rms_norm(again, self._norm, 1e-6)


def recorded(arena, run):
    output, step = kernels.record_step(CPU, arena, run)
    assert step is not None
    return output, step


@native_only("others record nothing")
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_of_several_sizes_share_an_arena_that_grows(dtype):
    arena, chains, steps = Arena(), [], []
    for num_rows in (1, 8, 3, 100, 2):
        chain = Chain(num_rows, dtype)
        output, step = recorded(arena, chain.run)
        assert torch.equal(output, chain.run())
        chains.append(chain)
        steps.append(step)
        for turn, (chain, step) in enumerate(zip(chains, steps, strict=True)):
            chain.hidden.copy_(normal(*chain.hidden.shape, seed=10 + turn))
            assert torch.equal(step.run(), chain.run())


@native_only("others record nothing")
def test_nothing_of_the_recorded_run_is_needed():
    chain = Chain(5, torch.float32)
    _, step = recorded(Arena(), chain.run)
    gc.collect()
    junk = [torch.full((5, size), torch.nan) for size in (48, 80, 48, 80) for _ in range(50)]
    chain.hidden.neg_()
    assert torch.equal(step.run(), chain.run())
    assert all(tensor.isnan().all() for tensor in junk)


@native_only("others record nothing")
def test_an_input_that_a_step_turns_in_place_is_read_where_it_is():
    case = make_case([(7, 1), (20, 1)], head_dim=8)
    qkv = normal(2, 10, 8)
    query, key, value = qkv.split((6, 2, 2), dim=1)
    angles = kernels.rotary_angles(torch.tensor([7, 20]), torch.ones(4), 1.0)

    def run():
        turned = kernels.rotate_and_write_kv(
            query, key, value, case.kv_layer, case.meta, rotation=angles
        )
        return kernels.paged_attention(turned, case.kv_layer, case.meta, scale=0.3)

    given = qkv.clone()
    expected, step = kernels.record_step(CPU, Arena(), run)
    assert step is not None
    qkv.copy_(given)
    assert torch.equal(step.run(), expected)


FOREIGN = [
    torch.relu,
    torch.clone,
    lambda x: x + 1,
    lambda x: x.neg_(),
    lambda x: x.t().contiguous(),
    lambda x: x.t().reshape(-1),
    lambda x: x.t().flatten(),
    lambda x: x.to(torch.float64).float(),
    lambda x: x.unbind(1)[0].contiguous(),
]


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("inference", [True, False])
def test_what_torch_computes_is_not_recorded_and_right(foreign, inference):
    chain = Chain(3, torch.float32)

    def run():
        return kernels.row_maxima(foreign(chain.run()).view(-1, 3))[0]

    with torch.inference_mode(inference):
        output, step = kernels.record_step(CPU, Arena(), run)
        assert step is None
        torch.testing.assert_close(output, run())


VIEWS = [
    lambda x: x.contiguous(),
    lambda x: x.reshape(3, 4, 12),
    lambda x: x.flatten(),
    lambda x: x.to(torch.float32),
    lambda x: x.unflatten(1, (-1, 6)).split((1, 2), dim=0)[1],
    lambda x: x.t().t(),
]


@native_only("others record nothing")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("inference", [True, False])
def test_views_are_recorded(view, inference):
    chain = Chain(3, torch.float32)
    with torch.inference_mode(inference):
        _, step = recorded(Arena(), lambda: view(chain.run()))
        chain.hidden.neg_()
        assert torch.equal(step.run(), view(chain.run()))


def test_a_result_whose_rows_lie_apart_is_not_recorded():
    chain = Chain(3, torch.float32)
    output, step = kernels.record_step(CPU, Arena(), lambda: chain.run()[:, 3:9])
    assert step is None
    assert torch.equal(output, chain.run()[:, 3:9])


@native_only("others record nothing")
def test_an_arena_that_was_outgrown_is_given_back():
    arena, steps, memories = Arena(), [], []
    for num_rows in (1, 8, 100):
        _, step = recorded(arena, Chain(num_rows, torch.float32).run)
        step.run()
        steps.append(step)
        memories.append(StorageWeakRef(arena._memory.untyped_storage()))
    gc.collect()
    assert [memory.expired() for memory in memories] == [True, True, False]


@native_only("others record nothing")
def test_long_steps_are_recorded_soon():
    """Thousands of commands: what grows with their square takes many seconds."""
    weight, hidden = torch.ones(16), normal(2, 16)

    def run():
        passed = hidden
        for _ in range(10000):
            passed = kernels.rms_norm(passed, weight, 1e-6)
        return passed

    start = time.perf_counter()
    expected, step = recorded(Arena(), run)
    assert time.perf_counter() - start < 5
    assert torch.equal(step.run(), expected)


def test_a_result_that_no_kernel_computes_is_not_recorded():
    hidden = torch.ones(2, 48)
    output, step = kernels.record_step(CPU, Arena(), lambda: hidden[:, :5])
    assert step is None
    assert torch.equal(output, torch.ones(2, 5))


@native_only("others record nothing")
def test_a_run_that_fails_leaves_nothing_behind():
    chain, arena = Chain(3, torch.float32), Arena()

    def fail():
        chain.run()
        raise LookupError

    with pytest.raises(LookupError):
        kernels.record_step(CPU, arena, fail)
    chain.run()
    _, step = recorded(arena, chain.run)
    chain.hidden.neg_()
    assert torch.equal(step.run(), chain.run())
