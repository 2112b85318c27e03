"""Attention by FlashInfer, compared with the reference; on a CPU by a stand-in for the package."""

from dataclasses import replace

import pytest
import torch

from engine.runtime.forward.flashinfer_attention import FlashInferAttention, HostSequences
from kernels import reference
from tests.support.attention_cases import make_case
from tests.support.devices import DEVICE, IS_CUDA
from tests.support.fake_flashinfer import FakeFlashInfer

_SPANS = ((0, 21), (27, 5), (16, 1), (0, 1), (100, 40))
_BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def package(monkeypatch):
    if IS_CUDA:
        pytest.importorskip("flashinfer")
    else:
        FakeFlashInfer().install(monkeypatch)


@pytest.mark.parametrize(
    ("dtype", "num_heads", "head_dim", "window", "soft_cap"),
    [
        (torch.bfloat16, 8, 128, None, None),
        (torch.float16, 2, 64, None, None),
        (torch.bfloat16, 6, 64, 1, None),
        (torch.bfloat16, 8, 64, 37, 2.0),
        (torch.float16, 4, 256, 7, 30.0),
    ],
)
def test_steps_in_turn_equal_the_reference(dtype, num_heads, head_dim, window, soft_cap):
    """The second step must not use the plan of the first, though the layer's rule is the same."""
    attention = FlashInferAttention(_BLOCK_SIZE, DEVICE)
    rule = {"scale": 0.3, "sliding_window": window, "soft_cap": soft_cap}
    for number, spans in enumerate((_SPANS, _SPANS[::-1])):
        case = make_case(
            spans,
            dtype=dtype,
            num_heads=num_heads,
            head_dim=head_dim,
            block_size=_BLOCK_SIZE,
            seed=number,
        )
        # Other slots hold KV of other sequences, and never NaN.
        case = replace(case, pool=case.pool.nan_to_num(3.0))
        meta = case.meta
        sequences = HostSequences(
            meta.query_starts.numpy(), meta.context_lens.numpy(), meta.block_tables[None].numpy()
        )
        (attend,) = attention.begin(sequences)
        there = case.on(DEVICE)
        output = attend(there.query, there.kv_layer, there.meta, **rule).float().cpu()
        expected = reference.paged_attention(
            case.query.float(), case.kv_layer.float(), meta, **rule
        )
        torch.testing.assert_close(output, expected, atol=0.02, rtol=0.02)
