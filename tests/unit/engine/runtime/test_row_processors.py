"""`RowProcessors`: which state a sequence gets, and what becomes of the scores."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import kernels
from engine.batch import INVALID_TOKEN, PROCESSOR_FAILED, ProcessedText, ScheduledChunk
from engine.runtime.draws.logits_processors import LogitsProcessor, ProcessedRow, ProcessorContext
from engine.runtime.draws.row_processors import RowProcessors
from engine.runtime.draws.sampler import Scores
from tests.support.draw_params import draw_params

VOCAB_SIZE = 6
CONTEXT = ProcessorContext(VOCAB_SIZE, torch.device("cpu"), max_rows=4, max_model_len=16)
DRAW = draw_params(temperature=0.0, top_k=0, top_p=1.0, seed=0)


class Recorder(LogitsProcessor[list[int]]):
    """Its state lists the lengths of the outputs that it has seen; it adds 1 to `args["to"]`."""

    def applies_to(self, args: Mapping[str, Any]) -> bool:
        return "to" in args

    def new_state(self, row: ProcessedRow[list[int]]) -> list[int]:
        return []

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessedRow[list[int]]]) -> None:
        for row_logits, row in zip(logits, rows, strict=True):
            row.state.append(len(row.output_token_ids))
            row_logits[row.args["to"]] += 10
            if row.args.get("fails"):
                raise RuntimeError("as the test asked")
        self.seen = {row.row: tuple(row.state) for row in rows}


class Other(Recorder):
    def applies_to(self, args: Mapping[str, Any]) -> bool:
        return args.get("other", False)

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessedRow[list[int]]]) -> None:
        logits[:, 5] = torch.tensor(torch.nan if rows[0].args.get("nan") else 100.0)


def _chunk(row, sequence_id, num_output, **args):
    text = ProcessedText(sequence_id, {"to": 2, **args}, (1, 2), (3,) * num_output)
    return ScheduledChunk(row, (3,), 1 + num_output, (DRAW,), processed=text)


def _scores(num_rows):
    generator = torch.Generator().manual_seed(1)
    logits = torch.rand(num_rows, VOCAB_SIZE, generator=generator)
    return Scores(logits, *kernels.row_maxima(logits))


def _seen(processors, recorder, *chunks):
    processors.apply(list(enumerate(chunks)), _scores(len(chunks)))
    return recorder.seen


@pytest.fixture
def recorder():
    return Recorder(CONTEXT)


def test_a_state_stays_with_its_sequence(recorder):
    processors = RowProcessors((recorder,))
    first, second = (7, 0), (8, 0)
    assert _seen(processors, recorder, _chunk(0, first, 0)) == {0: (0,)}
    both = _seen(processors, recorder, _chunk(3, second, 5), _chunk(0, first, 1))
    assert both == {0: (0, 1), 3: (5,)}
    assert _seen(processors, recorder, _chunk(0, first, 4)) == {0: (0, 1, 4)}, "several tokens"
    assert _seen(processors, recorder, _chunk(3, second, 6)) == {3: (5, 6)}


def test_a_state_begins_anew_with_another_sequence_and_after_a_preemption(recorder):
    processors = RowProcessors((recorder,))
    for chunk in (_chunk(0, (7, -1), 0), _chunk(0, (7, 0), 1), _chunk(0, (7, 0), 2)):
        _seen(processors, recorder, chunk)
    assert recorder.seen == {0: (1, 2)}, "the first candidate takes the row of the prompt"
    assert _seen(processors, recorder, _chunk(0, (7, 0), 2)) == {0: (2,)}, "drawn a second time"
    assert _seen(processors, recorder, _chunk(1, (7, 0), 3)) == {1: (3,)}, "in another row"
    assert _seen(processors, recorder, _chunk(0, (7, 1), 3)) == {0: (3,)}, "another candidate"
    assert _seen(processors, recorder, _chunk(0, (9, 1), 4)) == {0: (4,)}, "another request"


def test_only_the_rows_of_the_chunks_change_with_their_maxima(recorder):
    scores, before = _scores(4), _scores(4)
    chunks = [(2, _chunk(0, (1, 0), 0)), (0, _chunk(1, (2, 0), 0, other=True))]
    RowProcessors((recorder, Other(CONTEXT))).apply(chunks, scores)
    expected = before.logits.clone()
    expected[0, 2] += 10
    expected[2, 2] += 10
    expected[0, 5] = 100
    maxima, likeliest = kernels.row_maxima(expected)
    assert torch.equal(scores.logits, expected)
    assert torch.equal(scores.maxima, maxima)
    assert torch.equal(scores.likeliest, likeliest)
    assert likeliest[[0, 2]].tolist() == [5, 2]


def test_failures_are_marked_in_their_rows_alone(recorder):
    """A processor's rows fail together if it raises; rows that it does not change go on."""
    scores, before = _scores(4), _scores(4)
    before.likeliest[3] = scores.likeliest[3] = INVALID_TOKEN  # the model's own fault
    nan, raises = {"other": True, "nan": True, "fails": False}, {"fails": True}
    chunks = [(1, _chunk(1, (2, 0), 0, **nan)), (3, _chunk(3, (4, 0), 0))]
    RowProcessors((recorder, Other(CONTEXT))).apply(chunks, scores)
    before.likeliest[1] = PROCESSOR_FAILED
    assert torch.equal(scores.likeliest, before.likeliest)
    scores = _scores(2)
    chunks = [(0, _chunk(0, (1, 0), 0, **raises)), (1, _chunk(1, (2, 0), 0, other=True))]
    del chunks[1][1].processed.args["to"]  # so that the first processor leaves it alone
    RowProcessors((recorder, Other(CONTEXT))).apply(chunks, scores)
    assert scores.likeliest.tolist() == [PROCESSOR_FAILED, 5]
