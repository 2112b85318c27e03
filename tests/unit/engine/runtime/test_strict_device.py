"""The steps of a GPU on the strict stand-in: what graphs forbid, what is compiled while serving,
what a step sends, and the memory that graphs allocate.
"""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import ProcessedText, ScheduledBatch, ScheduledChunk, TableUpdate
from engine.draw_params import LogitRules
from kernels import EngineRanks
from kernels.triton.launch import load_launch_table, replaced_launch_table
from tests.support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from tests.support.draw_params import GREEDY, draw_params
from tests.support.logits_processors import FLAG
from tests.support.strict_device import GPU, RefusedError, StrictDevice

pytestmark = pytest.mark.timeout(600)

_FLAGS = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 9,
    "max_num_batched_tokens": 96,
    "block_size": 16,
}
_FILTERED = draw_params(temperature=0.7, top_k=20, top_p=0.9, seed=3)
_RULED = replace(_FILTERED, rules=LogitRules(1, bias=((3, 1.0),)))
_MASK = b"\xff" * (-(-VOCAB_SIZE // 32) * 4)
_VARIANTS = ("llama",)
_RARE_VARIANTS = (
    "deepseek_v2",
    "qwen3_moe",
    "lfm2",
    "gpt2",
    "qwen2_alternating",
    "qwen3_5",
    "gpt_oss",
)


@contextmanager
def _serving(model="llama", stage=None, **flags):
    """Yields the stand-in and warmed-up steps on it, of a variant or a checkpoint's folder."""
    path = model if isinstance(model, Path) else tiny_checkpoint(model)
    with StrictDevice().entered() as device:
        steps = device.steps(path, stage, **(_FLAGS | flags))
        if stage is not None:
            stage.steps = steps
        device.warm_up(steps)
        yield device, steps


# All methods are None, and the group too.
_NoRanks = type("_NoRanks", (EngineRanks,), dict.fromkeys(EngineRanks.__abstractmethods__))


class _Stage(_NoRanks):
    """One of two stages of a rank each; what it gets from the other one is unset.

    Attributes:
        steps: the stage's steps.
        num_received: hidden states and tokens that have come.
    """

    def __init__(self, stage):
        self.stage, self.rank = stage, 1 - stage
        self.size = self.num_stages = self.num_local = 2
        self.steps = None
        self.num_received = 0

    def receive_hidden(self, hidden):
        self.num_received += 1

    def receive_tokens(self, *, waits=True):
        self.num_received += 1
        return np.zeros(len(self.steps._tokens._undrawn[0]), np.int64).tobytes()


def _chunk(row, num_tokens=1, start=40, draw=GREEDY, **fields):
    return ScheduledChunk(row, (5,) * num_tokens, start, (draw,), **fields)


# Steps in turn; True for those that are graphs.
_STEPS = [
    ((_chunk(0, 33, 0), _chunk(1, 7, 0, _FILTERED)), (), True),
    ((), (0, 1), True),
    ((_chunk(2),), (0, 1), True),
    ((_chunk(2, draw=_FILTERED), _chunk(3, draw=_RULED, wants_logprobs=True)), (0, 1), True),
    ((), (0, 1, 2, 3), True),
    ((_chunk(4, mask=_MASK), _chunk(5, 3, mask=_MASK, num_logprobs=2)), (3, 0, 2), True),
    ((_chunk(4, draw=_RULED),), (0, 1, 2, 3), True),
    ((_chunk(6, 5, num_drafts=4), _chunk(7, 2, num_drafts=1, draw=_FILTERED)), (0, 1, 3), True),
    ((_chunk(6, 5, num_drafts=4, mask=_MASK, draft_masks=(_MASK,) * 4),), (4,), True),
    ((replace(_chunk(5, 3), draws=(), num_top=4), _chunk(8, 50, 3)), (1,), True),
    ((replace(_chunk(5, 9), draws=()),), (), True),
    ((replace(_chunk(5, 9), draws=(_FILTERED,) * 3),), (1,), True),
    ((replace(_chunk(5, 9, 0), prompt_targets=(7,) * 8, num_prompt_logprobs=2),), (1,), False),
]


@pytest.mark.parametrize(
    "variant",
    [*_VARIANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in _RARE_VARIANTS)],
)
def test_steps_of_a_family_are_graphs_and_compile_nothing(variant):
    drafting = {"method": "ngram", "num_speculative_tokens": 4}
    with _serving(variant, speculative_config=drafting) as (device, steps):
        for number, (chunks, decode_rows, is_graph) in enumerate(_STEPS, 1):
            counts = device.run(steps, ScheduledBatch(number, chunks, decode_rows))
            assert counts.replays == is_graph, number


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_steps_of_a_stage_are_graphs_and_compile_nothing(stage):
    """Hidden states come to the second stage, and tokens to the first, from the host."""
    ranks = _Stage(stage)
    with _serving("llama_four_layers", ranks) as (device, steps):
        num_before = ranks.num_received
        for number, (chunks, decode_rows, is_graph) in enumerate(_STEPS[:7], 1):
            counts = device.run(steps, ScheduledBatch(number, chunks, decode_rows))
            assert counts.replays == is_graph, number
        # The tokens of the last step come before the next one.
        assert ranks.num_received - num_before == (7 if stage else 6)


def test_logits_processors_follow_graphs_and_wait_for_nothing():
    steered = _chunk(2, processed=ProcessedText((1, 0), {"steer": 3}, (5,) * 40, ()))
    with _serving(logits_processors=FLAG[:1]) as (device, steps):
        device.run(steps, ScheduledBatch(0, (_chunk(0), _chunk(1))))
        later = replace(steered.processed, output_token_ids=(7,))
        for number, text in enumerate((steered.processed, later), 1):
            chunk = replace(steered, processed=text)
            batch = ScheduledBatch(number, (chunk, _chunk(3)), (0, 1))
            assert device.run(steps, batch).replays == 1


def test_a_step_sends_what_it_needs_at_once():
    with _serving() as (device, steps):
        device.run(steps, ScheduledBatch(0, (_chunk(0), _chunk(1))))
        rows, update = (0, 1), TableUpdate(0, 0, 1, (0,))
        joining = ScheduledBatch(1, (_chunk(2, draw=_FILTERED),), rows, (update,))
        counts = [
            device.run(steps, batch).sent
            for batch in (
                joining,
                ScheduledBatch(2, decode_rows=(*rows, 2)),
                ScheduledBatch(3, (_chunk(3, 30, 0),), (*rows, 2)),
            )
        ]
        assert counts == [1, 1, 1]
        decoding = ScheduledBatch(4, decode_rows=rows)
        device.run(steps, decoding)
        assert device.run(steps, replace(decoding, step=5)).sent == 0
        assert device.run(steps, replace(decoding, step=6, table_updates=(update,))).sent == 1


def test_a_joining_request_launches_little():
    """Besides the graph: positions, draw parameters, draws, and what follows them, views included.

    The same step without a graph launches more than that for three layers.
    """
    with _serving() as (device, steps):
        device.run(steps, ScheduledBatch(0, (_chunk(0), _chunk(1))))
        device.run(steps, ScheduledBatch(1, decode_rows=(0, 1)))
        counts = device.run(steps, ScheduledBatch(2, (_chunk(2),), (0, 1)))
        assert counts.launches < 50


def test_norms_and_gates_of_few_rows_are_parts_of_products():
    path = tiny_checkpoint("llama")
    table, launches = load_launch_table("NVIDIA H200"), []
    joined, apart = "_few_rows_kernel", "_gate_rows_kernel"
    for is_on in (False, True):
        mechanisms = replace(table.mechanisms, few_row_products=is_on)
        with (
            StrictDevice().entered() as device,
            replaced_launch_table(replace(table, mechanisms=mechanisms)),
        ):
            steps = device.steps(path, **_FLAGS, enforce_eager=True)
            device.run(steps, ScheduledBatch(0, (_chunk(0),)))
            launches.append(device.run(steps, ScheduledBatch(1, decode_rows=(0,))).launches)
            launched = {version[0] for version in device.versions}
            assert {joined, apart} & launched == {joined if is_on else apart}
            num_layers = steps._model.model.config.num_layers
    # Two norms and a gate.
    assert launches[1] <= launches[0] - 3 * num_layers


@pytest.mark.parametrize("vocab_size", [50_257, 32_001])
def test_vocabularies_of_any_size_compile_nothing_while_serving(vocab_size, tmp_path):
    """Logits of a row that decodes begin at any address behind those of chunks."""
    path = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"vocab_size": vocab_size}
    (path / "config.json").write_text(json.dumps(config))
    with _serving(path) as (device, steps):
        for number, (chunks, decode_rows, _) in enumerate(_STEPS[:5], 1):
            device.run(steps, ScheduledBatch(number, chunks, decode_rows))


class TestRefusals:
    """The stand-in refuses what a graph cannot bear."""

    @pytest.mark.parametrize(
        "run",
        [
            lambda numbers: numbers[int(numbers.sum())],
            lambda numbers: numbers[numbers > 0],
            lambda numbers: numbers + torch.ones(3),
            lambda numbers: torch.ones(3).pin_memory(),
            lambda numbers: torch.cuda.Stream(),
        ],
        ids=["read", "shape of data", "tensor of the CPU", "pinned memory", "stream"],
    )
    def test_in_a_capture(self, run):
        with StrictDevice().entered() as device:
            numbers = torch.zeros(3, device=GPU)
            with pytest.raises(RefusedError):
                device.record(lambda: run(numbers))

    def test_tensors_that_outlive_the_capture(self):
        kept = []
        with StrictDevice().entered() as device:
            result = torch.zeros(3, device=GPU)

            def run():
                kept.append(result + 1)
                return result.copy_(kept[-1])

            with pytest.raises(RefusedError, match="live on"):
                device.record(run)
            kept.clear()
            device.record(lambda: result.copy_(result + 1))
        assert device.peaks == [12]
