"""`RowProcessors`: applies logits processors to the logits of a step's chunks.

Rows of requests with processors never decode: each of their steps is a chunk of known tokens.
So the processors get all tokens, and steps without such chunks do nothing here.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import kernels
from engine.batch import PROCESSOR_FAILED, ProcessedText, ScheduledChunk
from engine.runtime.device import to_device
from engine.runtime.draws.logits_processors import LogitsProcessor, ProcessedRow, processors_for
from engine.runtime.draws.sampler import Scores

__all__ = ["RowProcessors"]

_logger = logging.getLogger("baton.engine")


@dataclass(slots=True)
class _RunningSequence:
    """A sequence in a row, and its state in each processor that applies to it.

    Attributes:
        text: the text of its last step.
        rows: by processor, as `LogitsProcessor.apply` gets it.
    """

    text: ProcessedText
    rows: dict[LogitsProcessor[Any], ProcessedRow[Any]] = field(default_factory=dict)

    def precedes(self, text: ProcessedText) -> bool:
        """Returns whether the states are those before `text`.

        They are not if a preempted sequence draws a token again.
        """
        is_same = self.text.sequence_id == text.sequence_id
        return is_same and len(self.text.output_token_ids) < len(text.output_token_ids)


class RowProcessors:
    """The processors of an engine, and the sequences that they apply to.

    Args:
        processors: the processors, in the order in which they change logits.
    """

    def __init__(self, processors: Sequence[LogitsProcessor[Any]]) -> None:
        self._processors = processors
        self._sequences: dict[int, _RunningSequence] = {}  # by row

    @torch.inference_mode()
    def apply(self, processed: Sequence[tuple[int, ScheduledChunk]], scores: Scores) -> None:
        """Changes the logits of chunks in place, and recomputes their maxima.

        If a processor fails on a row, the row's likeliest token is `PROCESSOR_FAILED`.

        Args:
            processed: pairs of a row of the scores and the chunk that draws from it, whose
                `processed` is set; one or more.
            scores: the step's scores, as the model computed them.
        """
        device = scores.logits.device
        indices = np.array([place for place, _ in processed], np.int64)
        logits, places = _select_rows(scores.logits, indices), to_device(indices, device)
        has_failed = self._apply([chunk for _, chunk in processed], logits)
        maxima, likeliest = kernels.row_maxima(logits)
        is_valid = (likeliest >= 0) & ~to_device(has_failed, device)
        model_likeliest = scores.likeliest.index_select(0, places)
        likeliest = likeliest.where(is_valid, PROCESSOR_FAILED).where(
            model_likeliest >= 0, model_likeliest
        )
        _put_back(scores.logits, indices, logits)
        scores.maxima.index_copy_(0, places, maxima)
        scores.likeliest.index_copy_(0, places, likeliest)

    def _apply(self, chunks: Sequence[ScheduledChunk], logits: torch.Tensor) -> np.ndarray:
        """Lets the processors change `[n, vocab]` logits of the chunks.

        Returns:
            `[n]` bool; whether a processor raised an exception.
        """
        has_failed = np.zeros(len(chunks), bool)
        running = [self._sequence_of(chunk) for chunk in chunks]
        for index, sequence in enumerate(running):
            has_failed[index] = sequence is None
        for processor in self._processors:
            rows = {
                index: sequence.rows[processor]
                for index, sequence in enumerate(running)
                if sequence is not None and processor in sequence.rows and not has_failed[index]
            }
            if rows and not _apply_one(processor, rows, logits):
                has_failed[list(rows)] = True
        return has_failed

    def _sequence_of(self, chunk: ScheduledChunk) -> _RunningSequence | None:
        """Returns a chunk's sequence with its present text; None if a processor failed."""
        text = chunk.processed
        assert text is not None
        sequence = self._sequences.get(chunk.row)
        if sequence is None or not sequence.precedes(text):
            self._sequences.pop(chunk.row, None)
            try:
                sequence = self._new_sequence(chunk.row, text)
            except Exception:
                _logger.exception("a logits processor failed to begin a sequence")
                return None
            self._sequences[chunk.row] = sequence
        sequence.text = text
        for row in sequence.rows.values():
            row.output_token_ids = text.output_token_ids
        return sequence

    def _new_sequence(self, index: int, text: ProcessedText) -> _RunningSequence:
        sequence = _RunningSequence(text)
        for processor in processors_for(self._processors, text.args):
            row = ProcessedRow[Any](
                index, text.args, text.prompt_token_ids, text.output_token_ids, state=None
            )
            row.state = processor.new_state(row)
            sequence.rows[processor] = row
        return sequence


def _apply_one(
    processor: LogitsProcessor[Any], rows: dict[int, ProcessedRow[Any]], logits: torch.Tensor
) -> bool:
    """Lets a processor change some rows of `logits`; returns whether it raised no exception.

    It sees only its own rows.

    Args:
        processor: the processor.
        rows: by row of `logits`.
        logits: `[n, vocab]`.
    """
    indices = np.array(list(rows), np.int64)
    changed = _select_rows(logits, indices)
    shape = changed.shape
    try:
        processor.apply(changed, tuple(rows.values()))
        if changed.shape != shape:
            raise ValueError(f"the shape of the logits became {tuple(changed.shape)}")
    except Exception:
        _logger.exception("logits processor %s failed", type(processor).__qualname__)
        return False
    _put_back(logits, indices, changed)
    return True


def _has_gaps(indices: np.ndarray) -> bool:
    """Returns whether ascending indices leave some out between the first and the last."""
    return int(indices[-1]) + 1 - int(indices[0]) != len(indices)


def _select_rows(logits: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
    """Returns some rows: the same memory if the ascending indices have no gaps, else a copy."""
    if _has_gaps(indices):
        return logits.index_select(0, to_device(indices, logits.device))
    return logits[int(indices[0]) : int(indices[-1]) + 1]


def _put_back(logits: torch.Tensor, indices: np.ndarray, rows: torch.Tensor) -> None:
    """Writes rows that `_select_rows` returned into `logits`, unless they share its memory."""
    if _has_gaps(indices):
        logits.index_copy_(0, to_device(indices, logits.device), rows)
