"""A step that computes logits of some tokens only gives the logits and KV of a full step."""

import pytest
import torch

from tests.support.checkpoints import HYBRIDS, VARIANTS, prompt_of
from tests.support.kernel_checks import native_only
from tests.support.paged_session import PagedSession, loaded

LENGTHS = (150, 40, 9, 70)
PROMPTS = [prompt_of(length, seed=length) for length in LENGTHS]
# Each step: (sequence, number of tokens) in order, and the indices whose logits are wanted.
STEPS = [
    ([(0, 60), (1, 33)], []),
    ([(2, 8), (0, 1), (1, 1)], [1]),
    ([(0, 70), (3, 40)], [1]),
    ([(2, 1), (1, 2), (0, 18), (3, 1)], [0, 2, 3]),
    ([(3, 29), (1, 1), (0, 1)], [0, 1, 2]),
    ([(1, 1)], []),
    ([(1, 2)], [0]),
]


def run(variant, dtype, selects_rows):
    """Returns the logits of each step's chosen tokens, and the pool."""
    session = PagedSession(loaded(variant, dtype), LENGTHS)
    logits = []
    for step, wanted in STEPS:
        work = [(i, PROMPTS[i][session.done[i] :][:length]) for i, length in step]
        if selects_rows:
            logits.append(session.step_with_logits_of(work, wanted))
        else:
            whole = session.step(work)
            logits.append(torch.stack([whole[i][-1] for i in wanted]) if wanted else whole[0][:0])
    assert session.done == list(LENGTHS)
    return logits, session.pool


@native_only("torch's sums depend on the size of a batch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", [*VARIANTS, *HYBRIDS])
def test_logits_of_some_tokens_equal_those_of_all_bit_for_bit(variant, dtype):
    some, pool = run(variant, dtype, selects_rows=True)
    everything, expected_pool = run(variant, dtype, selects_rows=False)
    for got, expected in zip(some, everything, strict=True):
        assert got.shape == expected.shape
        assert got.isfinite().all()
        assert torch.equal(got, expected)
    assert torch.equal(pool.view(torch.int16), expected_pool.view(torch.int16))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_some_tokens_are_close_to_those_of_all(variant):
    some, _ = run(variant, "float32", selects_rows=True)
    everything, _ = run(variant, "float32", selects_rows=False)
    for got, expected in zip(some, everything, strict=True):
        torch.testing.assert_close(got, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("variant", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("wanted", [[], [0], [1, 2]])
def test_the_last_layer_computes_only_the_chosen_tokens(variant, wanted):
    session = PagedSession(loaded(variant, "float32"), LENGTHS)
    counts = []
    hooks = [
        module.register_forward_hook(lambda _module, inputs, _out: counts.append(len(inputs[0])))
        for name, module in session.model.model.named_modules()
        if name.endswith((".mlp", ".fc1"))
    ]
    try:
        session.step_with_logits_of([(0, PROMPTS[0]), (1, PROMPTS[1]), (2, PROMPTS[2])], wanted)
    finally:
        for hook in hooks:
            hook.remove()
    num_tokens = sum(LENGTHS[:3])
    assert counts == [*[num_tokens] * (len(hooks) - 1), len(wanted)]
