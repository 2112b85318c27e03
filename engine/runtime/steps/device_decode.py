"""Decode steps on the device: `DeviceDecode` runs them, `DecodeGraphs` records them.

    row ids -> inputs -> forward pass -> logits and maxima      `DeviceDecode.run`
    -> tokens -> the rows' state                                `DeviceDecode.draw`

A stage before a pipeline's last computes hidden states instead of logits, and draws nothing.

All tensors that these read and write keep their memory, and neither waits for the device. The
launches of `run` depend on the number of rows alone, so `DecodeGraphs` captures it as a CUDA
graph, once per number of rows; a step of another size is padded to the next captured one.
`draw` is not captured: it launches only what the rows need, and most draw the likeliest token.
"""

import gc
from collections.abc import Callable, Sequence

import numpy as np
import torch

import kernels
from engine.runtime.device import to_device
from engine.runtime.draws.device_rows import DeviceRows
from engine.runtime.draws.rules import RuledRows
from engine.runtime.draws.sampler import Scores
from engine.runtime.steps.steps import StepModel
from kernels import AttentionMetadata, DecodeInputs, RecordedStep, draw_kinds

__all__ = ["DecodeGraphs", "DeviceDecode", "GraphRecorder", "capture_sizes", "padded_size"]

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8
_MAX_SIZE = 512

GraphRecorder = Callable[[Callable[[], torch.Tensor]], RecordedStep]
"""Records what a function launches without running it, as `kernels.CudaGraphRecorder` does."""


class DeviceDecode:
    """Runs decode steps of any size.

    Args:
        model: the model and its limits.
        rows: the rows, whose state it reads and advances.
        hidden: `[max_tokens, hidden_size]`; hidden states of the stage before, which the caller
            fills for the rows that decode; None for the first stage.

    Attributes:
        row_ids: `[max_rows]` int64; the rows that decode, padded with the spare row.
        tokens: `[max_rows]` int64; the tokens that the last step drew.
        ruled: the rows that decode and have rules; None if none has.
    """

    ruled: RuledRows | None = None

    def __init__(self, model: StepModel, rows: DeviceRows, hidden: torch.Tensor | None) -> None:
        self._model, self._rows, self._hidden = model, rows, hidden
        size, device = model.max_rows, model.device
        self.row_ids = torch.full((size,), rows.spare_row, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._maxima = torch.zeros(size, device=device)
        self._likeliest = torch.zeros(size, dtype=torch.int64, device=device)
        self._inputs = _new_inputs(model)
        self._is_random = self._is_filtered = False

    @property
    def draw_positions(self) -> torch.Tensor:
        """`[max_rows]` int64; positions of the tokens to draw after `run`."""
        return self._inputs.draw_positions

    def set_rows(self, row_ids: np.ndarray) -> None:
        """Sets the rows that decode."""
        host, device = self._rows.host, self.row_ids.device
        kinds = draw_kinds(host.draws[row_ids])
        self._is_random, self._is_filtered = (bool(kind.any()) for kind in kinds)
        padded = np.full(self._model.max_rows, self._rows.spare_row)
        padded[: len(row_ids)] = row_ids
        self.row_ids.copy_(to_device(padded, device), non_blocking=True)
        self.ruled = RuledRows.among(row_ids, host.has_rules, device)

    def run(self, size: int) -> torch.Tensor:
        """Runs the first `size` of `row_ids`. Those that pad a step read any hidden states.

        Returns:
            The logits, `[size, vocab]` float32; of a stage before the last, hidden states,
            `[size, hidden_size]`.
        """
        model, inputs = self._model, _first(self._inputs, size)
        kernels.lay_out_decode(self._rows.state, self.row_ids[:size], model.block_size, inputs)
        kv = model.paged_kv(_metadata(inputs, model.max_model_len))
        model_input = inputs.token_ids if self._hidden is None else self._hidden[:size]
        hidden: torch.Tensor = model.model(model_input, inputs.positions, kv)
        if not model.model.part.is_last:
            return hidden
        logits = model.model.logits(hidden)
        scores = self.scores(logits)
        kernels.row_maxima(logits, (scores.maxima, scores.likeliest))
        return logits

    def scores(self, logits: torch.Tensor) -> Scores:
        """Returns logits of `run` with their maxima and likeliest tokens, which `run` computed."""
        size = len(logits)
        return Scores(logits, self._maxima[:size], self._likeliest[:size])

    def draw(self, scores: Scores, positions: torch.Tensor) -> None:
        """Draws the next tokens of the first `n` rows into `tokens`, and advances their state.

        Args:
            scores: scores of `n` rows.
            positions: `[n]` int64; positions of the tokens to draw.
        """
        size, state = len(positions), self._rows.state
        row_ids, tokens = self.row_ids[:size], self.tokens[:size]
        if self._is_random:
            kernels.draw_tokens(
                scores.logits,
                scores.maxima,
                scores.likeliest,
                state.draws,
                draw_ids=row_ids,
                positions=positions,
                filtered=self._is_filtered,
                out=tokens,
            )
        else:
            tokens.copy_(scores.likeliest)
        kernels.keep_drawn(state, row_ids, tokens)

    def advance(self, num_rows: int) -> None:
        """Advances the first `num_rows` rows, whose tokens another rank draws: the caller stores
        these before the rows decode again, if it reads tokens.
        """
        row_ids, tokens = self.row_ids[:num_rows], self.tokens[:num_rows]
        kernels.keep_drawn(self._rows.state, row_ids, tokens)


def _new_inputs(model: StepModel) -> DecodeInputs:
    size, device, num_layer_groups = model.max_rows, model.device, model.num_layer_groups

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DecodeInputs(
        token_ids=zeros(size),
        positions=zeros(size),
        draw_positions=zeros(size),
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=zeros(size, dtype=torch.int32),
        tables=zeros(num_layer_groups, size, model.max_blocks, dtype=torch.int32),
        slots=zeros(num_layer_groups, size),
    )


def _first(inputs: DecodeInputs, size: int) -> DecodeInputs:
    """Returns the inputs of the first `size` rows."""
    return DecodeInputs(
        token_ids=inputs.token_ids[:size],
        positions=inputs.positions[:size],
        draw_positions=inputs.draw_positions[:size],
        query_starts=inputs.query_starts[: size + 1],
        context_lens=inputs.context_lens[:size],
        tables=inputs.tables[:, :size],
        slots=inputs.slots[:, :size],
    )


def _metadata(inputs: DecodeInputs, max_model_len: int) -> tuple[AttentionMetadata, ...]:
    """Returns one per layer group, with the longest context possible: the host does not know
    the lengths.
    """
    return tuple(
        AttentionMetadata(
            block_tables=tables,
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens,
            slot_mapping=slots,
            max_query_len=1,
            max_context_len=max_model_len,
        )
        for tables, slots in zip(inputs.tables, inputs.slots, strict=True)
    )


def capture_sizes(max_rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows to capture: 1, 2, 4, then multiples of 8, and `max_rows`.

    Sizes above 512 are not captured: there, launching is a small part of a step's time.
    """
    largest = min(max_rows, _MAX_SIZE)
    sizes = [size for size in _SMALL_SIZES if size < largest]
    sizes += range(_SIZE_STEP, largest, _SIZE_STEP)
    return (*sizes, largest)


def padded_size(sizes: Sequence[int], num_rows: int) -> int | None:
    """Returns the smallest of the ascending `sizes` that is at least `num_rows`, if any."""
    return next((size for size in sizes if size >= num_rows), None)


class DecodeGraphs:
    """CUDA graphs of decode steps, by number of rows.

    Args:
        sizes: the numbers of rows to capture, ascending.
        run: launches a step of the given size, always on the same memory; returns the logits, or
            a stage's hidden states.
        record: records what a function launches.

    Attributes:
        sizes: the numbers of rows to capture, ascending.
    """

    def __init__(
        self, sizes: Sequence[int], run: Callable[[int], torch.Tensor], record: GraphRecorder
    ) -> None:
        self.sizes = tuple(sizes)
        self._run, self._record = run, record
        self._graphs: dict[int, RecordedStep] = {}

    def capture(self) -> None:
        """Captures every size, the largest first, because the others reuse its memory."""
        gc.collect()  # freeing garbage during a capture may abort it
        for size in reversed(self.sizes):
            self.capture_one(size)

    def capture_one(self, size: int) -> None:
        """Captures one size, after a run that compiles its kernels."""
        self._run(size)
        self._graphs[size] = self._record(lambda: self._run(size))

    def run(self, size: int) -> torch.Tensor:
        """Runs a step of a captured size; returns its result, which the next run overwrites."""
        return self._graphs[size].run()
