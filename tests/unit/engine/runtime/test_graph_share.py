"""The share of a decode tier's steps that are CUDA graphs: real schedules of a runner without a
model, under loads of plain, constrained and drafting requests.
"""

import random
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pytest

from baton.common.request.structured_outputs import StructuredOutputs
from engine.batch import ChunkOutput, ScheduledBatch, ScheduledChunk, StepOutput
from engine.constraints.matcher import Constraint
from engine.constraints.vocabulary import Vocabulary
from engine.loop.core import EngineCore
from engine.runtime.steps.sent_steps import SentStep
from engine.runtime.steps.step_shapes import captured_shapes, smallest_fitting
from engine.speculation import drafts
from tests.support.fake_model import fake_config, fake_info
from tests.support.fake_runner import FakeRunner
from tests.support.requests import engine_request

_VOCAB_SIZE, _MAX_LEN, _BLOCK_SIZE = 4096, 2048, 16
_MAX_DRAFTS = 4
_PERIODIC = 1  # the seed of requests whose text repeats itself
_PROMPT = tuple(range(2 * _BLOCK_SIZE))
_NUM_STEPS = 300


class _AnyText:
    """A grammar and its state, after which every token may follow."""

    num_bytes = 1

    def new_state(self):
        return self

    fork = new_state

    def fill_mask(self, row):
        row[:] = -1

    def accept(self, token_id):
        return True

    def is_complete(self):
        return False


class _Grammars:
    """A `GrammarSource` that has compiled every grammar."""

    _vocabulary = Vocabulary(tuple(b"%d" % token for token in range(_VOCAB_SIZE)), {}, ())
    retokenizer = None

    def compile(self, outputs, owner=""):
        done = Future()
        done.set_result(Constraint(_AnyText(), self._vocabulary, "structured_outputs.regex"))
        return done


class _LoadRunner(FakeRunner):
    """Draws tokens at random, or those of a text that repeats itself; keeps the batches."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._positions, self._is_periodic = {}, set()
        self._noise = random.Random(0)

    def execute(self, batch):
        self.batches.append(batch)
        chunks = tuple(self._output(chunk) for chunk in batch.chunks)
        return StepOutput(batch.step, chunks, tuple(map(self._decoded, batch.decode_rows)))

    def _output(self, chunk):
        self._positions[chunk.row] = chunk.end
        if not chunk.draws:
            return None
        is_periodic = chunk.draws[0].seed == _PERIODIC
        (self._is_periodic.add if is_periodic else self._is_periodic.discard)(chunk.row)
        drawn, draft_tokens = [], chunk.token_ids[chunk.num_tokens - chunk.num_drafts :]
        for place in range(1 + chunk.num_drafts):
            drawn.append(self._token(chunk.row, chunk.end + place))
            if draft_tokens[place : place + 1] != (drawn[-1],):
                break
        return ChunkOutput(tuple(drawn))

    def _decoded(self, row):
        self._positions[row] += 1
        return self._token(row, self._positions[row])

    def _token(self, row, position):
        if row in self._is_periodic:
            return position % 7
        return self._noise.randrange(_VOCAB_SIZE)


@dataclass(frozen=True)
class _Load:
    """Requests of a decode tier, as many as run at once; one in so many is constrained, drafts."""

    num_running: int
    mean_answer: int
    is_constrained: int = 0
    drafts: int = 0

    def request(self, number, noise):
        """Returns a request whose prompt is in the prefix cache, all but its last token."""
        kinds = {}
        if self.is_constrained and number % self.is_constrained == 0:
            kinds["structured_outputs"] = StructuredOutputs(regex=".*")
        is_periodic = self.drafts and number % self.drafts == 1
        return engine_request(
            str(number),
            (*_PROMPT, number % _VOCAB_SIZE),
            max_tokens=min(_MAX_LEN // 2, 1 + round(noise.expovariate(1 / self.mean_answer))),
            seed=_PERIODIC if is_periodic else 0,
            **kinds,
        )


def _batches(load):
    """Returns the batches of a load in its steady state."""
    speculative = {"method": "ngram", "num_speculative_tokens": _MAX_DRAFTS}
    config = fake_config(
        block_size=_BLOCK_SIZE,
        max_num_seqs=load.num_running,
        max_num_batched_tokens=2048,
        async_scheduling=True,
        speculative_config=speculative if load.drafts else None,
    )
    info = fake_info(_BLOCK_SIZE, _MAX_LEN, vocab_size=_VOCAB_SIZE)
    runner = _LoadRunner(info, 100_000, max_rows=config.max_running, submits="late")
    core = EngineCore(config, runner)
    core.scheduler._guides._grammars = _Grammars()
    noise, number = random.Random(7), 0

    def add():
        nonlocal number
        core.scheduler.add(load.request(number, noise))
        number += 1

    def on_outputs(outputs):
        for output in outputs:
            assert output.error is None
            if output.is_last:
                add()

    for _ in range(load.num_running):
        add()
        core.run_step(on_outputs)
    runner.batches.clear()
    while len(runner.batches) < _NUM_STEPS:
        core.run_step(on_outputs)
    core.close()
    return runner.batches, config


def _share(batches, config):
    """Returns the share of steps that a captured shape has room for."""
    shapes = captured_shapes(
        max_rows=config.max_running,
        max_tokens=config.max_num_batched_tokens,
        max_model_len=_MAX_LEN,
        max_drafts=config.max_drafts,
        is_last=True,
    )
    steps = [SentStep(b, np.array(b.decode_rows, np.int64), _MAX_LEN).shape for b in batches]
    return sum([smallest_fitting(shapes, step) is not None for step in steps]) / len(steps)


@pytest.mark.parametrize(
    "load",
    [
        _Load(64, 128),
        _Load(64, 128, is_constrained=3, drafts=3),
        *(
            pytest.param(load, marks=pytest.mark.slow)
            for load in (
                _Load(256, 256),
                _Load(64, 128, is_constrained=3),
                _Load(64, 128, drafts=3),
                _Load(256, 256, is_constrained=3, drafts=3),
            )
        ),
    ],
    ids=str,
)
def test_nearly_all_steps_of_a_decode_tier_are_graphs(load, monkeypatch):
    # As many drafts as allowed: what they cost is not known without measured steps.
    monkeypatch.setattr(drafts.Drafts, "committed", lambda *_: None)
    batches, config = _batches(load)
    only_decoding = sum([not batch.chunks for batch in batches]) / len(batches)
    has_drafts = any(chunk.num_drafts for batch in batches for chunk in batch.chunks)
    has_masks = any(chunk.mask for batch in batches for chunk in batch.chunks)
    assert (has_drafts, has_masks) == (load.drafts > 0, load.is_constrained > 0)
    share = _share(batches, config)
    print(f"{load}: {only_decoding:.1%} only decode, {share:.1%} fit a graph")
    assert only_decoding < 0.7
    assert share > 0.95


def test_a_long_chunk_fits_no_graph():
    chunk = ScheduledChunk(0, (1,) * 513, 0)
    config = fake_config(max_num_seqs=8, max_num_batched_tokens=2048)
    assert _share([ScheduledBatch(1, (chunk,))], config) == 0
