"""Models whose products of few rows are Triton's, joined with norms, gates and residuals: their
logits are those of products by torch.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from engine.runtime.weights.loader import load_model
from kernels import dispatch
from kernels.triton import linear
from kernels.triton.launch import load_launch_table, replaced_launch_table
from tests.support.checkpoints import tiny_checkpoint
from tests.support.paged_session import PagedSession
from tests.support.runner_kinds import use_kernels

_VARIANTS = ("llama", "gemma3")
_RARE_VARIANTS = ("deepseek_v2", "qwen3_moe", "lfm2", "olmo2", "gpt2")


@contextmanager
def _few_row_products(is_on):
    table = load_launch_table("cpu")
    mechanisms = replace(table.mechanisms, few_row_products=is_on)
    with replaced_launch_table(replace(table, mechanisms=mechanisms)):
        yield


def _logits(model):
    """Returns the logits of a chunk of three tokens, and of a token behind it."""
    session = PagedSession(model, [8])
    return torch.cat([*session.step([(0, [5, 9, 2])]), *session.step([(0, [7])])])


@pytest.mark.parametrize(
    "variant",
    [*_VARIANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in _RARE_VARIANTS)],
)
def test_logits_are_those_of_other_products(variant, monkeypatch):
    use_kernels("torch", monkeypatch)
    products, compute = [], linear.few_rows_linear
    for name in ("linear", "linear_gated", "rms_norm"):
        implementation = dispatch.TRITON.implementations[name]
        monkeypatch.setitem(dispatch.KERNELS[name], ("cpu", torch.bfloat16), implementation)

    def count(*args):
        products.append(args)
        return compute(*args)

    monkeypatch.setattr(linear, "few_rows_linear", count)
    model = load_model(str(tiny_checkpoint(variant)), "bfloat16", "cpu", progress=False)
    with _few_row_products(False):
        expected = _logits(model)
    assert not products
    with _few_row_products(True):
        logits = _logits(model)
    # A layer has two or more, in each of two steps.
    assert len(products) >= 4 * model.model.config.num_layers
    largest = expected.abs().max()
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.05 * float(largest))
