"""Memory that is set aside for steps, compared with formulas: logits of draft tokens in the step
that measures it, graphs, and partial results of divided contexts.
"""

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
from engine.runtime.steps.step_shapes import StepShape
from kvstore.layout import KvLayout
from tests.support.checkpoints import tiny_checkpoint
from tests.support.strict_device import StrictDevice

_CPU = torch.device("cpu")
_LAYOUT = KvLayout(1, 1, 1, 1, "float32")
_MEMORY = 1 << 40
_FLAGS = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 9,
    "max_num_batched_tokens": 96,
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


@contextmanager
def _device(num_bytes=_MEMORY):
    """Yields the stand-in. Graphs share a pool that grows to the most that one of them needs."""
    with StrictDevice().entered() as device:
        free = lambda _: num_bytes - max(device.peaks, default=0)  # noqa: E731
        with mock.patch.object(device_steps, "_free_bytes", free):
            yield device
