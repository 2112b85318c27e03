"""Memory that is set aside for steps, compared with formulas: logits of draft tokens in the step
that measures it, graphs, and partial results of divided contexts.
"""

import json
import shutil
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.runtime.launch.trial_steps import TrialSteps
from engine.runtime.steps import device_steps
from engine.runtime.steps.sent_steps import SentStep
from kvstore.layout import KvLayout
from tests.support.checkpoints import tiny_checkpoint
from tests.support.strict_device import StrictDevice

_CPU = torch.device("cpu")
_LAYOUT = KvLayout(1, 1, 1, 1, "float32")
_MEMORY = 1 << 40
_HIDDEN_SIZE, _INNER_SIZE, _HEAD_DIM, _VOCAB_SIZE = 4096, 14_336, 128, 128_256
_SHAPE = {
    "hidden_size": _HIDDEN_SIZE,
    "intermediate_size": _INNER_SIZE,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": _HEAD_DIM,
    "vocab_size": _VOCAB_SIZE,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131_072,
}
_FLAGS = {
    "dtype": "bfloat16",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "block_size": 16,
}


def _measured_step(max_rows, max_tokens, num_drafts, max_model_len):
    """Returns the sizes of the step whose memory is measured, and the limits of all steps."""
    drafting = {"method": "ngram", "num_speculative_tokens": num_drafts} if num_drafts else None
    config = EngineConfig(
        model="demo",
        max_num_seqs=max_rows,
        max_num_batched_tokens=max_tokens,
        speculative_config=drafting,
    )
    batches = []
    pending = SimpleNamespace(result=lambda: None)
    steps = SimpleNamespace(
        update=batches.append, launch=lambda batch: pending, finish=lambda: None
    )
    info = SimpleNamespace(max_model_len=max_model_len, windows=(None,))
    trials = TrialSteps(config, lambda *_: steps, _LAYOUT, None, info, _CPU, num_spare_blocks=1)
    trials.run(config.max_step_tokens, config.max_running, uses_all_memory=True)
    return SentStep(batches[0], torch.empty(0).numpy(), max_model_len).shape, config


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 6), st.integers(300, 400))
def test_the_measured_step_has_as_many_tokens_and_logits_as_any(
    max_rows, max_tokens, num_drafts, max_model_len
):
    shape, config = _measured_step(max_rows, max_tokens, num_drafts, max_model_len)
    assert shape.num_tokens == max_tokens
    assert shape.num_seqs == config.max_running
    assert shape.num_logit_rows == config.max_running * (1 + config.max_drafts)
    assert shape.num_logit_rows <= max_tokens


def _bytes_of_layers(num_tokens):
    """Three rows of hidden states, gate, up and their product in bfloat16, and a float32 angle's
    cosine and sine for each pair of elements of a head.
    """
    return num_tokens * (2 * 3 * _HIDDEN_SIZE + 2 * 3 * _INNER_SIZE + 4 * _HEAD_DIM)


def _bytes_of_logits(num_rows):
    """Logits in float32, and the hidden states and angles that they are computed of."""
    return num_rows * (4 * _VOCAB_SIZE + 2 * _HIDDEN_SIZE + 4 * _HEAD_DIM)


def _bytes_of_attention(num_tokens):
    """Queries with keys and values, hidden states before and after, and the partial results of
    divided contexts: contexts are divided until the programs are twice as many as are wanted, at
    most, and each has up to 64 rows of float32 numbers and a sum.
    """
    of_tokens = num_tokens * (4 * 2 * _HIDDEN_SIZE + 4 * _HEAD_DIM)
    return of_tokens + 2 * 132 * 3 * 64 * 4 * (_HEAD_DIM + 1)


@contextmanager
def _captured(path, **flags):
    """Yields all shapes with the bytes of their graphs, and the bytes that the engine expects.

    Graphs share a pool, which grows to the most that one of them needs.
    """
    with StrictDevice().entered() as device:
        free = lambda _: _MEMORY - max(device.peaks, default=0)  # noqa: E731
        with mock.patch.object(device_steps, "_free_bytes", free):
            steps = device.steps(path, **_FLAGS, **flags)
            expected = steps.graph_bytes()
            device.peaks.clear()
            shapes = steps._graphs.largest_first()
            for shape in shapes:
                steps._bytes_of_graph(shape)
            yield list(zip(shapes, device.peaks, strict=True)), expected


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A layer of the shape of Llama-3.1-8B, of which no memory is allocated."""
    folder = tmp_path_factory.mktemp("shape") / "model"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | _SHAPE))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_drafts", "max_model_len"), [(0, 512), (0, 131_072), (4, 512)])
def test_graphs_need_the_memory_of_the_formula(num_drafts, max_model_len, path):
    drafting = {"method": "ngram", "num_speculative_tokens": num_drafts} if num_drafts else None
    flags = {"speculative_config": drafting, "max_model_len": max_model_len}
    with _captured(path, **flags) as (graphs, expected):
        num_logits = max(shape.num_logit_rows for shape, _ in graphs)
        assert num_logits == _FLAGS["max_num_seqs"] * (1 + num_drafts)
        for shape, num_bytes in graphs:
            assert num_bytes <= max(
                _bytes_of_layers(shape.num_tokens),
                _bytes_of_logits(shape.num_logit_rows),
                _bytes_of_attention(shape.num_tokens),
            )
        largest = max(num_bytes for _, num_bytes in graphs)
        assert expected == largest
        assert largest >= _bytes_of_layers(max(shape.num_tokens for shape, _ in graphs)) / 2
