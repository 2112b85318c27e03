"""Recorded steps give the same bits as the steps give through Python."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import kernels
from kernels import Activation, Arena, WeightUse
from tests.support.attention_cases import make_case
from tests.support.kernel_checks import CPU, DTYPES, filled_weight, native_only, normal


class Chain:
    """Layers over an input that is changed in place; they keep no results."""

    def __init__(self, num_rows, dtype, seed=0):
        self.hidden = normal(num_rows, 48, dtype=dtype, seed=seed)
        self.up = filled_weight(normal(80, 48, dtype=dtype, seed=1) / 7)
        self._gate = filled_weight(normal(96, 80, dtype=dtype, seed=2) / 9, WeightUse.GATED_LINEAR)
        self._norm = normal(48, dtype=dtype, seed=3)

    def run(self):
        wide = kernels.linear(self.hidden, self.up)
        gated = kernels.linear_gated(wide, self._gate, None, Activation.SILU)
        first = kernels.rms_norm(gated, self._norm, 1e-6)
        again = kernels.linear(first, self.up, None, wide)[:, 16:64]  # rows with a stride
        return kernels.rms_norm(again, self._norm, 1e-6)


def recorded(arena, run):
    output, step = kernels.record_step(CPU, arena, run)
    assert step is not None
    return output.clone(), step


@native_only("other kernels record nothing")
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


@native_only("other kernels record nothing")
def test_marks_are_called_in_order():
    chain, weight, seen = Chain(5, torch.float32), torch.ones(48), []

    def run():
        kernels.mark_step(CPU, 7)
        output = chain.run()
        kernels.mark_step(CPU, 9)
        return kernels.rms_norm(output, weight, 1e-6)

    output, step = recorded(Arena(), run)
    assert torch.equal(step.run(seen.append), output)
    assert seen == [7, 9]
    assert torch.equal(step.run(), output)
    assert seen == [7, 9]


def test_a_mark_without_a_recording_does_nothing():
    kernels.mark_step(CPU, 1)


@native_only("other kernels record nothing")
def test_tensors_of_the_recorded_run_may_be_freed():
    chain = Chain(5, torch.float32)
    _, step = recorded(Arena(), chain.run)
    gc.collect()
    junk = [torch.full((5, size), torch.nan) for size in (48, 80, 48, 80) for _ in range(50)]
    chain.hidden.neg_()
    assert torch.equal(step.run(), chain.run())
    assert all(tensor.isnan().all() for tensor in junk)


@native_only("other kernels record nothing")
def test_later_commands_do_not_overwrite_the_result():
    chain, other = Chain(5, torch.float32), Chain(5, torch.float32, seed=9)

    def run():
        output = chain.run()
        other.run()
        return output

    _, step = recorded(Arena(), run)
    chain.hidden.neg_()
    assert torch.equal(step.run(), chain.run())


@native_only("other kernels record nothing")
def test_recordings_of_other_threads_are_separate():
    chain, other = Chain(5, torch.float32), Chain(5, torch.float32, seed=9)

    def run():
        chain.run()
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(recorded, Arena(), other.run).result(timeout=60)[1])
        return chain.run()

    others = []
    _, step = recorded(Arena(), run)
    for hidden in (chain.hidden, other.hidden):
        hidden.neg_()
    assert torch.equal(step.run(), chain.run())
    assert torch.equal(others[0].run(), other.run())


@native_only("other kernels record nothing")
def test_an_input_that_a_step_rotates_in_place_keeps_its_address():
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
    expected = run()
    qkv.copy_(given)
    output, step = recorded(Arena(), run)
    assert torch.equal(output, expected)
    qkv.copy_(given)
    assert torch.equal(step.run(), expected)


@native_only("other kernels record nothing")
def test_outputs_of_recorded_commands_are_not_written(poisoned_memory):
    chain, norm, written = Chain(5, torch.float32), torch.ones(80), []

    def run():
        written.append(kernels.linear(chain.hidden, chain.up))
        return kernels.rms_norm(written[-1], norm, 1e-6)

    output, _ = recorded(Arena(), run)
    assert written[0].isnan().all()
    assert torch.equal(output, run())


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
def test_steps_with_torch_operations_are_correct_and_not_recorded(foreign, inference):
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


@native_only("other kernels record nothing")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("inference", [True, False])
def test_views_are_recorded(view, inference):
    chain = Chain(3, torch.float32)
    with torch.inference_mode(inference):
        _, step = recorded(Arena(), lambda: view(chain.run()))
        chain.hidden.neg_()
        assert torch.equal(step.run(), view(chain.run()))


@native_only("other kernels record nothing")
def test_a_step_with_an_empty_result_is_computed():
    case = make_case([(7, 1), (20, 1)], head_dim=8)
    states, value = normal(2, 8, 8), normal(2, 2, 8, seed=1)
    pool, no_rows = case.pool.clone(), torch.empty(0, dtype=torch.int64)

    def run():
        query, key = states.split((6, 2), dim=1)
        query = kernels.rotate_and_write_kv(query, key, value, case.kv_layer, case.meta)
        return kernels.take_rows(query.flatten(1), no_rows)

    output, step = recorded(Arena(), run)
    written = case.pool.clone()
    case.pool.copy_(pool)
    assert step.run().shape == output.shape == (0, 48)
    assert torch.equal(case.pool.view(torch.int32), written.view(torch.int32))
    assert not torch.equal(pool.view(torch.int32), written.view(torch.int32))


@native_only("other kernels record nothing")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_kept_in_memory_of_the_caller(dtype):
    chain, rows = Chain(5, dtype), torch.tensor([3, 0])
    kept = torch.full((2, 2, 48), torch.nan, dtype=dtype)

    def run():
        output = chain.run()
        kernels.take_rows(output, rows, kept[1])
        return chain.run()

    output, step = recorded(Arena(), run)
    for seed in (1, 2):
        assert torch.equal(kept[1], output[rows])
        chain.hidden.copy_(normal(*chain.hidden.shape, seed=seed))
        kept[1].fill_(torch.nan)
        output = step.run()
    assert kept[0].isnan().all()


def test_a_strided_result_is_not_recorded():
    chain = Chain(3, torch.float32)
    output, step = kernels.record_step(CPU, Arena(), lambda: chain.run()[:, 3:9])
    assert step is None
    assert torch.equal(output, chain.run()[:, 3:9])


@native_only("other kernels record nothing")
def test_memory_of_an_outgrown_arena_is_freed():
    arena, kept, memories = Arena(), [], []
    for num_rows in (1, 8, 100):
        chain = Chain(num_rows, torch.float32)
        _, step = recorded(arena, chain.run)
        step.run()
        kept.append((chain, step))
        memories.append(StorageWeakRef(arena._memory.untyped_storage()))
    gc.collect()
    assert [memory.expired() for memory in memories] == [True, True, False]


@native_only("other kernels record nothing")
@pytest.mark.timeout(60)
def test_long_steps_are_recorded_quickly():
    """Tens of thousands of commands: anything quadratic in them takes minutes."""
    weight, hidden = torch.ones(16), normal(2, 16)

    def run():
        passed = hidden
        for _ in range(30000):
            passed = kernels.rms_norm(passed, weight, 1e-6)
        return passed

    expected, step = recorded(Arena(), run)
    assert torch.equal(step.run(), expected)


def test_a_result_that_no_kernel_computes_is_not_recorded():
    hidden = torch.ones(2, 48)
    output, step = kernels.record_step(CPU, Arena(), lambda: hidden[:, :5])
    assert step is None
    assert torch.equal(output, torch.ones(2, 5))


@native_only("other kernels record nothing")
def test_a_failed_run_does_not_affect_later_recordings():
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
