"""`DeviceDecode`: a decode step from the rows' state to the tokens drawn, all on the device.

    row ids -> inputs -> forward pass -> logits and maxima      `run`
    -> tokens -> the rows' state                                `draw`

Everything it reads and writes stays where it is, and nothing in it waits for the device. `run`
depends on nothing that the host knows of a step but its size, so it can be captured as a CUDA
graph. `draw` launches no more than the rows ask for: most draw the likeliest token.

`DecodeGraphs`: decode steps recorded as CUDA graphs, one per number of rows.

A decode step of a given size launches the same kernels on the same memory every time. What
differs, the rows and their state, lies in tensors that stay where they are. So a step is
captured once per size; steps of other sizes are padded up to the next one.
"""

import gc
from collections.abc import Callable, Sequence

import numpy as np
import torch

import kernels
from engine.runtime.device import to_device
from engine.runtime.device_rows import DeviceRows
from engine.runtime.sampler import Scores, draw_kinds
from engine.runtime.steps import StepModel
from kernels import AttentionMetadata, DecodeInputs, RecordedStep

__all__ = ["DecodeGraphs", "DeviceDecode", "GraphRecorder", "capture_sizes", "padded_size"]


class DeviceDecode:
    """Runs decode steps of any size.

    Args:
        model: what runs.
        rows: whose state it reads and moves on.

    Attributes:
        row_ids: `[max_rows]` int64; the rows that decode, then the spare row.
        tokens: `[max_rows]` int64; what the last step drew.
    """

    def __init__(self, model: StepModel, rows: DeviceRows) -> None:
        self._model, self._rows = model, rows
        size, device = model.max_rows, model.device
        self.row_ids = torch.full((size,), rows.spare_row, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._maxima = torch.zeros(size, device=device)
        self._likeliest = torch.zeros(size, dtype=torch.int64, device=device)
        self._inputs = _new_inputs(model)
        self._is_random = self._is_filtered = False

    @property
    def draw_positions(self) -> torch.Tensor:
        """`[max_rows]` int64; of the tokens to draw after `run`."""
        return self._inputs.draw_positions

    def set_rows(self, row_ids: np.ndarray) -> None:
        """Takes other rows; padding follows them."""
        kinds = draw_kinds(self._rows.host.draws[row_ids])
        self._is_random, self._is_filtered = (bool(kind.any()) for kind in kinds)
        padded = np.full(self._model.max_rows, self._rows.spare_row)
        padded[: len(row_ids)] = row_ids
        self.row_ids.copy_(to_device(padded, self.row_ids.device), non_blocking=True)

    def run(self, size: int) -> torch.Tensor:
        """Runs the first `size` of `row_ids`; returns the logits, `[size, vocab]` float32."""
        model, inputs = self._model, _first(self._inputs, size)
        kernels.lay_out_decode(self._rows.state, self.row_ids[:size], model.block_size, inputs)
        kv = model.paged_kv(_metadata(inputs, model.max_model_len))
        logits = model.model.logits(model.model(inputs.token_ids, inputs.positions, kv))
        scores = self.scores(logits)
        kernels.row_maxima(logits, (scores.maxima, scores.likeliest))
        return logits

    def scores(self, logits: torch.Tensor) -> Scores:
        """Logits that `run` returned, with what it found of them."""
        size = len(logits)
        return Scores(logits, self._maxima[:size], self._likeliest[:size])

    def draw(self, scores: Scores, positions: torch.Tensor) -> None:
        """Draws the next tokens of the first rows into `tokens`, and moves their state on.

        Args:
            scores: a row each.
            positions: `[n]` int64; of the tokens to draw.
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


def _new_inputs(model: StepModel) -> DecodeInputs:
    size, device, num_groups = model.max_rows, model.device, model.num_groups

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DecodeInputs(
        token_ids=zeros(size),
        positions=zeros(size),
        draw_positions=zeros(size),
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=zeros(size, dtype=torch.int32),
        tables=zeros(num_groups, size, model.max_blocks, dtype=torch.int32),
        slots=zeros(num_groups, size),
    )


def _first(inputs: DecodeInputs, size: int) -> DecodeInputs:
    """The part of `size` rows."""
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
    """One per layer group. How long the contexts are only the device knows."""
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


_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8
_MAX_SIZE = 512

GraphRecorder = Callable[[Callable[[], torch.Tensor]], RecordedStep]
"""Records what a function launches, without running it: `kernels.CudaGraphRecorder`."""


def capture_sizes(max_rows: int) -> tuple[int, ...]:
    """The numbers of rows to capture: 1, 2, 4, then steps of 8, up to what holds `max_rows`.

    Beyond 512 rows the launches are a small part of a step, and none is captured.
    """
    largest = min(max_rows, _MAX_SIZE)
    sizes = [size for size in _SMALL_SIZES if size < largest]
    sizes += range(_SIZE_STEP, largest, _SIZE_STEP)
    return (*sizes, largest)


def padded_size(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest of `sizes`, which rise, that holds `num_rows`; None: none does."""
    return next((size for size in sizes if size >= num_rows), None)


class DecodeGraphs:
    """Graphs of decode steps, by size.

    Args:
        sizes: to capture, rising.
        run: launches a step of a size on memory that stays where it is; returns the logits.
        record: records what a function launches.
    """

    def __init__(
        self, sizes: Sequence[int], run: Callable[[int], torch.Tensor], record: GraphRecorder
    ) -> None:
        self.sizes = tuple(sizes)
        self._run, self._record = run, record
        self._graphs: dict[int, RecordedStep] = {}

    def capture(self) -> None:
        """Captures every size, the largest first: the others fit in the memory that it takes."""
        gc.collect()  # what garbage frees while a graph is captured may end the capture
        for size in reversed(self.sizes):
            self.capture_one(size)

    def capture_one(self, size: int) -> None:
        """Captures one size, after a run that compiles what it launches."""
        self._run(size)
        self._graphs[size] = self._record(lambda: self._run(size))

    def run(self, size: int) -> torch.Tensor:
        """Runs the step of one of `sizes`; returns its logits, which the next run overwrites."""
        return self._graphs[size].run()
